"""How workers exchange tensors: everyone says what it sends and what it expects, and gets what the others sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from gt.core.meta import TensorMeta
from gt.worker.engines.engine import Engine, Value
from gt.worker.failed_value import FailedValue


class Swap(NamedTuple):
    """One step of an exchange, as one of `members` sees it. A failure travels in place of a tensor, so that a receiver
    never waits for a value that will not come; `sends` says what the receiver expects too."""

    members: tuple[int, ...]
    sends: Mapping[int, tuple[TensorMeta, Value | FailedValue]]
    receives: Mapping[int, TensorMeta]


Received: TypeAlias = dict[int, "Value | FailedValue"]
Swapping: TypeAlias = Generator[Swap, Received, Any]
"""Work that stops where it has to exchange something, and goes on with what it received."""


class Exchange(Protocol):
    @property
    def is_expecting(self) -> bool:
        """There is no need to say what will be received next."""

    def swap(self, swap: Swap, engine: Engine) -> Received: ...

    def expect(self, swap: Swap) -> None:
        """Begin to receive for the next exchange in which this worker receives anything."""

    def host_store(self) -> int:
        """Start the store that process groups meet at; gives its port."""

    def join_store(self, host: str, port: int, worker: int) -> None: ...

    def needs(self, swap: Swap) -> tuple[int, ...]:
        """The workers without which an exchange fails."""


class MemoryExchange:
    """Between virtual workers of one process, whose work `run_interleaved` runs: there is nothing to wait for."""

    is_expecting = True

    def expect(self, swap: Swap) -> None:
        """Nothing takes any time."""

    def swap(self, swap: Swap, engine: Engine) -> Received:
        raise AssertionError("virtual workers exchange tensors where they are pumped")

    def host_store(self) -> int:
        return 0

    def join_store(self, host: str, port: int, worker: int) -> None:
        """In one process nothing has to be found."""

    def needs(self, swap: Swap) -> tuple[int, ...]:
        return swap.members


def run_interleaved(works: Mapping[int, Swapping]) -> None:
    """Run the work of several virtual workers until all is done, passing on what they send to one another."""
    parcels: dict[tuple[int, int], deque[Value | FailedValue]] = {}
    waiting: dict[int, Swap] = {}
    for worker, work in works.items():
        _advance(worker, work, None, waiting, parcels)
    while waiting:
        able = [worker for worker, swap in waiting.items() if _has_arrived(worker, swap.receives, parcels)]
        assert able, f"workers {sorted(waiting)} wait for each other"
        for worker in able:
            received = {peer: parcels[peer, worker].popleft() for peer in waiting.pop(worker).receives}
            _advance(worker, works[worker], received, waiting, parcels)


def _has_arrived(
    worker: int, peers: Iterable[int], parcels: Mapping[tuple[int, int], deque[Value | FailedValue]]
) -> bool:
    return all(parcels.get((peer, worker)) for peer in peers)


def _advance(
    worker: int,
    work: Swapping,
    received: Received | None,
    waiting: dict[int, Swap],
    parcels: dict[tuple[int, int], deque[Value | FailedValue]],
) -> None:
    try:
        swap = next(work) if received is None else work.send(received)
    except StopIteration:
        return
    waiting[worker] = swap
    for peer, (_, value) in swap.sends.items():
        parcels.setdefault((worker, peer), deque()).append(value)
