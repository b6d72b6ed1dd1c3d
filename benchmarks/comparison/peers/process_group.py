"""Processes that form a Gloo group: the first measures, the others take part in the same steps."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.comparison.peers.command import Measure, Request, cores, read_request, report

COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
NO_EXCHANGE = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier")


def run_group(measures: dict[str, Measure]) -> None:
    request = read_request()
    with socket.socket() as probe:  # a port that is free now
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_run_member, (request, port, measures[request.workload]), request.workers)


def _run_member(rank: int, request: Request, port: int, measure: Measure) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(max(1, cores() // request.workers))
    torch.manual_seed(0)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=request.workers)
    try:
        cases = measure(request)
        if rank == 0:
            report(cases, {"torch": torch.__version__})
        dist.barrier()
    finally:
        dist.destroy_process_group()


def agree(count: int) -> int:
    """The first process's number."""
    shared = torch.tensor([count])
    dist.broadcast(shared, 0)
    return int(shared)


def largest(number: float) -> float:
    """The largest number of all processes."""
    shared = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.item()


class Exchanges(TorchDispatchMode):
    """Counts the collectives inside, and the bytes of the largest tensor of each: the whole that is reduced or
    gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # counted as the ops that it is made of
        result = func(*args, **(kwargs or {}))
        if func.namespace in COLLECTIVES and func._opname not in NO_EXCHANGE:
            self.sizes.append(max((x.nbytes for x in _tensors((args, result))), default=0))
        return result

    def figures(self) -> dict[str, float]:
        return {"MB a step": sum(self.sizes) / 1e6, "exchanges": len(self.sizes)}


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [x for each in value for x in _tensors(each)]
    return []
