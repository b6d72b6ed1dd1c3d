"""Processes that were started for someone end with them, however that end comes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

LIMIT_SECONDS = 5


def end_with_parent(clear_up: Callable[[], None]) -> None:
    """End this process when its standard input is closed, which the kernel does when the parent is gone. What must not
    be left is removed by `clear_up`, in a thread of its own: the others may be busy, or wait for something that will
    not come. Ctrl-C in the parent's terminal is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    threading.Thread(target=_wait_for_the_end, args=(clear_up,), name="gt-lifeline", daemon=True).start()


def _wait_for_the_end(clear_up: Callable[[], None]) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    signal.alarm(LIMIT_SECONDS)  # by the kernel, so that nothing here can be in its way
    try:
        clear_up()
    finally:
        os._exit(0)
