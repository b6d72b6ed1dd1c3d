"""Collectives, sends and receives of a process group, by Gloo or by NCCL."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeAlias

import torch

from gt.worker.exchange.torch_private import (
    abort_gloo_group,
    all_gather_bytes,
    all_to_all_bytes,
    end_coalescing,
    start_coalescing,
)


class GlooGroup:
    """A process group whose bytes go through the memory of the CPU."""

    name = "gloo"
    device = torch.device("cpu")

    def __init__(self, group: Any) -> None:
        self._group = group

    def all_reduce(self, buffer: torch.Tensor) -> Any:
        return self._group.allreduce([buffer])

    def all_gather(self, rows: torch.Tensor, mine: torch.Tensor) -> Any:
        return all_gather_bytes(self._group, rows, mine)

    def all_to_all(self, rows: torch.Tensor, mine: torch.Tensor) -> Any:
        return all_to_all_bytes(self._group, rows, mine)

    def coalesced(self) -> AbstractContextManager[None]:
        return nullcontext()

    def abort(self) -> None:
        abort_gloo_group(self._group)

    def send(self, buffer: torch.Tensor, rank: int) -> Any:
        return self._group.send([buffer], rank, 0)

    def receive(self, buffer: torch.Tensor, rank: int) -> Any:
        return self._group.recv([buffer], rank, 0)


class NcclGroup:
    """A process group of GPUs. The sends and receives of one exchange are launched together, or they would wait for
    each other. None has begun before the launch, so the launch is what callers wait for."""

    name = "nccl"

    def __init__(self, group: Any, device: torch.device) -> None:
        self.device = device
        self._group = group
        self._launch = Launch()

    def all_reduce(self, buffer: torch.Tensor) -> Launch:
        return Launch(self._group.allreduce([buffer]))

    def all_gather(self, rows: torch.Tensor, mine: torch.Tensor) -> Launch:
        return Launch(all_gather_bytes(self._group, rows, mine))

    def all_to_all(self, rows: torch.Tensor, mine: torch.Tensor) -> Launch:
        return Launch(all_to_all_bytes(self._group, rows, mine))

    @contextmanager
    def coalesced(self) -> Generator[None]:
        launch = self._launch = Launch()
        start_coalescing(self._group)
        try:
            yield
        finally:
            launch.work = end_coalescing(self._group)

    def abort(self) -> None:
        self._group.abort()

    def send(self, buffer: torch.Tensor, rank: int) -> Launch:
        self._group.send([buffer], rank, 0)
        return self._launch

    def receive(self, buffer: torch.Tensor, rank: int) -> Launch:
        self._group.recv([buffer], rank, 0)
        return self._launch


class Launch:
    """A collective, or the coalesced sends and receives of a group, whose `work` is set when they are launched."""

    def __init__(self, work: Any = None) -> None:
        self.work = work

    def wait(self, timeout: timedelta) -> None:
        """The GPU's stream waits and this thread does not, so the timeout is not needed."""
        self.work.wait()

    def is_completed(self) -> bool:
        return True


GroupBackend: TypeAlias = GlooGroup | NcclGroup


def can_use_nccl(gpus: Sequence[str]) -> bool:
    """Whether these workers, given by the uuids of their GPUs, have a GPU each: NCCL connects only those."""
    return all(gpus) and len(set(gpus)) == len(gpus)
