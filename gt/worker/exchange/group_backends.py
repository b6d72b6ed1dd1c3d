"""Collectives, sends and receives of a process group, by Gloo or by NCCL."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeAlias

import torch

from gt.worker.exchange.distributed_private import (
    abort_gloo_group,
    all_gather_bytes,
    all_to_all_bytes,
    end_coalescing,
    start_coalescing,
)

PIECE_BYTES = 1 << 22  # of the sends and receives of a message


class SpareMemory:
    """Memory of a group for a member that has none left: what it sends then has all flags set, and what it receives is
    dropped. The members add up `lacking` to agree on an exchange."""

    def __init__(self, device: torch.device) -> None:
        self.lacking = torch.zeros(1, dtype=torch.int32)
        self._flags, self._dropped = torch.empty(2, PIECE_BYTES, dtype=torch.uint8, device=device)

    def sent(self, buffer: torch.Tensor | Exception, nbytes: int) -> Sequence[torch.Tensor]:
        """The pieces of a message that is sent from a buffer, or from this memory if that is lacking."""
        if isinstance(buffer, torch.Tensor):
            return buffer.split(PIECE_BYTES)
        return _repeated(self._flags.fill_(1), nbytes)

    def received(self, buffer: torch.Tensor | Exception, nbytes: int) -> Sequence[torch.Tensor]:
        """The pieces of a message that is received into a buffer, or into this memory if that is lacking."""
        return buffer.split(PIECE_BYTES) if isinstance(buffer, torch.Tensor) else _repeated(self._dropped, nbytes)


def _repeated(piece: torch.Tensor, nbytes: int) -> Sequence[torch.Tensor]:
    return [piece[: nbytes - start] for start in range(0, nbytes, PIECE_BYTES)]


class GlooGroup:
    """A process group whose bytes go through the memory of the CPU. A wait for one of its works blocks this process."""

    name = "gloo"
    blocks = True
    device = torch.device("cpu")

    def __init__(self, group: Any) -> None:
        self._group = group
        self.spare = SpareMemory(self.device)

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


class CommunicationStream:
    """The one stream of a GPU on which the exchanges of all its groups run, one after the other. Kernels of different
    communicators that start in different orders on different GPUs would wait for each other for ever."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def following(self, launch: Launch) -> Generator[None]:
        """Kernels launched inside run after all kernels that the computation has launched. The host does not wait."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
            launch.event = self._stream.record_event()

    def use(self, *buffers: torch.Tensor) -> None:
        """Keep the memory of buffers, even of freed ones, until the exchanges that use it are done."""
        for buffer in buffers:
            buffer.record_stream(self._stream)


class Launch:
    """An exchange of a GPU that was launched, or will be when its sends and receives are complete."""

    def __init__(self) -> None:
        self.event: torch.cuda.Event | None = None

    def wait(self, timeout: timedelta) -> None:
        """Let the computation that follows wait for the exchange. The host does not wait, so needs no timeout."""
        assert self.event is not None, "the sends and receives are launched together, before any of them is waited for"
        self.event.wait()

    def is_completed(self) -> bool:
        return True


class NcclGroup:
    """A process group of GPUs. The sends and receives of one exchange are launched together, or they would wait for
    each other."""

    name = "nccl"
    blocks = False

    def __init__(self, group: Any, device: torch.device, stream: CommunicationStream) -> None:
        self.device = device
        self.spare = SpareMemory(device)
        self._group = group
        self._stream = stream
        self._launch = Launch()

    def all_reduce(self, buffer: torch.Tensor) -> Launch:
        return self._launched(lambda: self._group.allreduce([buffer]), buffer)

    def all_gather(self, rows: torch.Tensor, mine: torch.Tensor) -> Launch:
        return self._launched(lambda: all_gather_bytes(self._group, rows, mine), rows, mine)

    def all_to_all(self, rows: torch.Tensor, mine: torch.Tensor) -> Launch:
        return self._launched(lambda: all_to_all_bytes(self._group, rows, mine), rows, mine)

    def _launched(self, collective: Callable[[], Any], *buffers: torch.Tensor) -> Launch:
        launch = Launch()
        with self._stream.following(launch):
            collective().wait()  # NCCL has a stream of its own: ours waits for it, and the host does not
        self._stream.use(*buffers)
        return launch

    @contextmanager
    def coalesced(self) -> Generator[None]:
        launch = self._launch = Launch()
        with self._stream.following(launch):
            start_coalescing(self._group)
            try:
                yield
            finally:
                end_coalescing(self._group).wait()

    def abort(self) -> None:
        self._group.abort()

    def send(self, buffer: torch.Tensor, rank: int) -> Launch:
        self._group.send([buffer], rank, 0)
        self._stream.use(buffer)
        return self._launch

    def receive(self, buffer: torch.Tensor, rank: int) -> Launch:
        self._group.recv([buffer], rank, 0)
        self._stream.use(buffer)
        return self._launch


GroupBackend: TypeAlias = GlooGroup | NcclGroup


def can_use_nccl(gpus: Sequence[str]) -> bool:
    """Whether these workers, given by the uuids of their GPUs, have a GPU each: NCCL connects only those."""
    return all(gpus) and len(set(gpus)) == len(gpus)
