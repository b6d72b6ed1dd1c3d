"""Simulates recorded commands as if each worker had its own processor.

Virtual workers run one after the other, so their recorded commands do not overlap. A schedule is computed from the
duration of each command, the order of each worker's commands, and the exchanges between workers: a worker runs its
commands in order, sends without waiting, and waits when it receives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple, TypeAlias

from gt.core.message_events import TimelineEvent

Cost: TypeAlias = Callable[[TimelineEvent], float]
"""Nanoseconds that a command works, without its waiting."""


class Schedule(NamedTuple):
    """The `events` with their scheduled times, which begin at 0; in the order in which they end."""

    events: tuple[TimelineEvent, ...]

    @property
    def makespan(self) -> int:
        return max((event.end for event in self.events), default=0)

    def busy(self, worker: int) -> int:
        return sum(event.busy for event in self.events if event.worker == worker)

    def idle(self, worker: int) -> int:
        """The part of the makespan in which a worker has no command, or waits."""
        return self.makespan - self.busy(worker)


def schedule(events: Iterable[TimelineEvent], cost: Cost | None = None) -> Schedule:
    """Schedule recorded events. `cost` gives the duration of a command, by default the recorded one. A tensor whose
    send was not recorded counts as arrived."""
    queues: dict[int, list[TimelineEvent]] = {}
    for event in sorted(events, key=lambda event: event.start):
        queues.setdefault(event.worker, []).append(event)
    done: list[TimelineEvent] = []
    sent: _SentTimes = {}
    runs = {worker: _run(worker, queue, cost, sent, done) for worker, queue in queues.items()}
    waiting = {worker: peers for worker, run in runs.items() if (peers := next(run, None)) is not None}
    while waiting:
        able = [worker for worker, peers in waiting.items() if _have_sent(worker, peers, sent)]
        for worker in able or list(waiting)[:1]:
            peers = next(runs[worker], None)
            if peers is None:
                del waiting[worker]
            else:
                waiting[worker] = peers
    return Schedule(tuple(sorted(done, key=lambda event: (event.end, event.worker))))


_Peers: TypeAlias = tuple[int, ...]
_SentTimes: TypeAlias = dict[tuple[int, int], deque[int]]
"""By (sender, receiver), the times of the sends that were not received yet."""


def _have_sent(worker: int, peers: _Peers, sent: _SentTimes) -> bool:
    return all(sent.get((peer, worker)) for peer in peers)


def _run(
    worker: int,
    queue: list[TimelineEvent],
    cost: Cost | None,
    sent: _SentTimes,
    done: list[TimelineEvent],
) -> Generator[_Peers]:
    """Run a worker's commands. Yields the peers it receives from, and goes on when they have sent."""
    now = 0
    for event in queue:
        scale = cost(event) / event.busy if cost is not None and event.busy else 1.0
        start, worked_until = now, event.start
        transfers = []
        for transfer in event.transfers:
            now += round((transfer.start - worked_until) * scale)
            began, worked_until = now, transfer.end
            for peer, _ in transfer.sends:
                sent.setdefault((worker, peer), deque()).append(now)
            if transfer.receives:
                peers = tuple(peer for peer, _ in transfer.receives)
                yield peers
                times = [sent[peer, worker].popleft() for peer in peers if sent.get((peer, worker))]
                now = max([now, *times])
            transfers.append(transfer._replace(start=began, end=now))
        now += round((event.end - worked_until) * scale)
        done.append(event._replace(start=start, end=now, transfers=tuple(transfers)))
