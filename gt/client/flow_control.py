"""Limits how many instructions the client may be ahead of the workers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

INTERVAL = 4096  # instructions between two marks
MAX_MARKS = 4  # marks that may be unanswered
BATCH = 256  # instructions that make a batch worth sending, so that there are as many between two marks


class FlowControl:
    """Blocks a client whose workers are too far behind. `send_mark` sends a request that is answered when all work
    before it is done, and returns the request's id; `wait` waits for its answer. `wait_for_room` waits while too much
    of what was sent has not arrived. `limit` is the server's limit on the instructions in flight, if it has one."""

    def __init__(
        self,
        send_mark: Callable[[], int],
        wait: Callable[[int], object],
        limit: int = 0,
        wait_for_room: Callable[[], None] = lambda: None,
    ) -> None:
        self._send_mark = send_mark
        self._wait = wait
        self._wait_for_room = wait_for_room
        self._max_marks = max(1, min(MAX_MARKS, limit // BATCH - 1)) if limit else MAX_MARKS
        self._interval = min(INTERVAL, limit // (self._max_marks + 1)) if limit else INTERVAL
        self._unmarked = 0
        self._marks: deque[int] = deque()
        self._lock = threading.RLock()

    def count(self, sent: int) -> None:
        """Count instructions that were sent; wait for the oldest mark if too many are unanswered."""
        self._wait_for_room()
        self._unmarked += sent
        if self._unmarked < self._interval:
            return
        self._unmarked = 0
        mark = self._send_mark()
        with self._lock:
            self._marks.append(mark)
            late = [self._marks.popleft() for _ in range(len(self._marks) - self._max_marks)]
        for mark in late:
            self._wait(mark)
