"""Waits inside torch that end when the other side is lost.

A wait for a single receive, or for an answer of the store, cannot be cut into short ones, and a machine that vanishes
closes no connection. While a worker is inside such a wait, a thread looks for it whether the other side is lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger("gt.worker")

LOOK_SECONDS = 0.05  # between two looks of the thread
IDLE_LOOKS = 20  # without a wait, after which the thread sleeps until the next one
_Result = TypeVar("_Result")


class _WatchedWait:
    """`check` raises if there is no reason to wait any more, and `give_up` then lets the wait fail. `problem` is what
    `check` has raised."""

    def __init__(self, check: Callable[[], None], give_up: Callable[[], None]) -> None:
        self.check = check
        self.give_up = give_up
        self.problem: Exception | None = None


class WatchedWaits:
    """The waits of one thread, one at a time. `check` runs in another thread, but never beside code of this one: the
    lock is held where a wait begins or ends. That thread begins with the first wait, of a worker that joins, and lives
    until `close`: where memory is lacking, `Thread.start` may wait without end for a thread that could not begin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._present: _WatchedWait | None = None
        self._is_watched = False
        self._is_asleep = False
        self._is_closed = False
        self._wake = threading.Lock()  # released to wake the thread
        self._wake.acquire()

    def call(self, function: Callable[[], _Result], check: Callable[[], None], give_up: Callable[[], None]) -> _Result:
        """The result of a function that waits. Raises what `check` raises while it does."""
        watched = _WatchedWait(check, give_up)
        with self._lock:
            self._present = watched
            self._is_closed = False
            if not self._is_watched:
                threading.Thread(target=self._watch, name="exchange-watch", daemon=True).start()
                self._is_watched = True
            self._wake_thread()
        try:
            return function()
        except Exception as error:
            with self._lock:
                self._present = None
            if watched.problem is not None:
                raise watched.problem from error
            raise
        finally:
            with self._lock:
                self._present = None

    def close(self) -> None:
        """End the thread. The next wait starts another one."""
        with self._lock:
            self._is_closed = True
            self._wake_thread()

    def _wake_thread(self) -> None:
        """With the lock."""
        if self._is_asleep:
            self._is_asleep = False
            self._wake.release()

    def _watch(self) -> None:
        idle = 0
        while True:
            time.sleep(LOOK_SECONDS)
            with self._lock:
                if self._is_closed:
                    self._is_watched = False
                    return
                idle = 0 if self._present is not None else idle + 1
                if self._present is not None and self._present.problem is None:
                    self._look(self._present)
                is_idle = self._is_asleep = idle > IDLE_LOOKS
            if is_idle:
                self._wake.acquire()
                idle = 0

    def _look(self, wait: _WatchedWait) -> None:
        try:
            wait.check()
        except Exception as problem:
            wait.problem = problem
            try:
                wait.give_up()
            except Exception:
                log.exception("a wait for what is lost could not be ended")
