"""Worker processes on this machine, started for one client and ended with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from gt.core.errors import SettingsError, WorkerLost
from gt.core.settings import Settings
from gt.wire import shared_memory
from gt.wire.lifeline import note_processes

_GRACE_SECONDS = 3.0


class LocalProcesses:
    """Runs `python -m gt.worker` for each worker. `endpoint` is the address of their dispatcher: a socket in a
    directory that only this user can enter."""

    def __init__(self, workers: int, settings: Settings) -> None:
        self._directory = _make_directory()
        self.endpoint = f"ipc://{self._directory}/server"
        self._shows_logs = settings.verbose or settings.debug_worker
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._watchdog: subprocess.Popen[bytes] | None = None
        try:
            threads = max(1, (os.cpu_count() or 1) // workers)
            for number in range(workers):
                options = ["--backend", settings.backend, "--threads", str(threads), *_device_options(number)]
                self._start(f"worker {number}", ["gt.worker", "--connect", self.endpoint, *options])
            pids = [process.pid for process in self._processes.values()]
            with _writing(self._directory):
                note_processes(self._directory, [os.getpid(), *pids])
            self._watchdog = _start_watchdog(self._directory, pids)
        except BaseException:
            self.stop()
            raise

    def _start(self, name: str, arguments: list[str]) -> None:
        with _writing(self._directory):
            log = None if self._shows_logs else self._log(name).open("wb")
        self._processes[name] = subprocess.Popen(
            [sys.executable, "-m", *arguments, "--lifeline", str(self._directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=_environment(),
            start_new_session=True,  # so that Ctrl-C interrupts the program only
        )
        if log is not None:
            log.close()

    def _log(self, name: str) -> Path:
        return self._directory / f"{name.replace(' ', '-')}.log"

    def watch(self) -> None:
        """Raise WorkerLost if a process has ended while it was starting."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                ending = _ending(process) + " while starting" + self._last_output(name)
                raise WorkerLost(f"{name} (pid {process.pid}) {ending}")

    def ending(self, pid: int) -> str:
        """The exit code or signal of one of these processes, with its last output; "" for other processes."""
        for name, process in self._processes.items():
            if process.pid == pid and _wait(process, 1.0):
                return _ending(process) + self._last_output(name)
        return ""

    def _last_output(self, name: str) -> str:
        try:
            text = self._log(name).read_text(errors="replace").strip()
        except OSError:
            return ""
        return f"; it said:\n{text[-2000:]}\n" if text else ""

    def stop(self) -> None:
        """End all processes: by SIGTERM, and by SIGKILL those that do not end in time."""
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in self._processes.values():
            if not _wait(process, max(0.0, deadline - time.monotonic())):
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
            shared_memory.sweep(process.pid)
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


def _make_directory() -> Path:
    """A directory for sockets and logs that only this user can enter."""
    with _writing("a new directory"):
        return Path(tempfile.mkdtemp(prefix="gt-"))


@contextmanager
def _writing(what: Path | str) -> Generator[None]:
    """Raise SettingsError if temporary files cannot be written."""
    try:
        yield
    except OSError as error:
        raise SettingsError(
            f"{what} for the sockets and logs of workers cannot be written: {error}; set TMPDIR to a directory that "
            f"exists, is writable and has room"
        ) from None


def _start_watchdog(directory: Path, workers: Sequence[int]) -> subprocess.Popen[bytes]:
    arguments = [str(os.getpid()), str(directory), *map(str, workers)]
    return subprocess.Popen(
        [sys.executable, "-S", "-m", "gt.launch.watchdog", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_environment(),
        start_new_session=True,
    )


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _ending(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _device_options(number: int) -> list[str]:
    count = torch.cuda.device_count()
    return ["--device", f"cuda:{number % count}"] if count else []


def _environment() -> dict[str, str]:
    """The environment of a worker, which finds the same packages as this process."""
    paths = [path or os.getcwd() for path in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
