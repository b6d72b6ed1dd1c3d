"""Processes that were started for someone end with them, however that end comes."""

from __future__ import annotations

import os
import signal
import sys
import threading


def end_with_parent() -> None:
    """End this process when its standard input is closed, which the kernel does when the parent is gone. Ctrl-C in the
    parent's terminal is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_wait_for_the_end, name="gt-lifeline", daemon=True).start()


def _wait_for_the_end() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)
