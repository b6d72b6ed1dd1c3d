"""Client, dispatcher and workers in one process: the corridor is a function call."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence

import numpy as np

from gt.core.events import Observer
from gt.core.messages import Answer, Command, Instruction, Welcome
from gt.dispatcher.office import Office, Outgoing, ToWorker
from gt.version import __version__
from gt.wire.channel import Buffer
from gt.worker.engines import make_engine
from gt.worker.exchange import MemoryExchange
from gt.worker.executor import Executor


class InProcessChannel:
    """`send` returns when everything it asked for is done."""

    remote = False

    def __init__(self, workers: int, backend: str, observer: Observer | None = None) -> None:
        self.office = Office(observer)
        self._observer = observer
        exchange = MemoryExchange()
        self.executors = [
            Executor(number, make_engine(backend), exchange, _allocate, owns_buffers=False) for number in range(workers)
        ]
        for executor in self.executors:
            self.office.join_worker(executor.engine.device, "here", os.getpid())
            self.office.state.workers[executor.worker].ready = True
        self._session = self.office.open_session("here", os.getpid())
        self._arrived: deque[tuple[Answer, Buffer | None]] = deque()

    def welcome(self) -> Welcome:
        infos = tuple([worker.info for worker in self.office.state.workers.values()])
        return Welcome(__version__, self._session, os.getpid(), "here", infos)

    def send(self, batch: Sequence[Instruction], buffers: Sequence[Buffer]) -> None:
        self._deliver(self.office.instruct(self._session, batch, buffers))

    def _deliver(self, outgoing: Sequence[Outgoing]) -> None:
        """Runs of commands for one worker are run together; the order is the dispatcher's."""
        commands: list[Command] = []
        buffers: list[Buffer] = []
        worker = -1
        for message in outgoing:
            if isinstance(message, ToWorker):
                if message.worker != worker:
                    self._run(worker, commands, buffers)
                    worker, commands, buffers = message.worker, [], []
                commands.append(message.command)
                if message.buffer is not None:
                    buffers.append(message.buffer)
            else:
                self._arrived.append((message.answer, message.buffer))
        self._run(worker, commands, buffers)

    def _run(self, worker: int, commands: list[Command], buffers: list[Buffer]) -> None:
        if not commands:
            return
        for report, buffer in self.executors[worker].run(commands, buffers):
            self._deliver(self.office.report(worker, report, buffer))

    def receive(self, timeout: float) -> list[tuple[Answer, Buffer | None]]:
        arrived = list(self._arrived)
        self._arrived.clear()
        return arrived

    def how_it_ended(self, pid: int) -> str:
        return ""

    def close(self) -> None:
        self.executors.clear()
        if self._observer is not None:
            self._observer.close()


def _allocate(nbytes: int, shared: bool) -> tuple[str, memoryview]:
    return "", np.empty(nbytes, dtype=np.uint8).data
