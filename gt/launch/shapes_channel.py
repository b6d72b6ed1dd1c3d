"""The channel of a session in which nothing is computed: instructions are planned for workers that do not exist.

The dispatcher is the ordinary one, so layouts and planned communication are those of a real run. Its commands go
nowhere, and no tensor has memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gt.core.ids import is_dispatcher_id
from gt.core.messages import (
    Instruction,
    MemoryReport,
    Progress,
    ReadMemory,
    ReadStats,
    ReadTimeline,
    ReadVersions,
    Report,
    RunOp,
    RunProgram,
    Stats,
    Synchronize,
    Synchronized,
    TimelineReport,
    Traffic,
    Versions,
    WorkerMemory,
    WorkerReadTraffic,
    WorkerReportProgress,
    WorkerStats,
)
from gt.core.settings import Settings
from gt.dispatcher.message_queue import Outgoing, ToClient
from gt.dispatcher.state import State
from gt.dispatcher.state_records import SessionRecord
from gt.dispatcher.tensor_records import TensorRecord
from gt.launch.in_process_channel import SynchronousChannel
from gt.sharding.spec import DeviceMesh
from gt.wire.client_channel import Received, Upload
from gt.worker.memory_recorder import MemoryPurpose, MemoryRecording

# The reports of a worker that has done nothing, by the command that asks for them.
_REPORTS: dict[type, Callable[[Any], Report]] = {
    Synchronize: lambda command: Synchronized(command.request),
    WorkerReportProgress: lambda command: Progress(command.mark, 0),
    WorkerReadTraffic: lambda command: Traffic(command.request, {}),
    ReadStats: lambda command: Stats(command.request, WorkerStats(0, 0, 0, {})),
    ReadTimeline: lambda command: TimelineReport(command.request, (), 0),
    ReadVersions: lambda command: Versions(command.request, ()),
}


class _PlannedMemory:
    """The memory that the planned tensors and copies of a session would take on each worker, for `gt.debug.memory`."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._recordings: dict[int, MemoryRecording] = {}
        self._held: dict[int, tuple[DeviceMesh, int]] = {}
        self._memory_of: dict[int, int] = {}  # the id of the first version, by tensor that ops have written

    @property
    def is_on(self) -> bool:
        return bool(self._recordings)

    def report(self, worker: int, command: ReadMemory) -> MemoryReport:
        """The memory of a worker since the last report. `command.watch`: it is recorded from now on."""
        if not self._recordings:
            self._held.clear()
            self._memory_of.clear()
        recording = self._recordings.pop(worker, None)
        if command.watch:
            begun = self._recordings[worker] = MemoryRecording()
            self._held = self._planned()
            for ident, (mesh, nbytes) in self._held.items():
                if worker in mesh:
                    begun.add(ident, (ident, nbytes), MemoryPurpose(0, is_dispatcher_id(ident)))
        used = WorkerMemory((), 0) if recording is None else WorkerMemory(recording.uses(), recording.most_copies)
        return MemoryReport(command.request, used)

    def note(self, session: SessionRecord, instruction: Instruction) -> None:
        """Record what an instruction has changed; new tensors are made before others are freed."""
        planned, before, memory_of = self._planned(), self._held, self._memory_of
        if isinstance(instruction, RunOp) and (op := session.ops.get(instruction.op_id)) is not None:
            written = [instruction.inputs[position] for position in op.signature.writes]
            versions = instruction.outputs[len(instruction.outputs) - len(written) :]
            memory_of |= {new: memory_of.get(old, old) for old, new in zip(written, versions, strict=True)}
        for ident, (mesh, nbytes) in planned.items():
            if before.get(ident) != (mesh, nbytes):
                self._discard(ident, before)
                purpose = MemoryPurpose(getattr(instruction, "site", 0), is_dispatcher_id(ident))
                for worker in mesh.workers:
                    self._recordings[worker].add(ident, (memory_of.get(ident, ident), nbytes), purpose)
        for ident in before.keys() - planned.keys():
            self._discard(ident, before)
            memory_of.pop(ident, None)
        self._held = planned

    def _discard(self, ident: int, held: Mapping[int, tuple[DeviceMesh, int]]) -> None:
        for worker in held[ident][0].workers if ident in held else ():
            self._recordings[worker].discard(ident)

    def _planned(self) -> dict[int, tuple[DeviceMesh, int]]:
        """The mesh of each tensor and copy, and the most bytes that a worker of it would hold."""
        tensors = self._state.tensors
        copies = self._state.copy_order.items()
        records = [(copy, TensorRecord.of(tensors[ident].meta, spec)) for copy, (ident, spec) in copies]
        return {ident: (tensor.spec.mesh, tensor.nbytes) for ident, tensor in [*tensors.items(), *records]}


class ShapesChannel(SynchronousChannel):
    """A channel to a dispatcher whose workers do nothing. The bytes of uploads are not kept."""

    def __init__(self, workers: int, settings: Settings, hosts: Sequence[str]) -> None:
        super().__init__([("cpu", 0)] * workers, settings, hosts)
        self._memory = _PlannedMemory(self.dispatcher.state)

    def send(self, batch: Sequence[Instruction], uploads: Sequence[Upload]) -> None:
        with self._lock:
            for part in self._one_by_one(batch) if self._memory.is_on else [batch]:
                self._deliver(self.dispatcher.instruct(self._session, part, ()))
                if self._memory.is_on and len(part) == 1:
                    self._memory.note(self.dispatcher.state.sessions[self._session], part[0])

    def _one_by_one(self, batch: Sequence[Instruction]) -> Iterator[Sequence[Instruction]]:
        """The instructions of a batch, and of the programs that it runs."""
        programs = self.dispatcher.state.sessions[self._session].programs
        for instruction in batch:
            if isinstance(instruction, RunProgram) and instruction.program_id in programs:
                yield from ([single] for single in programs[instruction.program_id].program.expand(instruction))
            else:
                yield [instruction]

    def _deliver(self, outgoing: Sequence[Outgoing]) -> None:
        for message in outgoing:
            if isinstance(message, ToClient):
                self._arrived.append(Received(message.answer, message.buffers))
                continue
            report = _REPORTS.get(type(message.command))
            for worker in message.workers:
                if isinstance(message.command, ReadMemory):
                    self._deliver(self.dispatcher.report(worker, self._memory.report(worker, message.command), None))
                elif report is not None:
                    self._deliver(self.dispatcher.report(worker, report(message.command), None))
