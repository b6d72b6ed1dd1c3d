"""The thin loop around the executor: poll, decode, run, send."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import MutableSequence, Sequence
from pathlib import Path
from typing import Any, cast

from gt.core.errors import ConnectionLost, ProtocolError, ServerLost
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
from gt.core.settings import Settings
from gt.version import __version__
from gt.wire import shared_memory
from gt.wire.codec import Decoder, Frame, encode, encode_batches, join
from gt.wire.keys import keys_directory
from gt.wire.links import Link, open_link
from gt.wire.liveness import is_running, start_mark, this_host
from gt.worker.engines import make_engine
from gt.worker.engines.engine import Buffer
from gt.worker.exchange.process_groups import GroupExchange
from gt.worker.executor import Executor, Fill

log = logging.getLogger("gt.worker")
TICK_MS = 500
_RETRY_SECONDS = 0.1
_ENDING_SECONDS = 0.5
_REFUSALS = 3  # after which a worker ends, if they come
_REFUSAL_SECONDS = 60.0  # within this time


class _Refusal(ConnectionLost):
    """The server does not know this worker by the name that it has."""


class Worker:
    """`settings` has what this process was told by the environment."""

    def __init__(
        self, endpoint: str, backend: str, device: str = "", threads: int = 0, settings: Settings | None = None
    ) -> None:
        settings = settings or Settings()
        self._share = settings.shared_memory
        self._keys = keys_directory(settings.keys) if endpoint.startswith("tcp:") else Path()
        # The dispatcher of local workers is in a program that its user may stop and continue. It is known by its
        # process whether that is still there.
        self._silence = 0.0 if endpoint.startswith("ipc:") else settings.heartbeat_timeout
        self._stopping = False
        self._endpoint = endpoint
        self._link: Link | None = None
        self._exchange: GroupExchange | None = None
        self._commands: Decoder[Command | Refused] = Decoder(Command | Refused)
        self._refusals: list[float] = []  # when they came
        self._engine = make_engine(backend, device, threads, clears=True)
        self._server = (0, "")

    def run(self) -> None:
        """Until told to stop, or until the server ends. A worker whose connection is lost, or whose messages are
        refused, joins again with nothing: the server has given it up."""
        try:
            while not self._stopping:
                self._live()
        finally:
            self._close()

    def _live(self) -> None:
        """From joining to the loss of the connection."""
        executor = self._join()
        if executor is None:
            return
        log.info("worker %d computes on %s", executor.worker, self._engine.device)
        try:
            with self._engine.isolated():
                self._serve(executor)
        except ConnectionLost as error:
            self._require_server()
            if isinstance(error, _Refusal):
                self._count_refusal(error)
            log.warning(
                "%s (worker %d at %s); it joins again without its tensors", error, executor.worker, self._endpoint
            )
            if self._exchange is not None:
                self._exchange.leave()
            self._close()
        except Exception as error:
            with contextlib.suppress(ConnectionLost):
                self._send([Goodbye(f"{type(error).__name__}: {error}"[:4096])])
            raise

    def _count_refusal(self, refusal: _Refusal) -> None:
        """Raises ProtocolError for a worker that is refused again and again: joining once more does not help it."""
        now = time.monotonic()
        self._refusals = [*[when for when in self._refusals if when > now - _REFUSAL_SECONDS], now]
        if len(self._refusals) >= _REFUSALS:
            raise ProtocolError(f"{refusal}, {_REFUSALS} times within {_REFUSAL_SECONDS:g} s; start the server again")

    def _serve(self, executor: Executor) -> None:
        assert self._link is not None
        while not self._stopping:
            frames = self._link.receive()
            if frames is not None:
                self._work(executor, frames)
            elif self._link.is_lost():
                raise ConnectionLost("the connection was lost")
            else:
                self._check_server()

    def _send(self, reports: Sequence[Report], payloads: Sequence[Sequence[Frame]] = ()) -> None:
        assert self._link is not None
        for frames in encode_batches(reports, payloads):
            self._link.send(frames)

    def stop(self) -> None:
        """End the loop at its next turn; safe to call from a signal handler."""
        self._stopping = True

    def _join(self) -> Executor | None:
        """Say hello, however long the server takes to come up. None if this worker was told to stop before that."""
        notice = time.monotonic() + 10
        while not self._stopping:
            if time.monotonic() > notice:
                log.warning("waiting for a server at %s; start one with: python -m gt.server", self._endpoint)
                notice = time.monotonic() + 60
            self._link = open_link(self._endpoint, self._keys, TICK_MS, self._silence)
            if self._link is None:
                time.sleep(_RETRY_SECONDS)
                continue
            executor = self._greet(self._link)
            if executor is not None:
                return executor
            self._close()
        return None

    def _greet(self, link: Link) -> Executor | None:
        """None if the connection is lost before the server has answered."""
        name, cell = _progress_cell()
        hello = Hello(__version__, "worker", this_host(), os.getpid(), self._engine.device, name)
        try:
            link.send(encode([hello]))
        except ConnectionLost:
            return None
        while (frames := link.receive()) is None:
            if link.is_lost() or self._stopping:
                return None
        (answer, *_), _ = Decoder[Welcome | Refused](Welcome | Refused).decode(frames)
        if isinstance(answer, Refused):
            raise ProtocolError(answer.reason)
        self._server = (answer.pid, start_mark(answer.pid)) if answer.host == this_host() else (0, "")
        self._exchange = GroupExchange(answer.ident, self._engine.device)
        executor = Executor(answer.ident, self._engine, self._exchange, self._export, owns_buffers=True)
        executor.progress = cell
        return executor

    def _work(self, executor: Executor, frames: Sequence[Frame]) -> None:
        received, payloads = self._commands.decode(frames)
        if isinstance(received[0], Refused):  # which comes alone
            raise _Refusal(f"the server has refused a message: {received[0].reason}")
        commands = cast(list[Command], received)
        if isinstance(commands[-1], WorkerShutdown):
            commands.pop()
            self.stop()
        created = [command for command in commands if isinstance(command, WorkerCreateTensor)]
        # lazily: the segments of a client that has left are gone, and that must be the failure of its tensors only
        outgoing = executor.run(commands, map(self._bytes, created, payloads))
        if outgoing:
            reports: list[Report] = [report for report, _ in outgoing]
            payloads = [[buffer] if _is_inline(report) else [] for report, buffer in outgoing if buffer is not None]
            self._send(reports, payloads)

    def _bytes(self, command: WorkerCreateTensor, payload: Sequence[Frame]) -> Buffer:
        segment = command.segment
        return shared_memory.take(segment.name, segment.nbytes) if segment.name else join(payload)

    def _export(self, nbytes: int, sharing: bool, fill: Fill) -> tuple[str, memoryview]:
        """In memory that the client maps, where it can, where that pays and where there is room."""
        if sharing and self._share and nbytes >= shared_memory.SHARE_BYTES:
            try:
                return shared_memory.create(nbytes, fill)
            except OSError as error:
                log.warning("%d bytes are sent with the message, not shared: %s", nbytes, error)
        data = memoryview(bytearray(nbytes))
        fill(data)
        return "", data

    def _check_server(self) -> None:
        pid, mark = self._server
        if pid and not is_running(pid, mark):
            raise ServerLost(f"the server at {self._endpoint} (pid {pid}) has ended")

    def _require_server(self) -> None:
        """The connection to a server that ends may be lost a moment before its process is gone."""
        end = time.monotonic() + _ENDING_SECONDS
        while time.monotonic() < end:
            self._check_server()
            time.sleep(_RETRY_SECONDS)

    def _close(self) -> None:
        if self._link is not None:
            self._link.close()
        shared_memory.sweep(os.getpid())


def _is_inline(report: Any) -> bool:
    return isinstance(report, Fetched) and not report.segment.name


def _progress_cell() -> tuple[str, MutableSequence[int]]:
    """Where a worker shows what it is at. Without shared memory only it can see that itself."""
    try:
        name, cell = shared_memory.create(16)
    except OSError as error:
        log.warning("there is no shared memory to show progress in: %s", error)
        return "", [0, 0]
    return name, cast(MutableSequence[int], cell.cast("q"))
