"""A worker's connection to the compile server of its host, which it starts if there is none. No call waits."""

from __future__ import annotations

import functools
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from gt.core.errors import ConnectionLost
from gt.core.settings import CompileSettings
from gt.worker.compilation import private_directory
from gt.worker.compilation.compile_units import CompileAnswer, CompileFailed, CompileRequest, CompileUnit
from gt.worker.compilation.server_process import ServerProcess
from gt.worker.compilation.socket_framing import FrameReader, FrameWriter

log = logging.getLogger("gt.compile")
_CONNECT_SECONDS = 120.0  # a server imports torch's compiler before it listens
_NOTICE_SECONDS = 60.0  # time without an answer before a notice
_MAX_RESTARTS = 2  # restarts of servers that were killed


class CompileServerConnection:
    """Sends units to the compile server at a directory, which `locate` gives at the first use. Each unit gets one
    answer, which `poll` passes on. A server that is killed is replaced, and the units that it had are sent again."""

    def __init__(self, locate: Callable[[], Path], settings: CompileSettings) -> None:
        self._locate = functools.cache(locate)
        self._options = ["--limit", str(settings.seconds), "--nice", str(settings.niceness)]
        self._link: socket.socket | None = None
        self._known: dict[str, CompileAnswer] = {}
        self._answers: list[CompileAnswer] = []
        self._takers: dict[str, list[Callable[[CompileAnswer], None]]] = {}
        self._pending: dict[str, bytes] = {}
        self._decoder: msgspec.msgpack.Decoder[CompileAnswer] = msgspec.msgpack.Decoder(CompileAnswer)
        self._give_up = 0.0
        self._notice = 0.0
        self._restarts = 0
        self._process: ServerProcess | None = None

    def submit(self, unit: CompileUnit, take: Callable[[CompileAnswer], None]) -> None:
        """Ask for a unit; `take` is called with the answer, by `poll`."""
        key = unit.key
        self._takers.setdefault(key, []).append(take)
        if key in self._known:
            self._answers.append(self._known[key])
        elif key not in self._pending:
            self._notice = self._notice or time.monotonic() + _NOTICE_SECONDS
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
            self._tell_of_wait()
        answers, self._answers = self._answers, []
        for answer in answers:
            for take in self._takers.pop(answer.key, []):
                take(answer)

    def _tell_of_wait(self) -> None:
        """Say once that code is long in coming: one of the workers of a host, the one that has started the server."""
        if time.monotonic() > self._notice and not self._known and self._server.is_own:
            self._notice = float("inf")
            log.warning(
                "compile: true has no code after %g s, of %d runs of ops: the compiler waits for a CPU, or is slow; "
                "ops go on one by one meanwhile (gt.debug.get_worker_stats() tells how many are compiling)",
                _NOTICE_SECONDS,
                len(self._pending),
            )

    @property
    def waiting(self) -> int:
        """The number of units that were asked for and have no answer yet."""
        return len(self._pending)

    @property
    def is_waiting(self) -> bool:
        return bool(self._pending or self._answers)

    def close(self) -> None:
        """Leave the server, which ends with its last worker."""
        self._close_link()
        self._pending.clear()
        self._takers.clear()
        if self._process is not None:
            self._process.leave()
            self._process = None

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

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
            log.info("the connection to the compile server is lost: %s", error)
            self._replace_server()

    def _replace_server(self) -> None:
        """The next `poll` starts another server, unless that was done often enough."""
        self._close_link()
        reason = self._server.describe_end()
        if self._restarts >= _MAX_RESTARTS:
            self._fail(f"{reason}, for the third time")
            return
        self._restarts += 1
        self._give_up = time.monotonic() + _CONNECT_SECONDS
        log.info("%s; another one is started", reason)

    def _fail(self, reason: str) -> None:
        self._close_link()
        self._answers += [CompileFailed(key, reason) for key in self._pending]
        self._pending.clear()

    @property
    def _server(self) -> ServerProcess:
        if self._process is None:
            self._process = ServerProcess(self._locate(), self._options)
        return self._process

    def _connect(self) -> None:
        link = socket.socket(socket.AF_UNIX)
        try:
            if not self._server.join():
                link.close()
                return
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
        status = self._server.status()
        if status is not None and status < 0:
            self._replace_server()
        elif status is not None:
            self._fail(self._server.describe_end())
        elif time.monotonic() > self._give_up:
            self._fail(f"the compile server did not answer within {_CONNECT_SECONDS:g} s")
        else:
            try:
                self._server.start()
            except OSError as error:
                self._fail(f"the compile server cannot be started: {error}")
