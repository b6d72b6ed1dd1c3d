"""The thin loop around the executor: poll, decode, run, send."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import MutableSequence, Sequence
from typing import Any, cast

import zmq

from gt.core.errors import ProtocolError, ServerLost
from gt.core.messages import (
    Command,
    Fetched,
    Goodbye,
    Hello,
    Refused,
    Report,
    Welcome,
    WorkerCreateTensor,
    WorkerShutdown,
)
from gt.version import __version__
from gt.wire import shared
from gt.wire.codec import Decoder, Frame, encode, join
from gt.wire.processes import is_running, start_mark, this_host
from gt.wire.sockets import open_socket, receive, send
from gt.worker.engines import make_engine
from gt.worker.engines.engine import Buffer
from gt.worker.executor import Executor, Fill
from gt.worker.groups import GroupExchange

log = logging.getLogger("gt.worker")
TICK_MS = 500


class Worker:
    def __init__(self, endpoint: str, backend: str, device: str = "", threads: int = 0, *, share: bool = True) -> None:
        self._share = share
        self._stopping = False
        self._endpoint = endpoint
        self._context = zmq.Context()
        self._socket = open_socket(self._context, zmq.DEALER, TICK_MS)
        self._socket.connect(endpoint)
        self._commands: Decoder[Command] = Decoder(Command)
        self._engine = make_engine(backend, device, threads)
        self._server = (0, "")

    def run(self) -> None:
        executor = self._join()
        log.info("worker %d computes on %s", executor.worker, self._engine.device)
        try:
            with self._engine.isolated():
                self._serve(executor)
        except Exception as error:
            send(self._socket, encode([Goodbye(f"{type(error).__name__}: {error}"[:4096])]))
            raise
        finally:
            self._close()

    def _serve(self, executor: Executor) -> None:
        while not self._stopping:
            frames = receive(self._socket)
            if frames is not None:
                self._work(executor, frames)
            else:
                self._check_server()

    def stop(self) -> None:
        """End the loop at its next turn; safe to call from a signal handler."""
        self._stopping = True

    def _join(self) -> Executor:
        """Say hello, however long the server takes to come up."""
        name, cell = shared.create(16)
        hello = Hello(__version__, "worker", this_host(), os.getpid(), self._engine.device, name)
        send(self._socket, encode([hello]))
        notice = time.monotonic() + 10
        while (frames := receive(self._socket)) is None:
            if time.monotonic() > notice:
                log.warning("waiting for a server at %s; start one with: python -m gt.server", self._endpoint)
                notice = time.monotonic() + 60
        (answer, *_), _ = Decoder[Welcome | Refused](Welcome | Refused).decode(frames)
        if isinstance(answer, Refused):
            raise ProtocolError(answer.reason)
        self._server = (answer.pid, start_mark(answer.pid))
        exchange = GroupExchange(answer.ident, self._engine.device)
        executor = Executor(answer.ident, self._engine, exchange, self._export, owns_buffers=True)
        executor.progress = cast(MutableSequence[int], cell.cast("q"))
        return executor

    def _work(self, executor: Executor, frames: Sequence[Frame]) -> None:
        commands, payloads = self._commands.decode(frames)
        if isinstance(commands[-1], WorkerShutdown):
            commands.pop()
            self.stop()
        created = [command for command in commands if isinstance(command, WorkerCreateTensor)]
        # lazily: the segments of a client that has left are gone, and that must be the failure of its tensors only
        outgoing = executor.run(commands, map(self._bytes, created, payloads))
        if outgoing:
            reports: list[Report] = [report for report, _ in outgoing]
            payloads = [[buffer] if _is_inline(report) else [] for report, buffer in outgoing if buffer is not None]
            send(self._socket, encode(reports, payloads))

    def _bytes(self, command: WorkerCreateTensor, payload: Sequence[Frame]) -> Buffer:
        segment = command.segment
        return shared.take(segment.name, segment.nbytes) if segment.name else join(payload)

    def _export(self, nbytes: int, sharing: bool, fill: Fill) -> tuple[str, memoryview]:
        """In memory that the client maps, where it can, where that pays and where there is room."""
        if sharing and self._share and nbytes >= shared.SHARE_BYTES:
            try:
                return shared.create(nbytes, fill)
            except OSError as error:
                log.warning("%d bytes are sent with the message, not shared: %s", nbytes, error)
        data = memoryview(bytearray(nbytes))
        fill(data)
        return "", data

    def _check_server(self) -> None:
        pid, mark = self._server
        if pid and not is_running(pid, mark):
            raise ServerLost(f"the server at {self._endpoint} (pid {pid}) has ended")

    def _close(self) -> None:
        self._socket.close()
        self._context.term()
        shared.sweep(os.getpid())


def _is_inline(report: Any) -> bool:
    return isinstance(report, Fetched) and not report.segment.name
