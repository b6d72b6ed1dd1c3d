"""Runs of segments: parts that workers replay, and the ops between them, planned one by one.

A segment first runs as the instructions that it stands for. The layouts and plans seen then tell which of its ops are
local: on the same workers, with known plans that move and exchange nothing. Consecutive local ops become a part. A part
ends where an instruction between the ops sends commands, to gather parameters for example. Later runs with the same
layouts send one command for each part. Where the state has changed so that the plans of a part may not hold, its ops
are planned one by one, as they would be without a segment.
"""

from __future__ import annotations

from collections.abc import Container, Generator, Iterable, Iterator, Sequence
from operator import le
from typing import NamedTuple, TypeAlias

from gt.core.ids import FIRST_DISPATCHER_ID, SESSION_SHIFT
from gt.core.messages import (
    BeginModule,
    DefineSegment,
    DropCopies,
    ForgetOps,
    FreeTensors,
    Instruction,
    NoteGradient,
    PlaceTensor,
    RunOp,
    RunSegment,
)
from gt.core.segments import SegmentBody, SegmentOp
from gt.dispatcher.instruction_errors import IdInUse, InvalidInstruction, UnknownId
from gt.dispatcher.message_queue import MessageQueue, ToWorkers
from gt.dispatcher.op_definitions import CachedPlan, InputLayout, plan_key
from gt.dispatcher.plan_cache import PlanCache
from gt.dispatcher.plan_records import PlanObserver, SplitRecord
from gt.dispatcher.segment_parts import PlannedOp, find_parts, make_part, variant_of
from gt.dispatcher.segment_records import (
    Layouts,
    PartVariant,
    SegmentKey,
    SegmentPart,
    SegmentRecord,
    SegmentSplit,
    SplitVariant,
)
from gt.dispatcher.session_limits import fits
from gt.dispatcher.state import MAX_PLANS, State
from gt.dispatcher.state_records import SessionRecord
from gt.dispatcher.tensor_records import TensorRecord
from gt.sharding.rules import is_linear_with
from gt.sharding.spec import ShardingSpec
from gt.wire.codec import Buffer

_CUTTING = (BeginModule, DropCopies, PlaceTensor)  # end a part, whether or not they send commands
MAX_SPLITS = 8  # splits of a segment, for different layouts
MAX_VARIANTS = 16  # variants of a split, for different dead slots
MAX_SEGMENTS = 3 << 10  # segments of a session; clients forget theirs at two thirds of that


class RunPart(NamedTuple):
    """The dispatcher's own instruction to replay a part of a segment: `body` is the client's segment, `run` its run."""

    part: SegmentPart
    variant: PartVariant
    body: SegmentBody
    run: RunSegment

    def instructions(self) -> list[RunOp]:
        """The client's instructions that the replay takes the place of."""
        return list(self.body.expand_ops(self.run, self.part.start, self.part.end, {}))  # type: ignore[arg-type]


Single: TypeAlias = Instruction | RunPart
"""An instruction that is carried out in its own transaction."""


class Segments:
    """Defines, splits and runs the segments of all sessions. The `observer`, if there is one, sees each split."""

    def __init__(
        self, state: State, outgoing: MessageQueue, plan_cache: PlanCache, observer: PlanObserver | None = None
    ) -> None:
        self._state = state
        self._outgoing = outgoing
        self._plan_cache = plan_cache
        self._observer = observer

    # Definitions

    def define(self, session: SessionRecord, definition: DefineSegment, _: Buffer | None) -> None:
        if definition.segment_id in session.segments or definition.segment_id in session.ops:
            raise IdInUse("segment", definition.segment_id)
        if len(session.segments) >= MAX_SEGMENTS:
            raise InvalidInstruction(f"a session has at most {MAX_SEGMENTS} segments")
        body = _checked_body(session, definition)
        nbytes = sum(session.ops[op.op_id].nbytes for op in body.ops)
        self._state.define_segment(session, SegmentRecord(definition.segment_id, body, nbytes))

    def forget(self, session: SessionRecord, segment_ids: Iterable[int]) -> None:
        """Forget segments, here and on the workers."""
        self._forget_on_workers(self._state.forget_segments(session, segment_ids))

    def forget_parts(self, session: SessionRecord) -> None:
        """Forget how all segments of a session are split."""
        self._forget_on_workers(self._state.forget_splits(session, list(session.segments)))

    def limit_plans(self, session: SessionRecord) -> None:
        """Forget all plans of a session if it has too many, and the parts that were made of them. This happens between
        two transactions, so the changes are committed here; and not between the ops of a segment, whose plans a split
        is made of."""
        if session.plans_kept > MAX_PLANS:
            self.forget_parts(session)
            self._plan_cache.forget(session, self._state.forget_plans(session))
            self._state.commit()

    def _forget_on_workers(self, parts: Sequence[int]) -> None:
        if parts and self._state.workers:
            self._outgoing.command(tuple(self._state.workers), ForgetOps(tuple(parts)))

    # Runs

    def expanded(self, session: SessionRecord, batch: Sequence[Instruction]) -> Iterator[Single]:
        """The instructions of a batch, where a RunSegment is replaced by its parts and ops. Each must be carried out
        before the next one is taken: the state decides whether the next one is a part. An invalid RunSegment is left as
        it is."""
        for instruction in batch:
            segment = session.segments.get(instruction.segment_id) if type(instruction) is RunSegment else None
            if segment is None or not _fits(session, segment.body, instruction):  # type: ignore[arg-type]
                yield instruction
            else:
                yield from self._run(session, segment, instruction)  # type: ignore[arg-type]

    def refuse(self, session: SessionRecord, run: RunSegment, _: Buffer | None) -> None:
        """Raise an error for a RunSegment that is invalid."""
        if run.segment_id not in session.segments:
            raise UnknownId("segment", run.segment_id)
        raise InvalidInstruction(f"a run of segment {run.segment_id} does not fit its definition")

    def _run(self, session: SessionRecord, segment: SegmentRecord, run: RunSegment) -> Iterator[Single]:
        body = segment.body
        layouts = self._layouts(run.externals)
        key = None if layouts is None else (layouts, tuple([between.position for between in run.between]))
        split = segment.splits.get(key) if key is not None else None
        if split is not None:
            yield from self._run_split(session, body, split, run)
            return
        planned, cuts = yield from self._run_singly(session, body, run)
        if key is not None and planned is not None:
            self._split(session, segment, key, planned, cuts)

    def _run_split(
        self, session: SessionRecord, body: SegmentBody, split: SegmentSplit, run: RunSegment
    ) -> Iterator[Single]:
        position = 0
        variants, all_frees, other_frees = _variants(body, split, run.dead)
        for part, variant in zip(split.parts, variants, strict=True):
            if position < part.start:
                yield from body.expand_range(run, position, part.start, other_frees)
            position = part.end
            if not self._can_replay(session, part, variant, body, run):
                yield from body.expand_range(run, part.start, part.end, all_frees)
                continue
            yield RunPart(part, variant, body, run)
            if run.between:
                yield from [each.instruction for each in run.between if part.start < each.position <= part.end]
            if other_frees:
                left = [slot for place in range(part.start, part.end) for slot in other_frees.get(place, ())]
                if left:
                    yield FreeTensors(tuple([body.id(run, slot) for slot in left]))
        yield from body.expand_range(run, position, len(body.ops), other_frees)

    def _run_singly(
        self, session: SessionRecord, body: SegmentBody, run: RunSegment
    ) -> Generator[Single, None, tuple[list[PlannedOp] | None, set[int]]]:
        """Run the ops one by one. Returns how each was planned, or None if one of them gave no value; and the positions
        at which instructions between the ops sent commands, or may do so another time."""
        planned: list[PlannedOp] | None = []
        cuts: set[int] = set()
        position, sent = 0, self._outgoing.queued
        for command in body.expand_range(run, 0, len(body.ops), body.last_uses(run.dead)):
            if type(command) is not RunOp:
                before = len(sent)
                yield command
                if type(command) in _CUTTING or (type(command) is NoteGradient and len(sent) > before):
                    cuts.add(position)
                continue
            op, layouts = body.ops[position], self._layouts(command.inputs)
            position += 1
            yield command
            results = [self._state.tensors.get(ident) for ident in command.outputs]
            if planned is None or layouts is None or any(result is None for result in results):
                planned = None
            else:
                planned.append(self._planned(session, op, layouts, results))  # type: ignore[arg-type]
        return planned, cuts

    def _layouts(self, idents: Sequence[int]) -> Layouts | None:
        """The layouts of tensors, with those of their copies; None if one of them has no value."""
        tensors = self._state.tensors
        try:
            specs = [tensors[ident].spec for ident in idents]
        except KeyError:
            return None
        return self._plan_cache.with_copies(specs, idents) if self._state.copies else tuple(specs)

    def _can_replay(
        self,
        session: SessionRecord,
        part: SegmentPart,
        variant: PartVariant,
        body: SegmentBody,
        run: RunSegment,
    ) -> bool:
        """Whether planning the ops of a part one by one would give the same commands as replaying it."""
        state, scalars = self._state, run.scalars
        if run.between and not _can_delay(part, variant, body, run):
            return False
        externals = [body.id(run, slot) for slot in part.externals]
        if session.halted is not None or self._layouts(externals) != part.layouts:
            return False
        if state.limits is not None and not self._fits(session, body.ops[part.start : part.end]):
            return False
        if state.shared and any(body.id(run, old) in state.shared for old, _ in part.written):
            return False
        gradients = state.gradients.keys() & externals if state.gradients else ()
        if gradients:
            written = {body.id(run, old) for old, _ in part.written}
            if any(ident in written or state.is_waiting(ident) for ident in gradients):
                return False
        if part.linear and not all(is_linear_with(op, scalars[first:end]) for op, first, end in part.linear):
            return False
        new = [body.id(run, slot) for slot, _ in variant.results]
        return all(ident not in table for table in (state.tensors, state.missing, state.may_resize) for ident in new)

    def _fits(self, session: SessionRecord, ops: Sequence[SegmentOp]) -> bool:
        """Whether the session may hold all results of ops at the same time. If not, it may hold those that are alive
        together, which planning the ops one by one finds out."""
        nbytes = sum([session.ops[op.op_id].nbytes for op in ops])
        return fits(self._state, session.ident, nbytes, sum([len(op.outputs) for op in ops]))

    def run_part(self, session: SessionRecord, running: RunPart, _: Buffer | None) -> None:
        """Send a part to its workers, and change the state as its ops would. Hot path."""
        part, variant, body, run = running
        state, scalars = self._state, run.scalars
        if part.placed:
            state.mark_placed([body.id(run, slot) for slot in part.placed])
        sources = [
            body.id(run, slot) if spec is None else self._copy(body.id(run, slot), spec) for slot, spec in part.sources
        ]
        results = [(body.id(run, slot), record) for slot, record in variant.results]
        written = [body.id(run, old) for old, _ in part.written]
        if written:
            before = {body.id(run, new): state.tensors[body.id(run, old)] for old, new in part.written}
            results = [(ident, record.with_placing(before.get(ident, record))) for ident, record in results]
        if variant.copied:
            self._free_unused([body.id(run, slot) for slot in variant.copied], sources)
        copies = state.apply_segment(written, [body.id(run, slot) for slot in variant.freed], results)
        own = scalars if part.body.scalar_count == len(scalars) else scalars[part.first_scalar : part.end_scalar]
        command = RunSegment(part.part_id, run.first, tuple(sources), own, variant.dead)
        self._outgoing.queued.append(ToWorkers(part.workers, command))
        if copies:
            self._outgoing.free(copies)

    def _free_unused(self, idents: Sequence[int], sources: Sequence[int]) -> None:
        """Remove tensors that die in a part, with their copies. The workers free its `sources` after their last use,
        and the others before the part."""
        for mesh, freed in self._state.free(idents).items():
            unused = tuple([ident for ident in freed if ident not in sources])
            if unused:
                self._outgoing.command(mesh.workers, FreeTensors(unused))

    def _copy(self, ident: int, spec: ShardingSpec) -> int:
        copy = self._state.use_copy(ident, spec)
        assert copy is not None, "the layouts of a part's externals include those of their copies"
        return copy

    # Splits

    def _planned(
        self, session: SessionRecord, op: SegmentOp, layouts: tuple[InputLayout, ...], results: Sequence[TensorRecord]
    ) -> PlannedOp:
        signature = session.ops[op.op_id].signature
        policy = self._state.policy(session, op.scope)
        places = policy is not None and policy.places
        cached = self._plan(session, op, layouts)
        return PlannedOp(op, signature.op, signature.writes, layouts, tuple(results), cached, places)

    def _plan(self, session: SessionRecord, op: SegmentOp, layouts: tuple[InputLayout, ...]) -> CachedPlan | None:
        """The plan of an op for inputs of these layouts; None if the plan also depends on the load of the workers, or
        on inputs that the op writes to."""
        record = session.ops[op.op_id]
        if record.aliased_inputs(op.inputs):
            return None
        policy = self._state.policy(session, op.scope)
        key = plan_key(policy, layouts)
        if key:
            return record.plans.get(key)
        is_fixed = record.layout is not None or len(self._state.workers) == 1
        return next(iter(record.plans.values())) if is_fixed and len(record.plans) == 1 else None

    def _split(
        self,
        session: SessionRecord,
        segment: SegmentRecord,
        key: SegmentKey,
        planned: Sequence[PlannedOp],
        cuts: Container[int],
    ) -> None:
        """Split a segment into parts, and define these on their workers. This happens between two transactions, so the
        changes are committed here."""
        if len(segment.splits) >= MAX_SPLITS:
            self._forget_on_workers(self._state.forget_splits(session, [segment.segment_id]))
        parts: list[SegmentPart] = []
        for place in find_parts(planned, cuts):
            part, definition = make_part(segment.body, planned, place, self._state.new_id(session))
            self._outgoing.command(part.workers, definition)
            parts.append(part)
        self._state.add_split(session, segment, key, SegmentSplit(tuple(parts)))
        self._state.commit()
        if self._observer is not None:
            self._observer(_record_split(session, segment, planned, parts))


def _record_split(
    session: SessionRecord, segment: SegmentRecord, planned: Sequence[PlannedOp], parts: Sequence[SegmentPart]
) -> SplitRecord:
    first, last = planned[0], planned[-1]
    places = tuple([range(part.start, part.end) for part in parts])
    scope, line = session.scope_name(first.op.scope), session.site(first.op.site)
    return SplitRecord(segment.segment_id, len(planned), places, first.name, last.name, scope, line)


def _can_delay(part: SegmentPart, variant: PartVariant, body: SegmentBody, run: RunSegment) -> bool:
    """Whether the instructions between the ops of a part may follow it: notes of gradients that still exist then."""
    inside = [each.instruction for each in run.between if part.start < each.position < part.end]
    if not inside:
        return True
    gone = {slot for slot, _ in part.written}.union(part.outputs).difference([slot for slot, _ in variant.results])
    ids = {body.id(run, slot) for slot in gone}
    return all(type(note) is NoteGradient and ids.isdisjoint((note.gradient, note.parameter)) for note in inside)


def _variants(body: SegmentBody, split: SegmentSplit, dead: tuple[int, ...]) -> SplitVariant:
    """The consequences of the dead slots of a run for all parts, worked out once for each set of dead slots."""
    found = split.variants.get(dead)
    if found is None:
        if len(split.variants) >= MAX_VARIANTS:
            split.variants.clear()
        frees = body.last_uses(dead)
        last_use = {slot: position for position, slots in frees.items() for slot in slots}
        parts = tuple(variant_of(part, last_use) for part in split.parts)
        left = [slot for slot in dead if not any(slot in part.gone for part in parts)]
        found = split.variants[dead] = SplitVariant(parts, frees, body.last_uses(left))
    return found


def _fits(session: SessionRecord, body: SegmentBody, run: RunSegment) -> bool:
    """Whether the numbers of a run's tensors and scalars fit, all its ids are different and its dead slots exist."""
    end = (session.ident << SESSION_SHIFT) + FIRST_DISPATCHER_ID
    externals = run.externals
    return (
        len(externals) == body.external_count
        and len(run.scalars) == body.scalar_count
        and len(set(externals)) == len(externals)
        and run.first + body.offsets[-1] < end
        and (not run.dead or max(run.dead) < body.external_count + len(body.offsets))
        and len(set(run.dead)) == len(run.dead)
        and (not run.between or _are_places([between.position for between in run.between], len(body.ops)))
    )


def _are_places(positions: Sequence[int], count: int) -> bool:
    """Whether positions are between the ops of a segment, in order."""
    return positions[0] > 0 and positions[-1] < count and all(map(le, positions, positions[1:]))


def _checked_body(session: SessionRecord, definition: DefineSegment) -> SegmentBody:
    """The body of a segment. Raises InvalidInstruction if an op is not known, or the slots do not fit."""
    lengths = {len(definition.op_ids), len(definition.inputs), len(definition.outputs), len(definition.scalars)}
    if len({*lengths, len(definition.scopes), len(definition.sites)}) != 1 or not definition.op_ids:
        raise InvalidInstruction("a segment has one entry for each op, and at least one op")
    body = SegmentBody.of(definition)
    if list(body.offsets) != sorted(set(body.offsets)):
        raise InvalidInstruction("the ids of a segment's outputs do not increase")
    gone: set[int] = set()
    for op in body.ops:
        record = session.op(op.op_id)
        if len(op.inputs) != record.input_count or len(op.outputs) != record.output_count or not op.outputs:
            raise InvalidInstruction(f"{record.signature.op} of a segment has other numbers of tensors")
        if any(slot >= op.outputs[0] or slot in gone for slot in op.inputs):
            raise InvalidInstruction(f"{record.signature.op} of a segment uses a tensor that is not there")
        record.aliased_inputs(op.inputs)
        gone.update(op.inputs[position] for position in record.signature.writes)
    return body
