"""Captures of a program whose process runs the dispatcher: messages, commands of workers, and ops that it issues."""

from __future__ import annotations

from gt.client.issued_ops import IssuedOps
from gt.client.session import Session
from gt.core.message_events import Captured
from gt.dispatcher.captures import DispatcherCaptures, UseDispatcher


class ProgramCaptures:
    def __init__(self, session: Session, with_dispatcher: UseDispatcher) -> None:
        self._dispatcher = DispatcherCaptures(with_dispatcher)
        self._issued = IssuedOps(session)

    def begin(self, limit: int) -> None:
        """Raises SessionError if another capture goes on."""
        self._dispatcher.begin(limit)
        self._issued.begin(limit)

    def end(self, seconds: float) -> Captured:
        issued = self._issued.end()
        captured = self._dispatcher.end(seconds)
        return captured._replace(events=[*captured.events, *issued])
