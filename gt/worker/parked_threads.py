"""Threads of this process whose work nobody needs any more, and which sleep from now on.

Native code cannot be ended from outside without its process. So a signal is sent to each thread that runs it, whose
handler is the C library's own `sleep`: it is called with the number of the signal, as seconds. A thread that wakes is
sent to sleep again. Since it runs for a moment every minute, it keeps no lock for good.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable

_SAMPLES, _SAMPLE_SECONDS = 8, 0.02
_SYS_TGKILL = {"x86_64": 234, "aarch64": 131}  # see tgkill(2)


def can_park() -> bool:
    return sys.platform == "linux" and platform.machine() in _SYS_TGKILL


def busy_threads(task: int) -> set[int]:
    """The ids of a thread that is in the middle of an op, and of those that compute for it; none if it is not. It may
    wait for them, with its own part of the op done. Other threads of Python, and those of ZeroMQ, do not count."""
    others = {thread.native_id for thread in threading.enumerate()} - {task}
    tasks = set(map(int, os.listdir("/proc/self/task"))) - others
    seen: Counter[int] = Counter()
    for _ in range(_SAMPLES):
        time.sleep(_SAMPLE_SECONDS)
        computing = set(filter(_is_computing, tasks))
        if not computing:
            return set()
        seen.update(computing)
    return {task} | {found for found, count in seen.items() if 2 * count > _SAMPLES}


def _is_computing(task: int) -> bool:
    try:
        with open(f"/proc/self/task/{task}/stat", "rb", buffering=0) as status:
            name, _, fields = status.read().rpartition(b") ")
    except OSError:
        return False
    return fields[:1] in b"RD" and b"(ZMQbg" not in name


def raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Let a thread raise an error before its next step of Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error))


class ParkedThreads:
    """The ids of the threads that sleep; `count` is that of the calls of `add`."""

    def __init__(self) -> None:
        self.count = 0
        self._tasks: set[int] = set()
        self._libc = ctypes.PyDLL(None)  # keeps Python's lock, so that no thread of Python goes on meanwhile

    def add(self, tasks: Iterable[int]) -> None:
        if not self.count:
            self._libc.signal(signal.SIGRTMAX, ctypes.cast(self._libc.sleep, ctypes.c_void_p))
        self.count += 1
        self._tasks |= set(tasks)
        self.keep()

    def keep(self) -> None:
        """Send the threads to sleep again that are awake."""
        for task in self._tasks:
            if _is_computing(task):
                self._libc.syscall(_SYS_TGKILL[platform.machine()], os.getpid(), task, signal.SIGRTMAX)
