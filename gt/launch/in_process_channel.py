"""The channel of a client that shares its process with the dispatcher and the workers: messages are function calls."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gt.core.errors import SessionError
from gt.core.messages import ByteRange, Command, Instruction, Report, RunOp, Welcome
from gt.core.program_view import ProgramStatus
from gt.core.settings import CompileSettings, Settings
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.message_queue import Outgoing, ToClient, ToWorkers
from gt.dispatcher.status import DispatcherView
from gt.monitor.log_rows import open_log
from gt.version import __version__
from gt.wire.client_channel import CLOSED, Received, Upload, as_buffer
from gt.wire.codec import Buffer
from gt.worker.compilation.private_directory import own_directory
from gt.worker.compilation.server_connection import CompileServerConnection
from gt.worker.engines import make_engine
from gt.worker.exchange import InProcessExchange
from gt.worker.exchange.in_process_exchange import run_interleaved
from gt.worker.executor import Executor
from gt.worker.tensor_transfers import WriteBytes


class SynchronousChannel(ABC):
    """A channel to a dispatcher in this process whose commands are done when `send` returns. `devices` are the names of
    the workers' devices and their bytes, `hosts` the machines that plans take the workers to be on."""

    is_asynchronous = False
    is_full = False

    def __init__(self, devices: Sequence[tuple[str, int]], settings: Settings, hosts: Sequence[str]) -> None:
        self._observer = open_log(settings.log)
        self.dispatcher = Dispatcher(self._observer, settings.copy_limit, settings.limits)
        self.view = DispatcherView(self.dispatcher, self._read_progress)
        for (device, memory), host in zip(devices, hosts or ["here"] * len(devices), strict=True):
            name = host if hosts else ""
            number, _ = self.dispatcher.join_worker(device, host, os.getpid(), memory, hostname=name)
            self.dispatcher.make_ready(number)
        self._session = self.dispatcher.open_session("here", os.getpid())
        self._arrived: deque[Received] = deque()
        self._lock = threading.Lock()  # held by the thread that uses the dispatcher
        self._is_closed = False

    def welcome(self) -> Welcome:
        infos = tuple(worker.info for worker in self.dispatcher.state.workers.values())
        return Welcome(__version__, self._session, os.getpid(), "here", infos)

    def with_dispatcher(self, act: Callable[[Dispatcher], Sequence[Outgoing]]) -> None:
        """Let another thread use the dispatcher, between two batches; `act` returns the messages to deliver. Raises
        SessionError after `close`."""
        with self._lock:
            if self._is_closed:
                raise SessionError(CLOSED)
            self._deliver(act(self.dispatcher))

    @abstractmethod
    def _deliver(self, outgoing: Sequence[Outgoing]) -> None:
        """Deliver messages, and then those that the reports of the workers give rise to."""

    def read_status(self) -> ProgramStatus:
        """The status of workers and sessions; any thread may ask."""
        return self.view.read_status()

    def _read_progress(self) -> Mapping[int, Sequence[int]]:
        """The memory in which each worker shows what it does."""
        return {}

    def read_directly(self, ident: int) -> Buffer | None:
        return None

    def wait(self) -> None:
        """Answers are here when `send` returns, so this waits only for a batch that another thread is sending."""
        time.sleep(0.001)

    def receive(self) -> list[Received]:
        arrived = []
        while self._arrived:  # one by one, since other threads append meanwhile
            arrived.append(self._arrived.popleft())
        return arrived

    def how_it_ended(self, pid: int) -> str:
        return ""

    def close(self) -> None:
        self._is_closed = True
        if self._observer is not None:
            self._observer.close()


class InProcessChannel(SynchronousChannel):
    """A channel to a dispatcher and workers in this process. `send` returns when the workers have run its commands."""

    def __init__(self, workers: int, backend: str, settings: Settings | None = None, hosts: Sequence[str] = ()) -> None:
        settings = settings or Settings()
        self._compile_server = CompileServerConnection(own_directory, settings.compiling)
        self.executors = [self._make_executor(number, backend, settings.compiling) for number in range(workers)]
        self._reactions: list[Outgoing] = []  # the dispatcher's reactions to reports
        devices = [(executor.engine.device, executor.engine.memory()) for executor in self.executors]
        super().__init__(devices, settings, hosts)

    def _make_executor(self, worker: int, backend: str, compiling: CompileSettings) -> Executor:
        return Executor(
            worker,
            make_engine(backend),
            InProcessExchange(),
            _export,
            owns_buffers=False,
            compile_server=self._compile_server,
            compiles_all=compiling.is_automatic,
        )

    def send(self, batch: Sequence[Instruction], uploads: Sequence[Upload]) -> None:
        buffers = [as_buffer(upload) for upload in uploads]
        with self._lock:
            self._deliver(self.dispatcher.instruct(self._session, batch, buffers))

    def _read_progress(self) -> dict[int, Sequence[int]]:
        return {executor.worker: executor.progress for executor in list(self.executors)}

    def read_directly(self, ident: int) -> Buffer | None:
        """The bytes of a tensor, read without a request to the dispatcher: a request and its answer take longer than
        the copy. None if a request is necessary: with several workers, if somebody follows the messages, or for a
        tensor that has no value."""
        if len(self.executors) != 1:
            return None
        with self._lock:
            if not self.dispatcher.may_read_directly(ident):
                return None
            executor = self.executors[0]
            with executor.engine.isolated():
                return executor.read(ident)

    def _deliver(self, outgoing: Sequence[Outgoing]) -> None:
        while outgoing:
            if len(self.executors) == 1:
                self._deliver_alone(outgoing)
            else:
                self._deliver_to_several(outgoing)
            outgoing, self._reactions = self._reactions, []

    def _deliver_to_several(self, outgoing: Sequence[Outgoing]) -> None:
        """Collect commands by worker and run them together. Before a command in which workers exchange tensors, all
        commands before it are run."""
        waiting: dict[int, tuple[list[Command], list[Buffer]]] = {}
        for message in outgoing:
            if isinstance(message, ToClient):
                self._arrived.append(Received(message.answer, message.buffers))
            elif message.exchanges:
                self._run(waiting)
                self._run_exchange(message)
            else:
                for worker in message.workers:
                    commands, buffers = waiting.setdefault(worker, ([], []))
                    commands.append(message.command)
                    if message.buffer is not None:
                        buffers.append(message.buffer)
        self._run(waiting)

    def _deliver_alone(self, outgoing: Sequence[Outgoing]) -> None:
        """Hot path: with one worker there are no exchanges, and all commands are its own."""
        commands: list[Command] = []
        buffers: list[Buffer] = []
        for message in outgoing:
            if type(message) is ToClient:
                self._arrived.append(Received(message.answer, message.buffers))
                continue
            commands.append(message.command)  # type: ignore[union-attr]
            if message.buffer is not None:  # type: ignore[union-attr]
                buffers.append(message.buffer)  # type: ignore[union-attr]
        if commands:
            executor = self.executors[0]
            with executor.engine.isolated():
                reports = executor.run(commands, buffers)
            self._pass_on(0, reports)

    def _run(self, waiting: dict[int, tuple[list[Command], list[Buffer]]]) -> None:
        if not waiting:
            return
        with self.executors[0].engine.isolated():
            reports = [(worker, self.executors[worker].run(*work)) for worker, work in waiting.items()]
        waiting.clear()
        for worker, reported in reports:
            self._pass_on(worker, reported)

    def _run_exchange(self, message: ToWorkers) -> None:
        command = message.command
        assert isinstance(command, RunOp)
        with self.executors[message.workers[0]].engine.isolated():
            run_interleaved({worker: self.executors[worker].start(command) for worker in message.workers})
        for worker in message.workers:
            self._pass_on(worker, self.executors[worker].take_reports())

    def _pass_on(self, worker: int, reports: Sequence[tuple[Report, Buffer | None]]) -> None:
        for report, buffer in reports:
            self._reactions += self.dispatcher.report(worker, report, buffer)

    def close(self) -> None:
        self._compile_server.close()
        self.executors.clear()
        super().close()


def _export(nbytes: int, place: ByteRange | None, write: WriteBytes) -> tuple[ByteRange, memoryview]:
    data = np.empty(nbytes, dtype=np.uint8).data
    write(data)
    return ByteRange("", nbytes), data
