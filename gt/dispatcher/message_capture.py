"""A capture of the dispatcher's messages: noted as they are, and described as events when the capture has ended.

A message that is noted costs nothing but the memory that it occupies, so that a captured program runs as fast as
before. Timelines of the workers are part of a capture; the dispatcher asks for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gt.core.errors import ProtocolError, SessionError
from gt.core.message_events import BatchPlanned, Event, MonitorEvent, WorkerRan, WorkerSampled
from gt.core.messages import (
    MAX_RECORDED,
    RAN_AT_ONCE,
    Instruction,
    Ran,
    ReadTimeline,
    Report,
    RunProgram,
    TimelineReport,
)
from gt.dispatcher.message_descriptions import command_events, message_event
from gt.dispatcher.message_queue import Outgoing, ToClient, ToWorkers
from gt.dispatcher.requests import require_timeline
from gt.dispatcher.state_records import SessionRecord
from gt.dispatcher.tensor_records import TensorRecord


class _Batch(NamedTuple):
    start: int
    end: int
    session: SessionRecord
    instructions: Sequence[Instruction]
    outgoing: Sequence[Outgoing]
    created: Mapping[int, TensorRecord]


class _Reported(NamedTuple):
    time: int
    session: SessionRecord | None
    worker: int
    report: Report
    outgoing: Sequence[Outgoing]


class MessageCapture:
    """Notes batches and reports until `limit` messages are held; `dropped` counts those that came later."""

    def __init__(self, limit: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.limit = limit
        self.dropped = 0
        self.clock = clock
        self.start = clock()
        self._noted: list[_Batch | _Reported] = []
        self._count = 0
        self._ran: list[tuple[int, Ran]] = []
        self._samples: list[WorkerSampled] = []

    def note_batch(
        self,
        session: SessionRecord,
        batch: Sequence[Instruction],
        outgoing: Sequence[Outgoing],
        start: int,
        created: Mapping[int, TensorRecord],
    ) -> None:
        """Note a batch. `created` are the tensors that the outgoing commands create from nothing: their layouts may be
        forgotten when the capture ends."""
        if self._has_room(len(batch) + len(outgoing)):
            self._noted.append(_Batch(start, self.clock(), session, batch, outgoing, created))

    def note_report(
        self, session: SessionRecord | None, worker: int, report: Report, outgoing: Sequence[Outgoing]
    ) -> None:
        if self._has_room(1 + len(outgoing)):
            self._noted.append(_Reported(self.clock(), session, worker, report, outgoing))

    def _has_room(self, count: int) -> bool:
        if self._count >= self.limit:
            self.dropped += count
            return False
        self._count += count
        return True

    def note_timeline(self, worker: int, report: TimelineReport) -> None:
        self.dropped += report.dropped
        self._ran += [(worker, ran) for ran in report.ran]
        self._samples += [WorkerSampled(worker, when, nbytes) for when, nbytes in report.memory]

    # Describing

    def events(self) -> Iterator[MonitorEvent]:
        """All that was captured, each kind in the order of time."""
        for noted in self._noted:
            if isinstance(noted, _Batch):
                yield from self._events_of_batch(noted)
            else:
                yield message_event(noted.session, "WORKER_RECV", f"worker {noted.worker}", noted.report, noted.time)
                yield from _sent(noted.time, noted.session, noted.outgoing, {})
        sites = {noted.session.ident: noted.session for noted in self._noted if noted.session is not None}
        for worker, ran in self._ran:
            session = sites.get(ran.session)
            line = session.site(ran.site) if session is not None and ran.site else ""
            yield WorkerRan(worker, ran, line)
        yield from self._samples

    def _events_of_batch(self, batch: _Batch) -> Iterator[Event | BatchPlanned]:
        session = batch.session
        count = 0
        for instruction in batch.instructions:
            for single in _expand_instruction(session, instruction):
                count += 1
                yield message_event(session, "RECV", f"client {session.ident}", single, batch.start)
        yield BatchPlanned(session.ident, batch.start, batch.end, count)
        yield from _sent(batch.end, session, batch.outgoing, batch.created)


class CaptureRequests:
    """The capture that goes on, if any, and the timelines that workers were asked for."""

    def __init__(self) -> None:
        self.current: MessageCapture | None = None
        self._ending: MessageCapture | None = None
        self._asked: dict[int, set[int]] = {}  # workers that have not answered, by request
        self._last = 0  # request: an odd one begins a recording, the next one ends it

    def begin(self, capture: MessageCapture, workers: tuple[int, ...]) -> list[Outgoing]:
        """Raises SessionError if another capture goes on."""
        if self.current is not None or self._ending is not None:
            raise SessionError("another monitor is capturing a trace of this program; try again when it is done")
        self.current = capture
        return self._ask(workers, min(capture.limit, MAX_RECORDED))

    def end(self, workers: tuple[int, ...]) -> list[Outgoing]:
        """Stop capturing, and ask for the timelines: the capture is complete when no worker is `missing`."""
        self._ending, self.current = self.current, None
        return self._ask(workers, 0)

    def missing(self) -> set[int]:
        """The workers whose timelines have not arrived."""
        return set(self._asked.get(self._last, ()))

    def release(self) -> list[Outgoing]:
        """Let another capture begin. Timelines that arrive later are dropped."""
        self._ending = None
        return []

    def _ask(self, workers: tuple[int, ...], limit: int) -> list[Outgoing]:
        self._last += 1
        if not workers:
            return []
        self._asked[self._last] = set(workers)
        return [ToWorkers(workers, ReadTimeline(self._last, limit))]

    def take_timeline(self, worker: int, report: TimelineReport) -> list[Outgoing]:
        """Take recorded commands; as long as there are more, the worker is asked again."""
        asked = self._asked.get(report.request, set())
        if worker not in asked:
            raise ProtocolError(f"worker {worker} was not asked for a timeline")
        require_timeline(report)
        is_end = report.request % 2 == 0
        if is_end and report.request == self._last and self._ending is not None:
            self._ending.note_timeline(worker, report)
        if is_end and len(report.ran) == RAN_AT_ONCE:
            return [ToWorkers((worker,), ReadTimeline(report.request, 0))]
        self._forget(report.request, worker)
        return []

    def lose_worker(self, worker: int) -> None:
        for request in list(self._asked):
            self._forget(request, worker)

    def _forget(self, request: int, worker: int) -> None:
        self._asked[request].discard(worker)
        if not self._asked[request]:
            del self._asked[request]


def _sent(
    time: int, session: SessionRecord | None, outgoing: Sequence[Outgoing], created: Mapping[int, TensorRecord]
) -> Iterator[Event]:
    for message in outgoing:
        if isinstance(message, ToClient):
            yield message_event(session, "SEND", f"client {message.session}", message.answer, time)
        else:
            yield from command_events(session, message.command, message.workers, created, time)


def _expand_instruction(session: SessionRecord, instruction: Instruction) -> Sequence[Instruction]:
    record = session.programs.get(instruction.program_id) if isinstance(instruction, RunProgram) else None
    return record.program.expand(instruction) if record is not None else (instruction,)  # type: ignore[arg-type]
