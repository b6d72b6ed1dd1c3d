"""Ends a process together with its parent, however the parent ends, and removes the files of both."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from gt.wire import shared_memory
from gt.wire.private_files import remove_sockets_of

# Other systems do neither.


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # see prctl(2)


def signal_at_parent_end(number: signal.Signals) -> None:
    """Ask for a signal to this process whenever its parent ends, or the process that becomes its parent then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Make this process the parent of processes that its children, or theirs, have started and leave behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


LIMIT_SECONDS = 5
_PROCESSES = "processes"


def end_with_parent(clear_up: Callable[[], None]) -> None:
    """End this process when its standard input is closed, which the kernel does when the parent has ended. `clear_up`
    removes files before that, in a separate thread, because the others may be busy or blocked. Ctrl-C in the
    terminal is left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    threading.Thread(target=_wait_for_the_end, args=(clear_up,), name="gt-lifeline", daemon=True).start()


def _wait_for_the_end(clear_up: Callable[[], None]) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    signal.alarm(LIMIT_SECONDS)  # the kernel ends the process, whatever its threads do
    try:
        shared_memory.end()
        clear_up()
    finally:
        os._exit(0)


def note_processes(directory: Path, pids: Iterable[int]) -> None:
    """Write to the directory of a client the processes whose shared memory is removed together with it."""
    (directory / _PROCESSES).write_text(" ".join(map(str, pids)))


def clear_up(directory: Path) -> None:
    """Remove the shared memory of a client that has ended and of its processes, their directory of sockets and logs,
    and the client's monitor socket. Each of these processes does this when it ends, since the others may have been
    killed."""
    try:
        pids = [int(pid) for pid in (directory / _PROCESSES).read_text().split()]
    except FileNotFoundError:
        pids = []
    for pid in (*pids, os.getpid()):
        shared_memory.sweep(pid)
        remove_sockets_of(pid)
    shutil.rmtree(directory, ignore_errors=True)
