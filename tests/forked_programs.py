"""Programs that are forked from a process with torch imported, with the interface of `subprocess.Popen`."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from tests.program_server import Request

CAN_FORK = hasattr(os, "pidfd_open")


class ForkedProgram:
    """A program that runs, or has run, with pipes for its output."""

    def __init__(self, server: socket.socket, request: Request) -> None:
        self.args = request.arguments
        self.returncode: int | None = None
        (out, their_out), (err, their_err), (self._status, their_status) = os.pipe(), os.pipe(), os.pipe()
        theirs = [their_out, their_err, their_status]
        socket.send_fds(server, [json.dumps(request).encode()], theirs)
        for descriptor in theirs:
            os.close(descriptor)
        self.pid = int(server.recv(64))
        self.stdout: TextIO = open(out)
        self.stderr: TextIO = open(err)
        self._output: dict[TextIO, str] = {}
        self._readers: list[threading.Thread] = []

    def poll(self) -> int | None:
        if self.returncode is None and self._has_ended(0):
            self.wait()
        return self.returncode

    def _has_ended(self, timeout: float | None) -> bool:
        ends = select.poll()
        ends.register(self._status, select.POLLIN)
        return bool(ends.poll(None if timeout is None else timeout * 1000))

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not self._has_ended(timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(os.read(self._status, 64))
            os.close(self._status)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """The rest of the output, when the program has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        files = (self.stdout, self.stderr)
        if not self._readers:
            self._readers = [threading.Thread(target=self._read, args=(file,), daemon=True) for file in files]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self._output[self.stdout], self._output[self.stderr]

    def _read(self, file: TextIO) -> None:
        with file:
            self._output[file] = file.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended after the poll
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ProgramServer:
    """The process that programs are forked from. It ends with this one."""

    def __init__(self, directory: Path) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.program_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                cwd=directory,
                env={**os.environ, "PYTHONPATH": str(directory), "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
            )
        self.pid = self._process.pid
        atexit.register(self.close)

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], host: int = 0) -> ForkedProgram:
        return ForkedProgram(self._connection, Request([*arguments], {**environment}, host))

    def close(self) -> None:
        self._connection.close()
        self._process.wait()
