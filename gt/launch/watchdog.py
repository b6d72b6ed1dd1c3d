"""`python -m gt.launch.watchdog`: ends the workers of a program that is gone, if they do not end by themselves.

They do, by their lifeline, unless they are stopped, or busy in code that lets no other thread run.
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
from gt.wire.liveness import is_running, start_mark

_LOOK_SECONDS = 0.5


def watch(parent: int, directory: Path, workers: Sequence[int]) -> None:
    """Returns when the parent is gone, and its workers and their directory too."""
    marks = {pid: start_mark(pid) for pid in workers}
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    deadline = time.monotonic() + LIMIT_SECONDS
    while running := [pid for pid, mark in marks.items() if is_running(pid, mark)]:
        if time.monotonic() > deadline:
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS / 5)
    clear_up(directory)


if __name__ == "__main__":
    watch(int(sys.argv[1]), Path(sys.argv[2]), [int(pid) for pid in sys.argv[3:]])
