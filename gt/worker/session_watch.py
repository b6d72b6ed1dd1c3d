"""Frees a worker from an op of a session that has ended, however long the op would take.

A watching thread receives the messages that come while the worker computes. Where the session of the present command
has ended, it goes on itself with the next command, with the tensors of all other sessions. The thread that is in the
middle of an op sleeps (`ParkedThreads`), and the tensors of this op stay in memory until the worker ends: native
code cannot be stopped without its process, which holds everybody's tensors. So after MAX_ABANDONED ops the next one
ends the worker, which tells its server why. The op fails. If its program has exchanges
left, these are done with failures, so that all workers stay in step; no thread is left during an exchange.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from gt.core.ids import session_of
from gt.core.message_fields import owner_of
from gt.core.messages import Command, WorkerEndSession, WorkerShareTensor
from gt.worker.executor import Executor

# Native code cannot be ended from outside without its process. So a signal is sent to each thread that runs it,
# whose handler is the C library's own `sleep`: it is called with the number of the signal, as seconds. A thread that
# wakes is sent to sleep again. Since it runs for a moment every minute, it keeps no lock for good.


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
    """The ids of sleeping threads; `count` is the number of calls of `add`."""

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


log = logging.getLogger("gt.worker")
_TICK_SECONDS = 0.5
GRACE_SECONDS = 2.0  # time for the present op of a session that has ended
MAX_ABANDONED = 64  # ops of a worker whose threads and memory it keeps


class Abandoned(BaseException):
    """Raised in a thread that another one has replaced, as soon as its op is done, if ever."""


class SessionWatch:
    """Watches the thread that makes it, which runs the commands of an executor. `look_ahead` receives the messages that
    have come, and returns all commands that wait; None if nothing that the worker does is needed any more. `succeed`
    goes on with the commands after the present one, in the watching thread, since there may be no memory for another
    one. `end` ends the process, and tells why, without the watched thread. That thread sets `left` when it has raised
    Abandoned."""

    def __init__(
        self,
        executor: Executor,
        parked: ParkedThreads,
        look_ahead: Callable[[], Sequence[Command] | None],
        succeed: Callable[[], None],
        end: Callable[[str], None],
    ) -> None:
        self._executor = executor
        self._parked = parked
        self._look_ahead = look_ahead
        self._succeed = succeed
        self._end_process = end
        self._watched = threading.current_thread()
        self._task = threading.get_native_id()  # `Thread.native_id` is wrong after a fork
        self.left = threading.Event()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gt-watch", daemon=True)
        self._thread.start()

    @staticmethod
    def is_possible(device: str) -> bool:
        """Not with a GPU, whose kernels go on whatever threads do."""
        return device == "cpu" and can_park()

    def close(self) -> None:
        self._end.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        session, since = -1, 0.0  # the last session that was found to have ended in the middle of a command
        while not self._end.wait(_TICK_SECONDS):
            self._parked.keep()
            command = self._executor.long_command(_TICK_SECONDS)
            owner = owner_of(command) if command is not None else -1
            if command is None or not self.is_over(owner):
                session = -1
            elif owner != session:
                session, since = owner, time.monotonic()
            elif time.monotonic() - since > GRACE_SECONDS and self._abandon(command, owner):
                return

    def is_over(self, session: int) -> bool:
        """Whether nobody needs the work of a session: it has ended, and so have those that it shares tensors with."""
        waiting = self._look_ahead()
        if waiting is None:
            return True
        ended = {command.session for command in waiting if isinstance(command, WorkerEndSession)}
        shares = [command for command in waiting if isinstance(command, WorkerShareTensor)]
        takers = {session_of(share.target) for share in shares if session_of(share.source) == session}
        return ended >= takers | {session}

    def _abandon(self, command: Command, session: int) -> bool:
        """Take the place of the watched thread, until the worker ends. Returns whether that was possible."""
        if self._executor.long_command(0) is not command:
            return False
        if self._parked.count >= MAX_ABANDONED:
            self._end_process(
                f"an op of session {session}, which has ended, does not end, and {MAX_ABANDONED} such ops were left "
                f"already, whose threads and tensors stay until the worker ends; start another worker"
            )
            return True
        # The watched thread does not begin another command: it waits for Python's lock, or will, and raises then.
        raise_in(self._watched, Abandoned)
        while not self.left.is_set():
            if tasks := busy_threads(self._task):
                self._parked.add(tasks)
                log.warning(
                    "an op of a session that has ended was left, as %d of %d that may be; its tensors stay in memory",
                    self._parked.count,
                    MAX_ABANDONED,
                )
                break
        self._executor.skipped.sessions.add(session)
        self._succeed()
        return True
