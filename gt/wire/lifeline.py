"""Processes that were started for someone end with them, however that end comes, and leave nothing."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from gt.wire import shared_memory

LIMIT_SECONDS = 5
_PROCESSES = "processes"


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
        shared_memory.end()
        clear_up()
    finally:
        os._exit(0)


def note_processes(directory: Path, pids: Iterable[int]) -> None:
    """Whose shared memory is to be removed when the directory is."""
    (directory / _PROCESSES).write_text(" ".join(map(str, pids)))


def clear_up(directory: Path) -> None:
    """Remove what is left of a client that is gone, and of those that ended before: their shared memory, and the
    directory of sockets and logs. Every process that was started for the client does this, and the first has it all to
    do; one that makes something after that removes it itself."""
    try:
        pids = [int(pid) for pid in (directory / _PROCESSES).read_text().split()]
    except FileNotFoundError:
        pids = []
    for pid in (*pids, os.getpid()):
        shared_memory.sweep(pid)
    shutil.rmtree(directory, ignore_errors=True)
