"""A worker process: joins a server, then receives batches of commands, runs them and sends reports."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from gt.core import worker_progress
from gt.core.errors import ConnectionLost, GTError, ProtocolError, ServerLost
from gt.core.messages import (
    TOLD_TO_END,
    ByteRange,
    Command,
    Fetched,
    Goodbye,
    Hello,
    Leaving,
    Refused,
    Report,
    TakeFrames,
    Welcome,
    WorkerCreateTensor,
    WorkerLosePeer,
    WorkerShutdown,
)
from gt.core.settings import Settings
from gt.version import __version__
from gt.wire import shared_memory
from gt.wire.addresses import LOOPBACK, NotResolved, reaching_address, resolve
from gt.wire.codec import Buffer, Decoder, Frame, Payload, encode, encode_batches, join
from gt.wire.connections import Link, NoConnection, open_link
from gt.wire.held_frames import HeldBytes, HeldFramesReader
from gt.wire.process_identity import host_name, is_running, start_mark, this_host
from gt.wire.server_keys import CLIENT_FILE, keys_directory
from gt.wire.sockets import prepare_uncopied, uncopied
from gt.worker.activity_reports import ActivityReports
from gt.worker.compilation.private_directory import shared_directory
from gt.worker.compilation.server_connection import CompileServerConnection
from gt.worker.engines import make_engine
from gt.worker.exchange import Exchange, ProcessExchange, shares_memory
from gt.worker.executor import Executor, ReportAndBytes
from gt.worker.session_watch import Abandoned, ParkedThreads, SessionWatch
from gt.worker.tensor_transfers import WriteBytes

log = logging.getLogger("gt.worker")
POLL_MS = 500
_RETRY_SECONDS = 0.1
_ENDING_SECONDS = 0.5
_SIGNAL_SECONDS = 0.05  # time for the handler of a signal that arrived in another thread
_DRAINING_SECONDS = 2.0  # time for the batches that a worker has received when it ends
_MAX_REFUSALS = 3  # a worker ends after this number of refusals
_REFUSAL_SECONDS = 60.0  # within this time


class _Refusal(ConnectionLost):
    """The server refused a message, because it does not know this worker's connection."""


class WorkerProcess:
    """The connection to the server, and the engine. Everything else is made anew each time the worker joins. Before
    that, `await_turn` is called with a function that tells whether the worker is to end; after it, `note_joined` with
    the worker's id and device. `memory` are the bytes of tensors that it may hold (0: as many as its device has memory
    for)."""

    def __init__(
        self,
        endpoint: str,
        backend: str,
        device: str = "",
        threads: int = 0,
        settings: Settings | None = None,
        compile_directory: Path | None = None,
        note_joined: Callable[[int, str], None] = lambda worker, device: None,
        await_turn: Callable[[Callable[[], bool]], None] = lambda is_stopping: None,
        memory: int = 0,
    ) -> None:
        self._memory = memory
        settings = settings or Settings()
        self._await_turn = await_turn
        self._note_joined = note_joined
        self._shares_memory = settings.shares_memory
        self._transport = settings.transport
        self._attached = shared_memory.AttachedBuffers()
        self._keys = _keys_for(endpoint, settings)
        self._interface = settings.interface
        # The dispatcher of local workers is inside a program that its user may stop and continue, so silence says
        # nothing about it; the end of its process does.
        self._silence = 0.0 if endpoint.startswith("ipc:") else settings.heartbeat_timeout
        self._stopping = False
        self._is_leaving = self._has_told = False  # asked to end by a signal; reported to the server
        self._is_serving = False
        self._is_dismissed = False  # shut down by its server, not by a signal
        self._interrupt = socket.socketpair()  # ends waits for messages when the worker is stopped
        for end in self._interrupt:
            end.setblocking(False)
        self._endpoint = endpoint
        self._link: Link | None = None
        self._using_link = threading.Lock()  # held by the thread that uses it
        self._activity: ActivityReports | None = None
        self._exchange: Exchange | None = None
        self._ahead: deque[list[bytes]] = deque()  # batches that were received while an exchange waited
        self._held = HeldFramesReader(_allocate, self._take_frames, self._await_frames)
        self._refused_ahead = ""  # the reason of a refusal among them
        self._commands: Decoder[Command | Refused] = Decoder(Command | Refused, are_held=True)
        self._refusals: list[float] = []  # their times
        self._engine = make_engine(backend, device, threads, clears=True)
        self._compiles_all = settings.auto_compile
        self._compile_server = CompileServerConnection(
            lambda: compile_directory or shared_directory(endpoint), settings.compiling
        )
        self._server = (0, "")
        self._watch: SessionWatch | None = None
        self._parked = ParkedThreads()

    def run(self) -> None:
        """Serve until `stop`, or until the server ends. A worker whose connection is lost, or whose messages are
        refused, joins again without tensors, because the server has given it up."""
        try:
            prepare_uncopied()
            self._run(None)
        except Abandoned:
            threading.Event().wait()  # the thread that goes on ends the process
        finally:
            self.close()

    def _run(self, executor: Executor | None) -> None:
        """With an executor, go on in place of the thread that has run its commands so far."""
        try:
            if executor is not None:
                self._serve_until_lost(executor, resumes=True)
            while not self._stopping:
                self._run_once()
        except ServerLost:
            time.sleep(_SIGNAL_SECONDS)
            self._note_last_messages()  # the end of the process may be noticed before the server's last message
            if not self._stopping and not self._is_leaving:  # both often get the signal together
                raise

    def _succeed(self, executor: Executor) -> None:
        """Go on in a new thread, and end the process: its main thread may be in the middle of an op for good."""
        code = 0
        try:
            self._run(executor)
        except Abandoned:
            return
        except GTError as error:
            log.error("worker %d ends: %s", executor.worker, error)
            code = 1
        except Exception:
            log.exception("worker %d ends because of a mistake of GT", executor.worker)
            code = 1
        self._end_process(code)

    def _end_process(self, code: int) -> None:
        """Not by an exception or `sys.exit`, which the thread in the middle of an op would not see."""
        try:
            self.close()
            logging.shutdown()
        finally:
            os._exit(code)

    def _run_once(self) -> None:
        """Join the server, and serve until the connection is lost."""
        executor = self._join()
        if executor is None:
            return
        log.info("worker %d computes on %s", executor.worker, self._engine.device)
        self._note_joined(executor.worker, self._engine.device)
        self._serve_until_lost(executor)

    def _serve_until_lost(self, executor: Executor, *, resumes: bool = False) -> None:
        watch = self._watch = self._make_watch(executor)
        self._is_serving = True
        try:
            with self._engine.isolated():
                if resumes:
                    self._send_reports(executor.resume())
                self._serve(executor)
            if not self._is_dismissed or self._has_told:
                self._send([Goodbye(TOLD_TO_END)])
        except Abandoned:
            assert watch is not None
            watch.left.set()
            raise
        except ConnectionLost as error:
            self._is_serving = False
            self._note_last_messages()
            if self._is_leaving:
                self.stop()
            if self._stopping:
                return
            self._require_server()
            if isinstance(error, _Refusal):
                self._count_refusal(error)
            log.warning(
                "%s (worker %d at %s); it joins again without its tensors", error, executor.worker, self._endpoint
            )
            if self._exchange is not None:
                self._exchange.leave()
            self._close_link()
        except Exception as error:
            with contextlib.suppress(ConnectionLost):
                self._send([Goodbye(f"{type(error).__name__}: {error}"[:4096])])
            raise

    def _count_refusal(self, refusal: _Refusal) -> None:
        """Raises ProtocolError for a worker that is refused repeatedly: joining once more does not help."""
        now = time.monotonic()
        self._refusals = [*[when for when in self._refusals if when > now - _REFUSAL_SECONDS], now]
        if len(self._refusals) >= _MAX_REFUSALS:
            raise ProtocolError(
                f"{refusal}, {_MAX_REFUSALS} times within {_REFUSAL_SECONDS:g} s; start the server again"
            )

    def _serve(self, executor: Executor) -> None:
        """Run batches until the worker is asked to end, and then those that it has received already."""
        assert self._link is not None
        end = float("inf")
        while time.monotonic() < end:
            if self._stopping and end == float("inf"):
                end = time.monotonic() + _DRAINING_SECONDS
            self._tell_leaving()
            frames = self._receive()
            if frames is not None:
                self._run_batch(executor, frames)
            elif self._stopping:
                return
            elif self._link.is_lost():
                raise ConnectionLost("the connection was lost")
            else:
                self._check_server()

    def _receive(self) -> list[bytes] | None:
        """Wait for a batch."""
        assert self._link is not None
        with self._using_link:
            if self._ahead:
                return self._ahead.popleft()
            if self._activity is None:
                return self._link.receive(waits=not self._stopping)
            self._activity.report_if_due()
            frames = self._link.receive(waits=not self._stopping)
            if frames is None:
                self._activity.report()
        return frames

    def _tell_leaving(self) -> None:
        """Notify the server, once, that this worker was asked to end: it moves the tensors to other workers."""
        if self._is_leaving and not self._has_told:
            self._has_told = True
            self._send([Leaving()])
        if self._is_leaving:
            with contextlib.suppress(BlockingIOError):
                self._interrupt[0].recv(64)  # the next waits do not end at once

    def _look_ahead(self) -> None:
        """Called while an exchange waits for its members. Receives the batches that follow, which run later, and tells
        the exchange of the workers that were lost. Raises if this worker has no reason to wait."""
        self._tell_leaving()
        with self._using_link:
            is_lost = self._receive_ahead()
        if self._stopping:
            raise ConnectionLost("this worker was told to end")
        if self._refused_ahead:
            raise ConnectionLost(f"the server has refused a message: {self._refused_ahead}")
        if is_lost:
            raise ConnectionLost("the connection to the server was lost")
        self._check_server()

    def _receive_ahead(self) -> bool:
        """Receive the batches that have come, and run none. Returns whether the connection is lost. The caller has the
        lock."""
        assert self._link is not None
        while (frames := self._link.receive(waits=False)) is not None:
            self._keep_ahead(frames)
        return self._link.is_lost()

    def _keep_ahead(self, frames: list[bytes]) -> None:
        """Keep a batch that runs later, or frames of an upload."""
        if self._held.note(frames):
            return
        self._ahead.append(frames)
        with contextlib.suppress(ProtocolError):  # raised again when the batch runs
            self._note_ahead(self._commands.decode(frames)[0])

    def _take_frames(self, start: int, stop: int) -> None:
        """Ask the server for frames of uploads."""
        assert self._link is not None
        with self._using_link:
            self._link.send(encode([TakeFrames(start, stop)]))

    def _await_frames(self) -> None:
        """Wait for frames of an upload. Raises ConnectionLost if none will come."""
        assert self._link is not None
        with self._using_link:
            frames = self._link.receive()  # first, since looking ahead may take the frames, and more need not come
            if frames is not None:
                self._keep_ahead(frames)
        if frames is None:
            self._look_ahead()

    def _make_watch(self, executor: Executor) -> SessionWatch | None:
        """Not for a worker of a single program, which ends with it."""
        if not self._endpoint.startswith("tcp:") or not SessionWatch.is_possible(self._engine.device):
            return None

        def look_ahead() -> list[Command] | None:
            if not self._using_link.acquire(blocking=False):
                return []
            try:
                is_over = self._receive_ahead() or self._is_dismissed or bool(self._refused_ahead)
                batches = list(self._ahead)
            finally:
                self._using_link.release()
            waiting = list(executor.commands_ahead())
            with contextlib.suppress(ProtocolError):  # raised when the batch runs
                for frames in batches:
                    waiting += cast(list[Command], self._commands.decode(frames)[0])
            return None if is_over else waiting

        def end(reason: str) -> None:
            log.error("worker %d ends: %s", executor.worker, reason)
            with contextlib.suppress(ConnectionLost):
                self._send([Goodbye(reason)])
            self._using_link.acquire()  # for good: the thread in the op does not use a closed link
            self._end_process(1)

        return SessionWatch(executor, self._parked, look_ahead, lambda: self._succeed(executor), end)

    def _note_last_messages(self) -> None:
        """Note the messages that came before the connection was lost: the server may have shut this worker down."""
        while self._link is not None and (frames := self._link.receive(waits=False)) is not None:
            with contextlib.suppress(ProtocolError):
                self._note_ahead(self._commands.decode(frames)[0])

    def _note_ahead(self, messages: Sequence[Command | Refused]) -> None:
        for message in messages:
            if isinstance(message, WorkerLosePeer):
                assert self._exchange is not None
                self._exchange.lose_worker(message.worker)
            elif isinstance(message, WorkerShutdown):
                self._is_dismissed = True
                self.stop()
            elif isinstance(message, Refused):
                self._refused_ahead = message.reason

    def _send(self, reports: Sequence[Report], payloads: Sequence[Sequence[Frame]] = ()) -> None:
        assert self._link is not None
        with self._using_link:
            for frames in encode_batches(reports, payloads):
                self._link.send(uncopied(frames))

    def leave(self) -> None:
        """End the loop when the server has moved the tensors to other workers; safe to call from a signal handler. A
        worker that has joined no server ends immediately."""
        self._is_leaving = True
        if not self._is_serving:
            self.stop()
        else:
            self._wake()

    def stop(self) -> None:
        """End the loop after the present batch; safe to call from a signal handler."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        """End a wait for a message."""
        with contextlib.suppress(OSError):  # it is full, or the worker has ended already
            self._interrupt[1].send(b"\0")

    def _join(self) -> Executor | None:
        """Wait for a server and join it. None if `stop` is called before that. Raises ServerLost if a server that this
        worker had joined has ended."""
        notice = time.monotonic() + 10
        problem = ""
        while not self._stopping:
            if time.monotonic() > notice:
                hint = problem or f"start one with: python -m gt.server{_keys_hint(self._keys, self._endpoint)}"
                log.warning("waiting for a server at %s; %s", self._endpoint, hint)
                notice = time.monotonic() + 60
            try:
                self._link = open_link(self._endpoint, self._keys, POLL_MS, self._silence, self._interrupt[0].fileno())
                problem = ""
            except NoConnection as error:
                self._link, problem = None, str(error)
            if self._link is None:
                self._check_server()  # the one that this worker had joined may have ended meanwhile
                time.sleep(_RETRY_SECONDS)
                continue
            self._await_turn(lambda: self._stopping)
            executor = self._greet(self._link)
            if executor is not None:
                return executor
            self._close_link()
        return None

    def _greet(self, link: Link) -> Executor | None:
        """Shake hands with the server. None if the connection is lost before it answers."""
        name, progress = _make_progress()
        hello = Hello(
            __version__,
            "worker",
            this_host(),
            os.getpid(),
            self._engine.device,
            name,
            memory=self._memory or self._engine.memory(),
            overlaps=not shares_memory(self._engine.device, self._transport),
            hostname=host_name(),
            address=(address := self._find_address()),
        )
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
        self._exchange = ProcessExchange(answer.ident, self._engine.device, self._look_ahead, self._transport, address)
        self._ahead.clear()
        self._held = HeldFramesReader(_allocate, self._take_frames, self._await_frames)
        self._refused_ahead = ""
        if answer.host != this_host():
            shared_memory.sweep(os.getpid())  # nobody there can open it: it would be left if this process is killed
            self._activity = ActivityReports(progress, self._using_link, lambda activity: link.send(encode([activity])))
        return Executor(
            answer.ident,
            self._engine,
            self._exchange,
            self._export,
            owns_buffers=True,
            progress=progress,
            compile_server=self._compile_server,
            compiles_all=self._compiles_all,
            memory=self._memory,
        )

    def _find_address(self) -> str:
        """The address at which other workers reach this one."""
        if not self._endpoint.startswith("tcp:"):
            return LOOPBACK
        with contextlib.suppress(NotResolved):
            return reaching_address(self._interface, resolve(_host_of(self._endpoint)))
        return LOOPBACK

    def _run_batch(self, executor: Executor, frames: Sequence[Frame]) -> None:
        if self._held.note(frames):  # of an upload that was interrupted
            return
        received, payloads = self._commands.decode(frames)
        if isinstance(received[0], Refused):  # always the only message of its batch
            raise _Refusal(f"the server has refused a message: {received[0].reason}")
        commands = cast(list[Command], received)
        if WorkerShutdown in map(type, commands):  # followed by what is meant for all workers
            commands = [command for command in commands if not isinstance(command, WorkerShutdown)]
            self._is_dismissed = True
            self.stop()
        created = [command for command in commands if isinstance(command, WorkerCreateTensor)]
        uploads = [
            self._upload(command.byte_range, payload) for command, payload in zip(created, payloads, strict=True)
        ]
        # Lazily: the shared buffers of a client that has left are removed, which must fail its tensors only.
        self._send_reports(executor.run(commands, map(self._bytes, created, uploads)))
        self._held.drop_rest()

    def _send_reports(self, outgoing: Sequence[ReportAndBytes]) -> None:
        if outgoing:
            reports: list[Report] = [report for report, _ in outgoing]
            payloads = [[buffer] if _is_inline(report) else [] for report, buffer in outgoing if buffer is not None]
            self._send(reports, payloads)

    def _upload(self, byte_range: ByteRange, payload: Payload) -> Payload | HeldBytes:
        """The bytes that came with a message, or where they are held."""
        is_held = not byte_range.name and byte_range.nbytes and not payload
        return self._held.announce(byte_range.nbytes) if is_held else payload

    def _bytes(self, command: WorkerCreateTensor, upload: Payload | HeldBytes) -> Buffer | HeldBytes:
        byte_range = command.byte_range
        if not byte_range.name:
            return upload if isinstance(upload, HeldBytes) else join(upload)
        return self._attached.view(byte_range.name, byte_range.offset, byte_range.nbytes) if byte_range.nbytes else b""

    def _export(self, nbytes: int, place: ByteRange | None, write: WriteBytes) -> tuple[ByteRange, memoryview]:
        """The client's memory for a tensor, if it has given one that can be mapped."""
        if place is not None and self._shares_memory and nbytes == place.nbytes:
            try:
                data = self._attached.view(place.name, place.offset, nbytes)
            except ProtocolError as error:
                log.warning("%d bytes are sent with the message, not shared: %s", nbytes, error)
            else:
                write(data)
                return place, data
        data = memoryview(bytearray(nbytes))
        write(data)
        return ByteRange("", nbytes), data

    def _check_server(self) -> None:
        pid, mark = self._server
        if pid and not is_running(pid, mark):
            raise ServerLost(f"the server at {self._endpoint} (pid {pid}) has ended")

    def _require_server(self) -> None:
        """Raise ServerLost if the server ends now: its connections may be lost a moment before its process ends."""
        end = time.monotonic() + _ENDING_SECONDS
        while time.monotonic() < end and not self._stopping:
            self._check_server()
            time.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        self._compile_server.close()
        self._close_link()
        for end in self._interrupt:
            end.close()

    def _close_link(self) -> None:
        if self._activity is not None:
            self._activity.close()
            self._activity = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._link is not None:
            self._link.close()
        shared_memory.sweep(os.getpid())


def _keys_for(endpoint: str, settings: Settings) -> Path | None:
    """The directory of the keys for a server at a port; None if the user does without encryption."""
    if not endpoint.startswith("tcp:"):
        return Path()
    return None if settings.insecure else keys_directory(settings.keys)


def _keys_hint(keys: Path | None, endpoint: str) -> str:
    """What else a worker of another machine may miss."""
    if keys is None or not endpoint.startswith("tcp:") or _host_of(endpoint) == LOOPBACK:
        return ""
    return f", and put a client key for it into {keys / CLIENT_FILE} (python -m gt.keys)"


def _host_of(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0]


def _allocate(nbytes: int) -> memoryview:
    """Memory for an upload, which NumPy does not clear, and takes in huge pages."""
    return memoryview(np.empty(nbytes, np.uint8))  # type: ignore[arg-type]


def _is_inline(report: Any) -> bool:
    return isinstance(report, Fetched) and not report.byte_range.name


def _make_progress() -> tuple[str, MutableSequence[int]]:
    """Shared memory that shows the last op begun, and its name. Without shared memory, plain memory and no name."""
    try:
        name, cell = shared_memory.create(worker_progress.NBYTES)
    except OSError as error:
        log.warning("there is no shared memory to show progress in: %s", error)
        return "", [0] * worker_progress.LENGTH
    return name, cast(MutableSequence[int], cell.cast("q"))
