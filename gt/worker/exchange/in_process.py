"""Exchanges between the virtual workers of one process: values are handed over without a copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TypeAlias

from gt.worker.engines.engine import Engine, Value
from gt.worker.exchange.interface import ReceivedValues, Swap, Swapping, Work
from gt.worker.failed_value import FailedValue

_InTransit: TypeAlias = dict[tuple[int, int], deque[Value | FailedValue]]
"""Values by (sender, receiver), in the order in which they were sent."""


class MemoryExchange:
    """The transport of virtual workers. `run_interleaved` passes on their values, so no swap ever begins."""

    can_prefetch = False

    def begin(self, swap: Swap, engine: Engine) -> Work:
        raise AssertionError("run_interleaved passes on the values of virtual workers")

    def prefetch(self, swap: Swap) -> None:
        """Values need no time to arrive."""

    def required_workers(self, swap: Swap) -> tuple[int, ...]:
        return swap.members

    def host_store(self) -> int:
        return 0

    def join_store(self, host: str, port: int, worker: int) -> None:
        """Workers of one process need no store."""

    def lose_worker(self, worker: int) -> None:
        """No exchange waits."""

    def leave(self) -> None:
        """There are no connections."""


def run_interleaved(computations: Mapping[int, Swapping]) -> None:
    """Run the computations of several virtual workers to their ends, each until it has to wait for another one."""
    in_transit: _InTransit = {}
    waiting: dict[int, Swap] = {}
    for worker, computation in computations.items():
        _advance(worker, computation, None, waiting, in_transit)
    while waiting:
        ready = [worker for worker, swap in waiting.items() if _has_arrived(worker, swap, in_transit)]
        assert ready, f"workers {sorted(waiting)} wait for each other"
        for worker in ready:
            received = {peer: in_transit[peer, worker].popleft() for peer in waiting.pop(worker).receives}
            _advance(worker, computations[worker], received, waiting, in_transit)


def _has_arrived(worker: int, swap: Swap, in_transit: _InTransit) -> bool:
    return all(in_transit.get((peer, worker)) for peer in swap.receives)


def _advance(
    worker: int,
    computation: Swapping,
    received: ReceivedValues | None,
    waiting: dict[int, Swap],
    in_transit: _InTransit,
) -> None:
    """Run a computation to its next swap, whose values are sent at once."""
    try:
        swap = next(computation) if received is None else computation.send(received)
    except StopIteration:
        return
    waiting[worker] = swap
    for peer, (_, value) in swap.sends.items():
        in_transit.setdefault((worker, peer), deque()).append(value)
