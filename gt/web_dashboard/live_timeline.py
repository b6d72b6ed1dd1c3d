"""The last seconds of each worker as spans of time, made from looks at its progress.

A look tells the op that a worker is at, and since when it has been in its state. So the times of states are exact, and
the ops are samples: with looks often enough, an op has the share of the picture that it has of the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from gt.core.program_view import WorkerState
from gt.monitor.timeline_lanes import EXCHANGE, IDLE, WAIT
from gt.sharding.op_kinds import op_kind

WINDOW = 12_000_000_000  # nanoseconds that are kept
MAX_SPANS = 1 << 15


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A worker was at an op of a line, from `start` to `end`, in nanoseconds of the machine's monotonic clock. `kind`
    is the kind of its op, or `exchange`, `wait`, `idle`."""

    worker: int
    start: int
    end: int
    kind: str
    op: str
    line: str


class TimelinePart(msgspec.Struct, frozen=True):
    """The spans that have ended since a viewer's last part, and those that go on. `number` is that of the last one that
    has ended: the next part begins after it."""

    time: int
    number: int
    ended: tuple[Span, ...]
    current: tuple[Span, ...]


class LiveTimeline:
    """Spans of the last WINDOW nanoseconds."""

    def __init__(self) -> None:
        self._ended: deque[Span] = deque()
        self._number = 0
        self._current: dict[int, Span] = {}
        self._time = 0

    def clear(self) -> None:
        self._ended.clear()
        self._current.clear()
        self._time = 0

    def add(self, now: int, workers: Iterable[WorkerState]) -> None:
        """Take a look at all workers."""
        before, self._time = self._time or now, now
        seen = set()
        for worker in workers:
            seen.add(worker.worker)
            self._extend(worker, before, now)
        for gone in [number for number in self._current if number not in seen]:
            self._end(self._current.pop(gone))
        while self._ended and self._ended[0].end < now - WINDOW:
            self._ended.popleft()

    def _extend(self, worker: WorkerState, before: int, now: int) -> None:
        kind, op, line = _label(worker)
        current = self._current.get(worker.worker)
        # The state began between two looks: until then the worker was in the one before.
        change = worker.since if before < worker.since <= now else before
        if current is None:
            self._current[worker.worker] = Span(worker.worker, change, now, kind, op, line)
        elif (current.kind, current.op, current.line) == (kind, op, line):
            self._current[worker.worker] = msgspec.structs.replace(current, end=now)
        else:
            self._end(msgspec.structs.replace(current, end=max(change, current.start)))
            self._current[worker.worker] = Span(worker.worker, change, now, kind, op, line)

    def _end(self, span: Span) -> None:
        self._number += 1
        self._ended.append(span)
        if len(self._ended) > MAX_SPANS:
            self._ended.popleft()

    def part_after(self, number: int) -> TimelinePart:
        """What a viewer who has the spans up to a number has not seen. One that was too slow misses the oldest."""
        count = min(max(self._number - number, 0), len(self._ended))
        ended = tuple(self._ended)[len(self._ended) - count :] if count else ()
        return TimelinePart(self._time, self._number, ended, tuple(self._current.values()))


def _label(worker: WorkerState) -> Sequence[str]:
    if worker.state == "running":
        return op_kind(worker.op), worker.op, worker.site
    if worker.state == "exchanging":
        return (WAIT if worker.waits_for else EXCHANGE), worker.op, worker.site
    return IDLE, "", ""
