"""Waits that may take long, and are then shown to a person: for what, and since when.

A loop that waits tells in each turn how far it is. Nothing is shown, formatted or started in the first seconds:

    with LongWait(display) as wait:
        while not workers_are_ready():
            poll()
            wait.tell(lambda: f"{ready} of {count} workers have started")
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from gt.core.progress import ProgressDisplay

SHOW_AFTER_SECONDS = 2.0
REFRESH_SECONDS = 0.25


class LongWait:
    """A wait in a loop. Without a display each new text is logged as a warning to `log`; without that too, nothing is
    shown."""

    __slots__ = ("_clock", "_display", "_is_shown", "_log", "_logged", "_next", "_start")

    def __init__(
        self,
        display: ProgressDisplay | None,
        clock: Callable[[], float] = time.monotonic,
        log: logging.Logger | None = None,
    ) -> None:
        self._display = display
        self._log = log
        self._logged = ""
        self._clock = clock
        self._start = clock()
        self._next = self._start + SHOW_AFTER_SECONDS
        self._is_shown = False

    def tell(self, describe: Callable[[], str]) -> None:
        """Show what `describe` says, if the wait is long and the last text is not new."""
        if (self._display is None and self._log is None) or (now := self._clock()) < self._next:
            return
        self._next = now + REFRESH_SECONDS
        text = describe()
        if self._display is not None:
            self._is_shown = True
            self._display.show(f"gt: {text} ({now - self._start:.0f} s)")
        elif self._log is not None and text != self._logged:
            self._logged = text
            self._log.warning("waiting: %s", text)

    def __enter__(self) -> LongWait:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._is_shown and self._display is not None:
            self._display.clear()


@contextlib.contextmanager
def told_in_background(display: ProgressDisplay | None, describe: Callable[[], str]) -> Iterator[None]:
    """Work without a loop, such as the copy of a large tensor: its own thread shows progress if it takes long."""
    if display is None:
        yield
        return
    done = threading.Event()

    def tell() -> None:
        with LongWait(display) as wait:
            while not done.wait(REFRESH_SECONDS):
                wait.tell(describe)

    thread = threading.Thread(target=tell, name="gt-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
