"""The process of a compile server, as its workers see it: the first one starts it, and the last one ends it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gt.core.environment import PYTHON, import_environment
from gt.wire.private_files import make_private
from gt.wire.process_identity import is_running, start_mark
from gt.worker.compilation import private_directory
from gt.worker.compilation.private_directory import LOG, PROCESS, SERVER_LOCK, WORKERS_LOCK

COMPILERS = ("g++", "clang++")


def find_compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """The C++ compiler of this machine: that of the variable CXX, or the first one of COMPILERS."""
    names = (environ["CXX"].split()[0],) if environ.get("CXX", "").strip() else COMPILERS
    return next((name for name in names if shutil.which(name, path=environ.get("PATH"))), None)


log = logging.getLogger("gt.compile")
_END_SECONDS = 2.0  # less than a worker has to end
_RETRY_SECONDS = 0.02


class ServerProcess:
    """The server of a directory. It holds the lock SERVER_LOCK until it ends. Workers share the lock WORKERS_LOCK: who
    gets it alone is the last one."""

    def __init__(self, directory: Path, options: Sequence[str]) -> None:
        self._directory = directory
        self._options = options
        self._child: subprocess.Popen[bytes] | None = None
        self._share: int | None = None

    def join(self) -> bool:
        """Make the directory and become one of its workers. False if the last worker removes it just now."""
        make_private(self._directory)
        if self._share is None:
            self._share = private_directory.lock(self._directory, WORKERS_LOCK, is_shared=True)
        return self._share is not None

    def start(self) -> None:
        """Start the server, unless there is one already. Raises OSError."""
        held = private_directory.lock(self._directory, SERVER_LOCK)
        if held is None:
            return
        try:
            self._child = self._spawn(held)
            (self._directory / PROCESS).write_text(f"{self._child.pid} {start_mark(self._child.pid)}")
        finally:
            os.close(held)

    def _spawn(self, held: int) -> subprocess.Popen[bytes]:
        """All files of the compiler go to the private directory. The server holds the lock until it ends."""
        directory = str(self._directory)
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("GT_", "TORCHINDUCTOR_"))}
        environ |= {"TMPDIR": directory, "TORCHINDUCTOR_CACHE_DIR": f"{directory}/cache"}
        environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "CXX": find_compiler() or "", "OMP_NUM_THREADS": "1"}
        environ |= import_environment()
        with open(self._directory / LOG, "wb") as output:
            return subprocess.Popen(
                [*PYTHON, "-m", "gt.worker.compilation", directory, *self._options],
                env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[held],
                start_new_session=True, cwd=directory,
            )  # fmt: skip

    def status(self) -> int | None:
        """The exit status of the server that this worker has started; None while it runs, or if there is none."""
        return None if self._child is None else self._child.poll()

    @property
    def is_own(self) -> bool:
        """Whether this worker has started the server."""
        return self._child is not None

    def describe_end(self) -> str:
        """How the server has ended, with its last output. Another one can be started then."""
        status = None
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its socket is closed a moment before it ends
                status = self._child.wait(_END_SECONDS)
            self._child = None
        how = "has ended" if status is None else _describe_status(status)
        words = self._last_words() if status and status > 0 else ""
        return f"the compile server {how}" + (f"; it said: {words}" if words else "")

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            return (self._directory / LOG).read_text(errors="replace").strip()[-500:]
        return ""

    def leave(self) -> None:
        """Be no worker of the directory any more. The last worker ends the server, and removes the directory."""
        if self._share is not None:
            os.close(self._share)
            self._share = None
            with contextlib.suppress(OSError):
                self._end_as_last()
        if self._child is not None and self._child.poll() is None:
            self._child.returncode = 0  # it serves other workers: not a child to wait for
        self._child = None

    def _end_as_last(self) -> None:
        alone = private_directory.lock(self._directory, WORKERS_LOCK)
        if alone is None:
            return
        try:
            held = self._end_server()
            private_directory.remove(self._directory)
            if held is not None:
                os.close(held)
        finally:
            os.close(alone)

    def _end_server(self) -> int | None:
        """End the server, by SIGKILL if it does not end in time because it is stopped. Returns its lock."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._signal(number)
            held = self._wait_for_lock()
            if held is not None:
                if self._child is not None:
                    self._child.wait()
                return held
        return None

    def _wait_for_lock(self) -> int | None:
        end = time.monotonic() + _END_SECONDS
        while (held := private_directory.lock(self._directory, SERVER_LOCK)) is None and time.monotonic() < end:
            time.sleep(_RETRY_SECONDS)
        return held

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the process that was started last, unless its pid is that of another process by now. A
        server that is killed cannot end the compiler that it runs."""
        pid, _, mark = (self._directory / PROCESS).read_text().partition(" ")
        if not is_running(int(pid), mark):
            return
        log.info("the compile server (pid %s) gets %s", pid, number.name)
        jobs = _children(int(pid)) if number is signal.SIGKILL else []
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), number)
        for job in jobs:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(job, number)


def _describe_status(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _children(pid: int) -> list[int]:
    """The child processes of a process, where the system tells."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []
