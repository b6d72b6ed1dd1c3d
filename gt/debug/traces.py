"""Traces of a block of a program, or of all of it: `gt.debug.trace`, and GT_TRACE."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from gt.client import active_session
from gt.client.session import Session
from gt.core.errors import SessionError, SettingsError
from gt.core.message_events import Captured
from gt.monitor.activity import records_of
from gt.monitor.chrome_trace import describe_gaps, require_writable, write_trace

log = logging.getLogger("gt.debug")
WORKER_SECONDS = 60.0  # wait of the end of a trace for busy workers


class Trace:
    """Writes what happens inside `with gt.debug.trace("run.json"):` to a file that Perfetto opens. `dropped` counts the
    events that there was no room for, and `missing` are workers that did not send their commands in time.

    >>> with gt.debug.trace("run.json") as t:
    ...     y = gt.ones(2) + 1
    >>> t.dropped, t.missing
    (0, ())
    """

    def __init__(self, path: str | Path, limit: int) -> None:
        self.path = Path(path)
        self.dropped = 0
        self.missing: tuple[int, ...] = ()
        self._limit = limit

    def __enter__(self) -> Trace:
        require_writable(self.path)
        self._begin(active_session.current())
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def begin(self, session: Session) -> None:
        """Trace a whole program, which goes on without a trace if there is no place for it."""
        try:
            require_writable(self.path)
        except SettingsError as error:
            log.warning("%s", error)
        self._begin(session)

    def _begin(self, session: Session) -> None:
        assert session.captures is not None, "the launcher sets it"
        self._captures, self._session = session.captures, session
        session.outbox.flush()  # ops from before are not part of the trace
        self._captures.begin(self._limit)

    def end(self) -> None:
        """Stop, and write the file."""
        if not self._session.closed_because:
            self._session.outbox.flush()
        captured = self._end_capture()
        self.dropped, self.missing = captured.dropped, captured.missing
        write_trace(self.path, records_of(captured.events), captured.dropped)
        if gaps := describe_gaps(self.dropped, self.missing):
            log.warning("the trace %s is not complete: %s", self.path, gaps)

    def _end_capture(self) -> Captured:
        try:
            return self._captures.end(WORKER_SECONDS)
        except SessionError:
            if not self._session.closed_because:
                raise
            reason = f"{self._session.closed_because}. Leave the block of a trace before gt.shutdown()"
            raise SessionError(f"the trace {self.path} was not written: {reason}") from None


def trace(path: str | Path, limit: int = 1 << 20) -> Trace:
    """Write a trace of what clients, dispatcher and workers do inside: `with gt.debug.trace("run.json"): ...`. Open it
    at https://ui.perfetto.dev; a file named `run.log` is a log. At most `limit` messages are kept, and as many commands
    of each worker.

    >>> with gt.debug.trace("run.json") as t:
    ...     y = gt.ones(2) + 1
    >>> t.path.exists()
    True
    """
    if limit < 1:
        raise ValueError(f"a trace of {limit} events is not possible")
    return Trace(path, min(limit, sys.maxsize))
