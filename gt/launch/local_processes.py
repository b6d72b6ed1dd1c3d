"""Worker processes on this machine, started for one client and ended with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from multiprocessing.connection import Pipe
from pathlib import Path

import msgspec
import torch

from gt.core.environment import PYTHON, import_environment, usable_cpus
from gt.core.errors import WorkerLost
from gt.core.settings import Settings
from gt.launch.commands import MEMORY_SETTINGS
from gt.launch.launched_process import describe_end, end_processes, have_ended, last_output, make_directory, writing
from gt.wire import shared_memory
from gt.wire.worker_status import GRACE_SECONDS, WorkerStatus

# Garbage collection would take a sixth of the time of the imports, and would write to pages that workers share.
_FORK_SERVER = "import gc; gc.disable(); from gt.worker.fork_server import main; main()"
_STARTING = " while starting"
_ENDING_SECONDS = 2.0  # time for the fork server, after the end of its workers
_REPORT_SECONDS = 1.0  # time for the report of an end that was noticed already


class LocalProcesses:
    """A fork server and its workers. `endpoint` is the address of their dispatcher: a socket in a directory that only
    this user can enter."""

    def __init__(self, workers: int, settings: Settings) -> None:
        self._directory = make_directory()
        self.endpoint = f"ipc://{self._directory}/server"
        self._count = workers
        self._workers: dict[int, WorkerStatus] = {}  # the last status of each worker, by number
        self._reports, theirs = Pipe()
        self._receiving = threading.Lock()
        self._fork_server: subprocess.Popen[bytes] | None = None
        try:
            self._start(self._options(settings), theirs.fileno(), settings.shows_workers)
        except BaseException:
            self.stop()
            raise
        finally:
            theirs.close()

    def _options(self, settings: Settings) -> list[str]:
        """The options of the fork server, and those that it passes to the workers."""
        server = {"--client": os.getpid(), "--workers": self._count, "--gpus": torch.cuda.device_count()}
        threads = max(1, usable_cpus() // self._count)
        worker = {"--connect": self.endpoint, "--backend": settings.backend, "--threads": threads}
        return [str(self._directory), *(str(part) for option in (server | worker).items() for part in option)]

    def _start(self, options: list[str], standard_input: int, shows_logs: bool) -> None:
        with writing(self._directory):
            log = None if shows_logs else self._log("fork-server").open("wb")
        try:
            self._fork_server = subprocess.Popen(
                [*PYTHON, "-c", _FORK_SERVER, *options, *(["--shows-logs"] if shows_logs else [])],
                stdin=standard_input,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=_environment(),
                start_new_session=True,  # so that Ctrl-C interrupts the program only
            )
        finally:
            if log is not None:
                log.close()

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def watch(self) -> None:
        """Raise WorkerLost if a process has ended while it was starting."""
        self._receive_all()
        for worker in self._workers.values():
            if worker.exit_code is not None:
                raise WorkerLost(f"worker {worker.number} (pid {worker.pid}) {self._describe(worker, _STARTING)}")
        if ending := self._fork_server_ending(0.0, _STARTING):
            names = "worker 0" if self._count == 1 else f"workers 0 to {self._count - 1}"
            raise WorkerLost(f"{names} cannot start: their {ending}")

    def ending(self, pid: int) -> str:
        """The exit code or signal of one of these workers, with its last output; "" for other processes."""
        deadline = time.monotonic() + _REPORT_SECONDS
        self._receive_all()
        while (worker := self._find(pid)) is not None and worker.exit_code is None:
            if not self._receive(max(0.0, deadline - time.monotonic())):
                break
        if worker is None:
            return ""
        if worker.exit_code is not None:
            return self._describe(worker)
        ending = self._fork_server_ending(_REPORT_SECONDS)
        return f"was killed, since its {ending}" if ending else ""

    def _find(self, pid: int) -> WorkerStatus | None:
        return next((worker for worker in self._workers.values() if worker.pid == pid), None)

    def _describe(self, worker: WorkerStatus, when: str = "") -> str:
        """How a worker has ended."""
        assert worker.exit_code is not None
        return describe_end(worker.exit_code, self._last_output(f"worker-{worker.number}"), when)

    def _fork_server_ending(self, seconds: float, when: str = "") -> str:
        """How the fork server has ended, if it has or does so within some seconds."""
        server = self._fork_server
        if server is None or not have_ended([server], seconds):
            return ""
        how = describe_end(server.returncode, self._last_output("fork-server"), when)
        return f"fork server (pid {server.pid}) {how}"

    def _receive_all(self) -> None:
        while self._receive(0.0):
            pass

    def _receive(self, seconds: float) -> bool:
        """Take a report of the fork server, waiting so long for it. Returns whether there was one."""
        with self._receiving:
            try:
                if not self._reports.poll(seconds):
                    return False
                worker = msgspec.json.decode(self._reports.recv_bytes(), type=WorkerStatus)
            except (EOFError, OSError):  # the fork server and all its workers have ended
                return False
            self._workers[worker.number] = worker
            return True

    def _last_output(self, name: str) -> str:
        try:
            return last_output(self._log(name).read_bytes())
        except OSError:
            return ""

    def stop(self) -> None:
        """End all processes: by SIGTERM, and by SIGKILL those that do not end in time."""
        if self._fork_server is not None:
            end_processes([self._fork_server], GRACE_SECONDS + _ENDING_SECONDS)
            while self._receive(_ENDING_SECONDS):  # False once all workers have ended
                pass
        self._reports.close()
        for worker in self._workers.values():
            shared_memory.sweep(worker.pid)
        shutil.rmtree(self._directory, ignore_errors=True)


def _environment() -> dict[str, str]:
    """The environment of a worker, which finds the same packages as this process."""
    return {**MEMORY_SETTINGS, **os.environ, **import_environment()}
