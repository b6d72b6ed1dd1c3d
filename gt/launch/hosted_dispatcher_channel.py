"""The channel of a client whose process also runs the dispatcher; the workers are separate processes."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from gt.client.session import Session
from gt.client.torch_patches.avoided_imports import import_shape_functions
from gt.client.transfers import copy_bytes
from gt.core.errors import SessionError, WorkerLost
from gt.core.messages import Answer, Instruction, Welcome
from gt.core.program_view import ProgramStatus
from gt.core.progress import ProgressDisplay
from gt.core.settings import Settings
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.message_queue import Outgoing
from gt.dispatcher.server import Server
from gt.launch.local_processes import LocalProcesses
from gt.monitor.log_rows import open_log
from gt.monitor.progress import open_display
from gt.wire import shared_memory
from gt.wire.client_channel import CLOSED, Received, Upload
from gt.wire.codec import Payload
from gt.wire.long_waits import LongWait
from gt.wire.payloads import Payloads
from gt.wire.sockets import MessageWait


class HostedDispatcherChannel:
    """A channel to a dispatcher in this process, whose server is polled only inside `send` and `receive`, and to worker
    processes that it starts. They import torch while the program goes on, until it first needs them."""

    is_asynchronous = True
    is_full = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.processes = LocalProcesses(settings.workers or 1, settings)
        self._payloads = Payloads(copy_bytes if settings.shares_memory else None)
        try:
            self._server = self._listen(self.processes.endpoint, settings)
        except BaseException:
            self.processes.stop()
            raise
        self.view = self._server.view
        self._arrived: deque[tuple[Answer, Sequence[Payload]]] = deque()
        self._session = 0
        self._closed = False
        self._lock = threading.Lock()
        self._waiting = MessageWait(self._lock)

    def _listen(self, endpoint: str, settings: Settings) -> Server:
        observer, silence = open_log(settings.log), settings.heartbeat_timeout
        try:
            return Server(endpoint, observer, silence=silence, copy_limit=settings.copy_limit, limits=settings.limits)
        except zmq.ZMQError as error:
            raise SessionError(
                f"cannot listen at {endpoint}: {error}; the directory for temporary files (TMPDIR) must be writable, "
                f"and its name short"
            ) from None

    def open(self) -> Session:
        """The session, when all workers are ready. Raises WorkerLost if one of them has ended."""
        display = open_display(self.settings.progress)
        try:
            import_shape_functions()  # while the workers import torch
            welcome = self._welcome(self.settings.workers or 1, self.settings.timeout, display)
        except BaseException:
            self.stop()
            raise
        return Session(self, welcome, self.settings.auto_shard, self.settings.hot_path, display)

    def _welcome(self, workers: int, timeout: float, display: ProgressDisplay | None) -> Welcome:
        """Wait until `workers` workers have joined, and open the session."""
        deadline = time.monotonic() + timeout

        def count_ready() -> int:
            return len(self._server.dispatcher.ready_workers())

        with LongWait(display) as wait:
            while count_ready() < workers:
                if time.monotonic() > deadline:
                    raise WorkerLost(f"after {timeout:g} s of waiting: {count_ready()} of {workers} workers are ready")
                self.processes.watch()
                wait.tell(lambda: f"starting workers: {count_ready()} of {workers} are ready")
                if not self._server.turn(waits=False):
                    self.wait()
        welcome = self._server.open_local_session(self._deliver)
        self._session = welcome.ident
        return welcome

    def _deliver(self, answer: Answer, payloads: Sequence[Payload]) -> None:
        self._arrived.append((answer, payloads))

    def send(self, batch: Sequence[Instruction], uploads: Sequence[Upload]) -> None:
        packed, payloads = self._payloads.pack(batch, uploads)
        with self._lock:
            self._require_open()
            while self._server.turn(waits=False):  # so that it plans with all reports that have arrived
                pass
            self._server.client_messages.instruct(self._session, packed, payloads)
            self._waiting.wake()

    def with_dispatcher(self, act: Callable[[Dispatcher], Sequence[Outgoing]]) -> None:
        """Let another thread use the dispatcher; `act` returns the messages to deliver. Messages that have arrived are
        taken first."""
        with self._lock:
            self._require_open()
            while self._server.turn(waits=False):
                pass
            self._server.delivery.send(act(self._server.dispatcher))
            self._waiting.wake()

    def read_status(self) -> ProgramStatus:
        """The status of workers and sessions; any thread may ask."""
        return self._server.read_status()

    def wait(self) -> None:
        with self._lock:
            if self._closed or self._arrived or self._server.has_message():
                return
            self._waiting.begin()
        self._waiting.wait(self._server.descriptor)

    def read_directly(self, ident: int) -> None:
        return None

    def receive(self) -> list[Received]:
        with self._lock:
            self._require_open()
            while not self._arrived and self._server.turn(waits=False):
                pass
            arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
            self._waiting.wake()
        return [self._payloads.unpack(answer, payloads) for answer, payloads in arrived]

    def _require_open(self) -> None:
        if self._closed:
            raise SessionError(CLOSED)

    def how_it_ended(self, pid: int) -> str:
        return "" if pid in self._server.departures.killed else self.processes.ending(pid)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._server.close()
            self._waiting.close()
        self._payloads.close()
        shared_memory.sweep(os.getpid())

    def stop(self) -> None:
        """End the workers before a session was opened."""
        self.close()
        self.processes.stop()
