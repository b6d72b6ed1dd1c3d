"""Tells a server on another machine what this worker does, about once a second, also in the middle of a long op.

Workers of the server's own machine show it in shared memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from gt.core.errors import ConnectionLost
from gt.core.messages import Activity
from gt.core.worker_progress import SINCE

REPORT_SECONDS = 1.0


class ActivityReports:
    """Sends the words of `progress` when they have changed. A thread does so while the worker computes, if it gets
    `using_link`, the lock of the connection; the worker itself reports between its batches."""

    def __init__(self, progress: Sequence[int], using_link: threading.Lock, send: Callable[[Activity], None]) -> None:
        self._progress = progress
        self._using_link = using_link
        self._send = send
        self._reported: tuple[int, ...] = ()
        self._next = 0.0  # the time of the next report
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gt-activity", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(REPORT_SECONDS):
            if self._using_link.acquire(blocking=False):
                try:
                    with contextlib.suppress(ConnectionLost):  # the worker notices that itself
                        self.report()
                finally:
                    self._using_link.release()

    def report_if_due(self) -> None:
        """The caller has the lock."""
        if time.monotonic() >= self._next:
            self.report()

    def report(self) -> None:
        """The caller has the lock."""
        self._next = time.monotonic() + REPORT_SECONDS
        words = tuple(self._progress)
        if words != self._reported:
            self._reported = words
            self._send(Activity((*words[:SINCE], time.monotonic_ns() - words[SINCE], *words[SINCE + 1 :])))

    def close(self) -> None:
        self._end.set()
        self._thread.join()
