"""The channel of a session in which nothing is computed: instructions are planned for workers that do not exist.

The dispatcher is the ordinary one, so layouts and planned communication are those of a real run. Its commands go
nowhere, and no tensor has memory.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gt.core.limits import Limits
from gt.core.message_events import Observer
from gt.core.messages import (
    Instruction,
    MemoryReport,
    Progress,
    ReadMemory,
    ReadStats,
    ReadTimeline,
    ReadVersions,
    Report,
    Stats,
    Synchronize,
    Synchronized,
    TimelineReport,
    Traffic,
    Versions,
    Welcome,
    WorkerMemory,
    WorkerReadTraffic,
    WorkerReportProgress,
    WorkerStats,
)
from gt.core.program_status import ProgramStatus
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.message_queue import Outgoing, ToClient
from gt.dispatcher.status import read_status
from gt.version import __version__
from gt.wire.client_channel import Received, Upload
from gt.wire.codec import Buffer

# The reports of a worker that has done nothing, by the command that asks for them.
_REPORTS: dict[type, Callable[[Any], Report]] = {
    Synchronize: lambda command: Synchronized(command.request),
    WorkerReportProgress: lambda command: Progress(command.mark, 0),
    WorkerReadTraffic: lambda command: Traffic(command.request, {}),
    ReadStats: lambda command: Stats(command.request, WorkerStats(0, 0, 0, {})),
    ReadMemory: lambda command: MemoryReport(command.request, WorkerMemory((), 0)),
    ReadTimeline: lambda command: TimelineReport(command.request, (), 0),
    ReadVersions: lambda command: Versions(command.request, ()),
}


class ShapesChannel:
    """A channel to a dispatcher whose workers do nothing. The bytes of uploads are not kept. `hosts` are machines that
    plans take the workers to be on."""

    is_asynchronous = False
    is_full = False

    def __init__(
        self,
        workers: int,
        observer: Observer | None = None,
        copy_limit: int | None = None,
        limits: Limits | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        self.dispatcher = Dispatcher(observer, copy_limit, limits)
        self._observer = observer
        for host in hosts or ["here"] * workers:
            number, _ = self.dispatcher.join_worker("cpu", host, os.getpid(), hostname=host if hosts else "")
            self.dispatcher.make_ready(number)
        self._session = self.dispatcher.open_session("here", os.getpid())
        self._arrived: deque[Received] = deque()
        self._lock = threading.Lock()  # held by the thread that uses the dispatcher

    def welcome(self) -> Welcome:
        infos = tuple(worker.info for worker in self.dispatcher.state.workers.values())
        return Welcome(__version__, self._session, os.getpid(), "here", infos)

    def send(self, batch: Sequence[Instruction], uploads: Sequence[Upload]) -> None:
        with self._lock:
            self._deliver(self.dispatcher.instruct(self._session, batch, ()))

    def with_dispatcher(self, act: Callable[[Dispatcher], Sequence[Outgoing]]) -> None:
        """Let another thread use the dispatcher, between two batches; `act` returns the messages to deliver."""
        with self._lock:
            self._deliver(act(self.dispatcher))

    def read_status(self) -> ProgramStatus:
        """The status of workers and sessions; any thread may ask."""
        return read_status(self.dispatcher, {})

    def read_directly(self, ident: int) -> Buffer | None:
        return None

    def _deliver(self, outgoing: Sequence[Outgoing]) -> None:
        for message in outgoing:
            if isinstance(message, ToClient):
                self._arrived.append(Received(message.answer, message.buffers))
                continue
            report = _REPORTS.get(type(message.command))
            for worker in message.workers if report is not None else ():
                self._deliver(self.dispatcher.report(worker, report(message.command), None))  # type: ignore[misc]

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
        if self._observer is not None:
            self._observer.close()
