"""The actions of all kinds of instructions: each changes the state and queues commands for the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from gt.core.messages import (
    BeginModule,
    BeginStep,
    ByteRange,
    Command,
    CreateTensor,
    DefineOp,
    DefineProgram,
    DefineScope,
    DefineSite,
    DropCopies,
    EndStep,
    Failed,
    FetchTensor,
    ForgetOps,
    FreeTensors,
    ListedWorker,
    Located,
    LocateTensor,
    MemoryReport,
    NonFiniteReport,
    NoteGradient,
    PlaceTensor,
    PublishTensor,
    QueryOp,
    ReadMemory,
    ReadNonFinite,
    ReadStats,
    ReadTimeline,
    ReadTraffic,
    ReadVersions,
    ReadWorkers,
    Redistribute,
    RunOp,
    RunProgram,
    Stats,
    SubscribeTensor,
    Synchronize,
    Synchronized,
    TimelineReport,
    Traffic,
    UnpublishTensor,
    Uploaded,
    WorkerCreateTensor,
    WorkerDefineScope,
    WorkerReadTraffic,
    WorkersRead,
)
from gt.core.meta import ITEM_BYTES
from gt.dispatcher.gradient_buckets import GradientBuckets
from gt.dispatcher.instruction_errors import InvalidInstruction, NoWorkers
from gt.dispatcher.message_queue import MessageQueue, split_bytes
from gt.dispatcher.module_gathers import ModuleGathers
from gt.dispatcher.op_definitions import OpRecord, layout_from_record, require_layout_fit
from gt.dispatcher.op_instructions import OpInstructions
from gt.dispatcher.plan_cache import PlanCache
from gt.dispatcher.programs import Programs, RunPart
from gt.dispatcher.publications import Publications
from gt.dispatcher.redistribution import Redistributor
from gt.dispatcher.requests import Requests, TensorReads
from gt.dispatcher.state import State
from gt.dispatcher.state_records import Reply, ScopeRecord, SessionRecord, WorkerRecord
from gt.dispatcher.step_coordinator import StepCoordinator
from gt.dispatcher.tensor_records import TensorRecord
from gt.sharding.boxes import box_shape
from gt.sharding.held_parts import distinct_parts
from gt.sharding.spec import ShardingSpec, whole
from gt.signals.policy import Policy
from gt.wire.codec import Buffer

InstructionAction: TypeAlias = Callable[[SessionRecord, Any, Buffer | None], None]
"""Carries out one kind of instruction. Raises an exception of `errors.py` if that is not possible."""


class Instructions:
    """Carries out instructions by the `actions` for their kinds. The caller commits an action, or rolls it back if it
    raises. `describe_worker` gives the state of a worker that is ready."""

    def __init__(
        self,
        state: State,
        outgoing: MessageQueue,
        redistributor: Redistributor,
        requests: Requests,
        plan_cache: PlanCache,
        programs: Programs,
        buckets: GradientBuckets,
    ) -> None:
        self._state = state
        self._outgoing = outgoing
        self._redistributor = redistributor
        self._requests = requests
        self._plan_cache = plan_cache
        self._programs = programs
        self.describe_worker: Callable[[int], str] = lambda worker: "ready"
        self._buckets = buckets
        publications = self._publications = Publications(state, outgoing, redistributor, self._buckets)
        ops = OpInstructions(state, outgoing, redistributor, requests, plan_cache, self._buckets, publications)
        steps = StepCoordinator(state, outgoing, redistributor, self._buckets)
        self._reads = reads = TensorReads(state, outgoing, requests)
        self.actions: dict[type, InstructionAction] = {
            RunOp: ops.run_op,
            RunPart: programs.run_part,
            RunProgram: programs.refuse,
            DefineProgram: programs.define,
            FreeTensors: self._free,
            DropCopies: self._drop_copies,
            BeginModule: ModuleGathers(state, redistributor).begin,
            QueryOp: ops.query,
            CreateTensor: self._create,
            Redistribute: self._redistribute,
            PlaceTensor: self._place,
            FetchTensor: self._fetch,
            ReadVersions: reads.read_versions,
            NoteGradient: self._buckets.note,
            BeginStep: steps.begin,
            EndStep: steps.end,
            LocateTensor: self._locate,
            ReadWorkers: self._read_workers,
            PublishTensor: publications.publish,
            UnpublishTensor: publications.unpublish,
            SubscribeTensor: publications.subscribe,
            Synchronize: self._synchronize,
            ReadTraffic: self._read_traffic,
            ReadStats: self._read_stats,
            ReadMemory: self._read_memory,
            ReadNonFinite: self._read_non_finite,
            ReadTimeline: self._read_timeline,
            DefineOp: self._define_op,
            ForgetOps: self._forget_ops,
            DefineSite: self._define_site,
            DefineScope: self._define_scope,
        }

    # Tensors

    def _create(self, session: SessionRecord, create: CreateTensor, buffer: Buffer | None) -> None:
        """Send each worker of the layout its own part; without a layout, all to the worker with the fewest bytes."""
        self._state.require_new((create.id,))
        meta, byte_range = create.meta, create.byte_range
        if byte_range.nbytes != meta.nbytes:
            raise InvalidInstruction(f"{byte_range.nbytes} bytes cannot be a tensor {meta} of {meta.nbytes} bytes")
        spec = self._layout_of_upload(create)
        tensor = TensorRecord.of(meta, spec, placed=create.layout is not None or None)
        self._redistributor.require_room(session, [tensor], 1)
        self._state.note_use(session.ident, spec.mesh.workers)
        parts, offset = distinct_parts(spec, meta.shape), byte_range.offset
        sizes = [part.elements * ITEM_BYTES[meta.dtype] for part in parts]
        for part, nbytes, data in zip(parts, sizes, split_bytes(buffer, sizes), strict=True):
            own = ByteRange(byte_range.name, nbytes, offset)
            command = WorkerCreateTensor(create.id, meta.part(box_shape(part.box)), own, create.site)
            self._outgoing.command(part.workers, command, data)
            offset += nbytes if byte_range.name else 0
        if byte_range.name:
            self._requests.wait(create.id, spec.mesh.workers, Uploaded)
        self._state.add_tensor(create.id, tensor)

    def _layout_of_upload(self, create: CreateTensor) -> ShardingSpec:
        if create.layout is None:
            return whole(self._state.least_loaded_mesh(), len(create.meta.shape))
        spec = layout_from_record(create.layout)
        require_layout_fit(spec, create.meta)
        self._plan_cache.require_workers(spec.mesh)
        if spec.partial:
            raise InvalidInstruction(f"[{spec}] is partial: upload a tensor that is not, and redistribute it")
        return spec.normal(create.meta.shape)

    def _fetch(self, session: SessionRecord, fetch: FetchTensor, buffer: Buffer | None) -> None:
        if fetch.worker is None:  # the part of one worker is read as it is
            self._buckets.reduce(session, (fetch.id,), "fetch", fetch.site)
        self._reads.fetch(session, fetch, buffer)

    def _redistribute(self, session: SessionRecord, move: Redistribute, _: Buffer | None) -> None:
        self._state.require_new((move.output,))
        self._buckets.reduce(session, (move.input,), "redistribute", move.site)
        tensor = self._state.tensor(move.input)
        spec = layout_from_record(move.layout)
        require_layout_fit(spec, tensor.meta)
        self._plan_cache.require_workers(spec.mesh)
        target = spec.normal(tensor.meta.shape)
        moved = TensorRecord.of(tensor.meta, target, placed=True)
        self._redistributor.require_room(session, [moved], 1)
        self._redistributor.move(session, tensor, move.input, move.output, target, "redistribute", move.site)
        self._state.add_tensor(move.output, moved)

    def _place(self, session: SessionRecord, place: PlaceTensor, _: Buffer | None) -> None:
        """A tensor that was freed, or has no value, is left alone: no value depends on its layout."""
        tensor = self._state.tensors.get(place.id)
        spec = layout_from_record(place.layout)
        self._plan_cache.require_workers(spec.mesh)
        if tensor is None:
            return
        require_layout_fit(spec, tensor.meta)
        self._buckets.reduce(session, (place.id,), "place", place.site)
        self._redistributor.place(session, place.id, spec.normal(tensor.meta.shape), place.site)

    def _free(self, session: SessionRecord, free: FreeTensors, _: Buffer | None) -> None:
        for mesh, idents in self._state.free(free.ids).items():
            self._outgoing.command(mesh.workers, FreeTensors(tuple(idents)))

    def _drop_copies(self, session: SessionRecord, drop: DropCopies, _: Buffer | None) -> None:
        self._outgoing.free(self._state.drop_copies(drop.ids))

    def _locate(self, session: SessionRecord, locate: LocateTensor, _: Buffer | None) -> None:
        self._state.require_new_request(locate.request)
        copies = tuple([spec.record() for spec in self._state.copies.get(locate.id, ())])
        layout = self._state.tensor(locate.id).spec.record()
        self._outgoing.answer(session.ident, Located(locate.request, layout, copies))

    def _read_workers(self, session: SessionRecord, read: ReadWorkers, _: Buffer | None) -> None:
        self._state.require_new_request(read.request)
        held = self._state.bytes_by_worker()

        def describe(ident: int, worker: WorkerRecord) -> str:
            if worker.leaving is not None:
                return "leaving"
            return self.describe_worker(ident) if worker.ready else "joining"

        listed = [
            ListedWorker(
                ident,
                worker.info.hostname,
                worker.info.pid,
                worker.info.device,
                worker.memory,
                held[ident],
                describe(ident, worker),
            )
            for ident, worker in sorted(self._state.workers.items())
        ]
        self._outgoing.answer(session.ident, WorkersRead(read.request, tuple(listed)))

    # Requests to all workers

    def _synchronize(self, session: SessionRecord, synchronize: Synchronize, _: Buffer | None) -> None:
        self._ask_all(synchronize.request, synchronize, Synchronized)

    def _read_traffic(self, session: SessionRecord, read: ReadTraffic, _: Buffer | None) -> None:
        self._state.set_watches(session, read.watch)
        self._ask_all(read.request, WorkerReadTraffic(read.request), Traffic)

    def _read_stats(self, session: SessionRecord, read: ReadStats, _: Buffer | None) -> None:
        self._ask_all(read.request, read, Stats)

    def _read_memory(self, session: SessionRecord, read: ReadMemory, _: Buffer | None) -> None:
        self._ask_all(read.request, read, MemoryReport)

    def _read_non_finite(self, session: SessionRecord, read: ReadNonFinite, _: Buffer | None) -> None:
        self._ask_all(read.request, read, NonFiniteReport)

    def _read_timeline(self, session: SessionRecord, read: ReadTimeline, _: Buffer | None) -> None:
        self._ask_all(read.request, read, TimelineReport)

    def _ask_all(self, request: int, command: Command, reply: type[Reply]) -> None:
        workers = tuple([ident for ident, worker in self._state.workers.items() if not worker.is_closed])
        if not workers:
            raise NoWorkers
        self._requests.wait(request, workers, reply, Failed)
        self._outgoing.command(workers, command)

    # Definitions

    def _define_op(self, session: SessionRecord, define: DefineOp, _: Buffer | None) -> None:
        if define.op_id in session.ops:
            raise InvalidInstruction(
                f"op {define.op_id} is defined already; the workers that know it would run what it was"
            )
        self._state.define_op(session, OpRecord.of(define.op_id, define.signature))

    def _forget_ops(self, session: SessionRecord, forget: ForgetOps, _: Buffer | None) -> None:
        """Forget ops here and on the workers, with their plans and the plans of all moves, and programs: those named,
        and those of forgotten ops."""
        records = [session.ops[op_id] for op_id in forget.op_ids if op_id in session.ops]
        op_ids = (*forget.op_ids, *[subset.op_id for record in records for subset in record.subsets.values()])
        gone = set(op_ids)
        of_ops = [p for p, record in session.programs.items() if any(op.op_id in gone for op in record.program.ops)]
        self._programs.forget(session, [*gone.intersection(session.programs), *of_ops])
        self._plan_cache.forget(session, self._state.forget_ops(session, op_ids))
        for ident, worker in self._state.workers.items():
            known = tuple(worker.known_ops.intersection(op_ids))
            if known:
                self._state.note_ops_forgotten(ident, known)
                self._outgoing.command((ident,), ForgetOps(known))

    def _define_site(self, session: SessionRecord, define: DefineSite, _: Buffer | None) -> None:
        self._state.define_site(session, define.site_id, define.file, define.line)

    def _define_scope(self, session: SessionRecord, define: DefineScope, _: Buffer | None) -> None:
        try:
            policy = Policy(define.policy) if define.policy is not None else None
        except ValueError as error:
            raise InvalidInstruction(str(error)) from None
        self._state.define_scope(session, define.scope_id, ScopeRecord(define.name, policy, define.compile))
        command = WorkerDefineScope(session.ident, define.scope_id, define.name, define.compile)
        self._outgoing.command(tuple(self._state.workers), command)
