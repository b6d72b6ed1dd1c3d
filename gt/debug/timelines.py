"""The commands that each worker ran, with times: `gt.debug.timeline`."""

from __future__ import annotations

from gt.client import active_session
from gt.client.session import Session
from gt.core.message_events import TimelineEvent, Transfer
from gt.core.messages import MAX_RECORDED, Ran


class Timeline:
    """The commands that each worker ran inside `with gt.debug.timeline() as t:`. All times are nanoseconds of the
    machine's monotonic clock. Each worker records at most `limit` commands; `dropped` counts the others.

    >>> with gt.debug.timeline() as t:
    ...     y = gt.ones(2) + 1
    >>> [event.op for event in t.events if event.op.startswith("aten")]
    ['aten.ones.default', 'aten.add.Tensor']
    >>> 0 < t.busy(0) <= t.span
    True
    """

    def __init__(self, limit: int) -> None:
        self.events: list[TimelineEvent] = []
        self.dropped = 0
        self._limit = limit

    def __enter__(self) -> Timeline:
        session = self._session = active_session.current()
        self._recording = session.recordings.begin(self._limit)
        return self

    def __exit__(self, *error: object) -> None:
        recording = self._recording
        self._session.recordings.end(recording)
        self.events = [_event(self._session, worker, ran) for worker, ran in recording.ran]
        self.events.sort(key=lambda event: (event.start, event.worker))
        self.dropped = recording.dropped

    @property
    def workers(self) -> list[int]:
        """The workers that ran a command."""
        return sorted({event.worker for event in self.events})

    @property
    def span(self) -> int:
        """From the start of the first command on any worker to the end of the last."""
        if not self.events:
            return 0
        return max(event.end for event in self.events) - min(event.start for event in self.events)

    def busy(self, worker: int) -> int:
        """Nanoseconds that a worker spent in commands, without exchanges with others."""
        return sum(event.busy for event in self.events if event.worker == worker)

    def idle(self, worker: int) -> int:
        """The rest of the span: no command, or waiting for another worker."""
        return self.span - self.busy(worker)


def timeline(limit: int = 1 << 16) -> Timeline:
    """Record the commands of the workers inside: `with gt.debug.timeline() as t: ...; print(t.idle(0) / t.span)`.

    >>> with gt.debug.timeline() as t:
    ...     y = gt.ones(2) + 1
    >>> t.workers, t.dropped
    ([0], 0)
    """
    if not 0 < limit <= MAX_RECORDED:
        raise ValueError(f"a timeline of {limit} commands of each worker is not possible: 1 to {MAX_RECORDED} are")
    return Timeline(limit)


def _event(session: Session, worker: int, ran: Ran) -> TimelineEvent:
    line = session.sites.text(ran.site) if ran.site else ""
    transfers = tuple(Transfer(swap.start, swap.end, swap.sends, swap.receives) for swap in ran.swaps)
    return TimelineEvent(worker, ran.op, line, ran.scope, ran.start, ran.end, transfers)
