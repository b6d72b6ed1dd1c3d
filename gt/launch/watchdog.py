"""`python -m gt.launch.watchdog`: ends the workers of a program that has ended.

Workers end by themselves through their lifeline, unless they are stopped, or busy in code that blocks their threads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gt.wire.lifeline import LIMIT_SECONDS, clear_up
from gt.wire.process_identity import is_running, start_mark

_POLL_SECONDS = 0.5


def watch(parent: int, directory: Path, workers: Sequence[int]) -> None:
    """Wait for the end of the parent, then end its workers and remove their directory."""
    marks = {pid: start_mark(pid) for pid in workers}
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    deadline = time.monotonic() + LIMIT_SECONDS
    while running := [pid for pid, mark in marks.items() if is_running(pid, mark)]:
        if time.monotonic() > deadline:
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS / 5)
    clear_up(directory)


if __name__ == "__main__":
    watch(int(sys.argv[1]), Path(sys.argv[2]), [int(pid) for pid in sys.argv[3:]])
