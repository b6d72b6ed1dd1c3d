"""Captures messages of a dispatcher that another thread runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from gt.core.message_events import Captured
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.message_capture import MessageCapture
from gt.dispatcher.message_queue import Outgoing

POLL_SECONDS = 0.01

UseDispatcher: TypeAlias = Callable[[Callable[[Dispatcher], Sequence[Outgoing]]], None]
"""Runs a function with the dispatcher while no other thread uses it, and delivers the messages that it returns."""


class DispatcherCaptures:
    """Captures the events of a dispatcher, one capture at a time."""

    def __init__(self, with_dispatcher: UseDispatcher) -> None:
        self._with_dispatcher = with_dispatcher
        self._capture: MessageCapture | None = None

    def begin(self, limit: int) -> None:
        """Capture up to `limit` messages, and as many commands of each worker. Raises SessionError if another capture
        goes on."""
        capture = MessageCapture(limit)
        self._with_dispatcher(lambda dispatcher: dispatcher.begin_capture(capture))
        self._capture = capture

    def end(self, seconds: float) -> Captured:
        """Stop capturing, and wait `seconds` for the workers' timelines, which come after the work that they have
        been given."""
        assert self._capture is not None, "a capture is begun before it is ended"
        capture, self._capture = self._capture, None
        self._with_dispatcher(lambda dispatcher: dispatcher.end_capture())
        missing: set[int] = set()

        def look(dispatcher: Dispatcher) -> Sequence[Outgoing]:
            nonlocal missing
            missing = dispatcher.captures.missing()
            return ()

        deadline = time.monotonic() + seconds
        self._with_dispatcher(look)
        while missing and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self._with_dispatcher(look)
        self._with_dispatcher(lambda dispatcher: dispatcher.captures.release())
        return Captured(list(capture.events()), capture.dropped, tuple(sorted(missing)))
