"""A worker's connection to the compile server of its host, which it starts if there is none. No call waits."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from gt.core.errors import ConnectionLost
from gt.core.settings import CompileSettings
from gt.worker.compilation import private_directory
from gt.worker.compilation.compile_units import CompileAnswer, CompileFailed, CompileRequest, CompileUnit
from gt.worker.compilation.socket_framing import FrameReader, FrameWriter

log = logging.getLogger("gt.compile")
_CONNECT_SECONDS = 120.0  # a server imports torch's compiler before it listens
_END_SECONDS = 5.0
COMPILERS = ("g++", "clang++")


def find_compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """The C++ compiler of this machine: that of the variable CXX, or the first one of COMPILERS."""
    names = (environ["CXX"].split()[0],) if environ.get("CXX", "").strip() else COMPILERS
    return next((name for name in names if shutil.which(name, path=environ.get("PATH"))), None)


class CompileQueue:
    """Sends units to the compile server at a directory, which `locate` gives at the first use. Each unit gets one
    answer, which `poll` passes on. With `is_alone` no other process uses the server, which ends when the queue is
    closed."""

    def __init__(self, locate: Callable[[], Path], settings: CompileSettings, *, is_alone: bool = False) -> None:
        self._locate = functools.cache(locate)
        self._options = ["--limit", str(settings.seconds), "--nice", str(settings.niceness)]
        self._link: socket.socket | None = None
        self._is_alone = is_alone
        self._known: dict[str, CompileAnswer] = {}
        self._answers: list[CompileAnswer] = []
        self._takers: dict[str, list[Callable[[CompileAnswer], None]]] = {}
        self._pending: dict[str, bytes] = {}
        self._decoder: msgspec.msgpack.Decoder[CompileAnswer] = msgspec.msgpack.Decoder(CompileAnswer)
        self._give_up = 0.0
        self._is_used = False
        self._server: subprocess.Popen[bytes] | None = None

    def submit(self, unit: CompileUnit, take: Callable[[CompileAnswer], None]) -> None:
        """Ask for a unit; `take` is called with the answer, by `poll`."""
        key = unit.key
        self._takers.setdefault(key, []).append(take)
        if key in self._known:
            self._answers.append(self._known[key])
        elif key not in self._pending:
            self._pending[key] = msgspec.msgpack.encode(CompileRequest(key, unit))
            self._give_up = time.monotonic() + _CONNECT_SECONDS
            if self._link is not None:
                self._guarded(lambda: self._writer.write(self._pending[key]))
            else:
                self._connect()

    def poll(self) -> None:
        """Pass on the answers that have come since the last call."""
        if self._pending:
            if self._link is None:
                self._connect()
            if self._link is not None:
                self._guarded(self._receive)
        answers, self._answers = self._answers, []
        for answer in answers:
            for take in self._takers.pop(answer.key, []):
                take(answer)

    @property
    def is_waiting(self) -> bool:
        return bool(self._pending or self._answers)

    def close(self) -> None:
        """Leave the server, which ends with its last worker. If there is no server, remove its directory."""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._server is not None:
            self._leave_server(self._server)
        self._pending.clear()
        self._takers.clear()
        if not self._is_used:
            return
        with contextlib.suppress(OSError):
            held = private_directory.lock(self._locate())
            if held is not None:
                private_directory.remove(self._locate())
                os.close(held)

    def _leave_server(self, server: subprocess.Popen[bytes]) -> None:
        if not self._is_alone:
            server.returncode = server.poll() or 0  # it may serve other workers: not a child to wait for
            return
        server.terminate()
        try:
            server.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()

    def _receive(self) -> None:
        self._writer.write()
        for data in self._reader.read():
            answer = self._decoder.decode(data)
            if self._pending.pop(answer.key, None) is not None:
                self._known[answer.key] = answer
                self._answers.append(answer)

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (ConnectionLost, msgspec.MsgspecError) as error:
            self._fail(f"the compile server has ended: {error}")

    def _fail(self, reason: str) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        self._answers += [CompileFailed(key, reason) for key in self._pending]
        self._pending.clear()

    def _connect(self) -> None:
        link = socket.socket(socket.AF_UNIX)
        self._is_used = True
        try:
            private_directory.make_private(self._locate())
            link.connect(str(self._locate() / private_directory.SOCKET))
            link.setblocking(False)
        except (FileNotFoundError, ConnectionRefusedError):
            link.close()
            self._start_server()
        except OSError as error:
            link.close()
            self._fail(f"there is no compile server: {error}")
        else:
            self._link = link
            self._reader, self._writer = FrameReader(link), FrameWriter(link)
            self._guarded(self._send_pending)

    def _send_pending(self) -> None:
        for request in self._pending.values():
            self._writer.write(request)

    def _start_server(self) -> None:
        """Start a server, unless one is about to listen."""
        if self._server is not None and self._server.poll() is not None:
            self._fail(f"the compile server ended with status {self._server.returncode}: {self._last_words()}")
            return
        if time.monotonic() > self._give_up:
            self._fail(f"the compile server did not answer within {_CONNECT_SECONDS:g} s")
            return
        held = private_directory.lock(self._locate())
        if held is None:
            return
        try:
            self._server = self._spawn(held)
        except OSError as error:
            self._fail(f"the compile server cannot be started: {error}")
        finally:
            os.close(held)

    def _spawn(self, held: int) -> subprocess.Popen[bytes]:
        """All files of the compiler go to the private directory. The server holds the lock until it ends."""
        directory = str(self._locate())
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("GT_", "TORCHINDUCTOR_"))}
        environ |= {"TMPDIR": directory, "TORCHINDUCTOR_CACHE_DIR": f"{directory}/cache"}
        environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "CXX": find_compiler() or "", "OMP_NUM_THREADS": "1"}
        with open(self._locate() / private_directory.LOG, "wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "gt.worker.compilation", directory, *self._options],
                env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[held],
                start_new_session=True, cwd=directory,
            )  # fmt: skip

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            return (self._locate() / private_directory.LOG).read_text(errors="replace").strip()[-500:]
        return ""
