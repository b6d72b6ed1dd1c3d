"""When commands would have run, had all workers been processors of their own.

Virtual workers run one after the other, so what they recorded does not overlap. How long each command took, the order
of each worker's commands and who sent to whom are all that a schedule needs: a worker runs its commands in order,
sends without waiting, and waits where it receives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple, TypeAlias

from gt.core.timeline import TimelineEvent

Cost: TypeAlias = Callable[[TimelineEvent], float]
"""How long a command works, waiting aside."""


class Schedule(NamedTuple):
    """`events` with the times that they would have had, from 0 on; in the order in which they end."""

    events: tuple[TimelineEvent, ...]

    @property
    def makespan(self) -> int:
        return max([event.end for event in self.events], default=0)

    def busy(self, worker: int) -> int:
        return sum([event.busy for event in self.events if event.worker == worker])

    def idle(self, worker: int) -> int:
        """The part of the makespan in which a worker has nothing to do, or waits."""
        return self.makespan - self.busy(worker)


def schedule(events: Iterable[TimelineEvent], cost: Cost | None = None) -> Schedule:
    """`cost`: how long a command works; otherwise as long as it did. What was sent before the recording began, or is
    missing because it was dropped, is taken to have arrived."""
    queues: dict[int, list[TimelineEvent]] = {}
    for event in sorted(events, key=lambda event: event.start):
        queues.setdefault(event.worker, []).append(event)
    done: list[TimelineEvent] = []
    parcels: dict[tuple[int, int], deque[int]] = {}
    runs = {worker: _run(worker, queue, cost, parcels, done) for worker, queue in queues.items()}
    waiting = {worker: peers for worker, run in runs.items() if (peers := next(run, None)) is not None}
    while waiting:
        able = [worker for worker, peers in waiting.items() if _have_sent(worker, peers, parcels)]
        for worker in able or list(waiting)[:1]:
            peers = next(runs[worker], None)
            if peers is None:
                del waiting[worker]
            else:
                waiting[worker] = peers
    return Schedule(tuple(sorted(done, key=lambda event: (event.end, event.worker))))


_Peers: TypeAlias = tuple[int, ...]


def _have_sent(worker: int, peers: _Peers, parcels: dict[tuple[int, int], deque[int]]) -> bool:
    return all(parcels.get((peer, worker)) for peer in peers)


def _run(
    worker: int,
    queue: list[TimelineEvent],
    cost: Cost | None,
    parcels: dict[tuple[int, int], deque[int]],
    done: list[TimelineEvent],
) -> Generator[_Peers]:
    """A worker's commands. Stops where it receives, and goes on when its peers have sent."""
    now = 0
    for event in queue:
        scale = cost(event) / event.busy if cost is not None and event.busy else 1.0
        start, worked_until = now, event.start
        transfers = []
        for transfer in event.transfers:
            now += round((transfer.start - worked_until) * scale)
            began, worked_until = now, transfer.end
            for peer, _ in transfer.sends:
                parcels.setdefault((worker, peer), deque()).append(now)
            if transfer.receives:
                peers = tuple([peer for peer, _ in transfer.receives])
                yield peers
                sent = [parcels[peer, worker].popleft() for peer in peers if parcels.get((peer, worker))]
                now = max([now, *sent])
            transfers.append(transfer._replace(start=began, end=now))
        now += round((event.end - worked_until) * scale)
        done.append(event._replace(start=start, end=now, transfers=tuple(transfers)))
