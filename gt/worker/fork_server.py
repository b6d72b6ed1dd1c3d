"""The process that the workers of a program are forked from: torch is imported once for all of them.

A fork copies the calling thread only, so this process has no other one when it forks, and it never uses CUDA, which
does not survive a fork. OpenBLAS, which NumPy loads, ends its threads before a fork and starts them again after it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from gt.wire.lifeline import adopt_orphans, clear_up, note_processes, signal_at_parent_end
from gt.wire.worker_status import GRACE_SECONDS, WorkerStatus
from gt.worker.__main__ import main as run_worker

_POLL_SECONDS = 0.5
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM)


class ForkServer:
    """Forks workers, reports their starts and ends to the client, and ends them with the client."""

    def __init__(self, client: int, directory: Path, shows_logs: bool) -> None:
        self._client = client
        self._directory = directory
        self._shows_logs = shows_logs
        self._pid = os.getpid()
        self._numbers: dict[int, int] = {}  # numbers of the running workers, by pid
        self._reports = Connection(os.dup(sys.stdin.fileno()))  # the standard input is a socket of the client's

    def fork(self, number: int) -> bool:
        """Fork a worker. Returns whether this process is the worker."""
        pid = os.fork()
        if not pid:
            self._become_worker(number)
            return True
        self._numbers[pid] = number
        self._report(WorkerStatus(number, pid))
        return False

    def _become_worker(self, number: int) -> None:
        """Make a new process end with the fork server, and have its own signals, output and random numbers."""
        signal_at_parent_end(signal.SIGKILL)
        if sys.platform == "linux":
            Path("/proc/self/comm").write_text(f"gt-worker-{number}")
        if os.getppid() != self._pid:  # it has ended before this process asked for the signal
            os._exit(1)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        self._reports.close()
        if not self._shows_logs:
            log = os.open(self._directory / f"worker-{number}.log", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(log, sys.stderr.fileno())
            os.close(log)
        torch.default_generator.seed()
        gc.enable()

    def serve(self) -> None:
        """Watch the workers until the client asks for their end by SIGTERM, or has ended itself."""
        note_processes(self._directory, [self._client, *self._numbers])
        asked = False
        while not asked and self._has_client():
            received = signal.sigtimedwait(_SIGNALS, _POLL_SECONDS)
            asked = received is not None and received.si_signo == signal.SIGTERM
            self._reap()
        self._end_workers(GRACE_SECONDS if asked else 0.0)
        if not self._has_client():
            clear_up(self._directory)

    def _has_client(self) -> bool:
        return os.getppid() == self._client

    def _reap(self) -> None:
        """Note the workers that have ended, and forget processes that they have left behind."""
        with contextlib.suppress(ChildProcessError):  # there are none
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid in self._numbers:
                    self._report(WorkerStatus(self._numbers.pop(pid), pid, os.waitstatus_to_exitcode(status)))

    def _end_workers(self, grace: float) -> None:
        self._signal_workers(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while self._numbers and (left := deadline - time.monotonic()) > 0:
            signal.sigtimedwait((signal.SIGCHLD,), left)
            self._reap()
        self._signal_workers(signal.SIGKILL)  # also ends those that are stopped
        while self._numbers:
            signal.sigwait((signal.SIGCHLD,))
            self._reap()

    def _signal_workers(self, number: signal.Signals) -> None:
        for pid in self._numbers:
            os.kill(pid, number)

    def _report(self, status: WorkerStatus) -> None:
        with contextlib.suppress(OSError):  # the client has ended
            self._reports.send_bytes(msgspec.json.encode(status))


def main() -> NoReturn:
    """Run a fork server and its workers. All exit by `os._exit`, as Python's own exit takes 0.4 s to free modules."""
    code = 1
    try:
        code = _run(sys.argv[1:])
    except Exception:
        traceback.print_exc()
    finally:
        logging.shutdown()
        os._exit(code)


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("directory", type=Path, help="the directory of sockets and logs")
    parser.add_argument("--client", type=int, help="the process of the program")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--gpus", type=int, help="worker n takes GPU n, modulo their number")
    parser.add_argument("--shows-logs", action="store_true", help="workers write to this process's stderr")
    options, worker_options = parser.parse_known_args(arguments)  # the others are those of `python -m gt.worker`
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    adopt_orphans()  # the compile server of workers that were killed
    tempfile.gettempdir()  # its first call makes a file, which a worker that is killed then would leave behind
    gc.freeze()  # workers share the pages of all that was imported, as long as nobody writes to them
    server = ForkServer(options.client, options.directory, options.shows_logs)
    for number in range(options.workers):
        if server.fork(number):
            device = ["--device", f"cuda:{number % options.gpus}"] if options.gpus else []
            return run_worker([*worker_options, *device, "--lifeline", str(options.directory)])
    server.serve()
    return 0
