"""The commands that each worker ran, with times: `gt.debug.timeline`."""

from __future__ import annotations

from gt.client import active_session
from gt.client.session import Session
from gt.core.errors import SessionError
from gt.core.messages import MAX_RECORDED, Ran
from gt.core.timeline import TimelineEvent, Transfer


class Timeline:
    """The commands that each worker ran inside `with gt.debug.timeline() as t:`. All times are nanoseconds of the
    machine's monotonic clock. Each worker records at most `limit` commands; `dropped` counts the others."""

    def __init__(self, limit: int) -> None:
        self.events: list[TimelineEvent] = []
        self.dropped = 0
        self._limit = limit

    def __enter__(self) -> Timeline:
        session = self._session = active_session.current()
        if session.is_recording:
            raise SessionError("a timeline is being recorded already; leave its block before entering another one")
        while self._read(0):
            pass  # commands of an earlier block whose end could not be read
        self.events, self.dropped, session.is_recording = [], 0, True
        session.read_timeline(self._limit)
        return self

    def __exit__(self, *error: object) -> None:
        self._session.is_recording = False
        while self._read(0):
            pass
        self.events.sort(key=lambda event: (event.start, event.worker))

    def _read(self, limit: int) -> bool:
        """Take some recorded commands; returns whether there were any."""
        found = False
        for timeline in self._session.read_timeline(limit).workers:
            self.events += [_event(self._session, timeline.worker, ran) for ran in timeline.ran]
            self.dropped += timeline.dropped
            found = found or bool(timeline.ran)
        return found

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
    """Record the commands of the workers inside: `with gt.debug.timeline() as t: ...; print(t.idle(0) / t.span)`."""
    if not 0 < limit <= MAX_RECORDED:
        raise ValueError(f"a timeline of {limit} commands of each worker is not possible: 1 to {MAX_RECORDED} are")
    return Timeline(limit)


def _event(session: Session, worker: int, ran: Ran) -> TimelineEvent:
    line = session.sites.text(ran.site) if ran.site else ""
    transfers = tuple(Transfer(swap.start, swap.end, swap.sends, swap.receives) for swap in ran.swaps)
    return TimelineEvent(worker, ran.op, line, ran.scope, ran.start, ran.end, transfers)
