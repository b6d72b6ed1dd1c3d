"""Runs of programs: parts that workers replay, and the steps between them, planned one by one.

A program first runs as the instructions that it stands for. The layouts and plans seen then tell which of its ops are
local: on the same workers, with known plans that move and exchange nothing. Consecutive local ops become a part. A part
ends where another step sends commands, to gather parameters for example. Later runs with the same layouts send one
command for each part. Where the state has changed so that the plans of a part may not hold, its ops are planned one by
one, as they would be without a program.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from gt.core.ids import FIRST_DISPATCHER_ID, SESSION_SHIFT
from gt.core.message_fields import id_fields
from gt.core.messages import DefineProgram, ForgetOps, FreeTensors, Instruction, RunOp, RunProgram
from gt.core.program import Program, Values
from gt.dispatcher.instruction_errors import IdInUse, InvalidInstruction, UnknownId
from gt.dispatcher.message_queue import MessageQueue, ToWorkers
from gt.dispatcher.op_definitions import CachedPlan, InputLayout, plan_key
from gt.dispatcher.plan_cache import PlanCache
from gt.dispatcher.plan_records import PlanObserver, SplitRecord
from gt.dispatcher.program_parts import (
    Layouts,
    PartVariant,
    PlannedOp,
    PlannedStep,
    ProgramPart,
    ProgramRecord,
    ProgramSplit,
    SplitVariant,
    find_parts,
    make_part,
    variant_of,
)
from gt.dispatcher.session_limits import fits
from gt.dispatcher.state import MAX_PLANS, State
from gt.dispatcher.state_records import SessionRecord
from gt.dispatcher.tensor_records import TensorRecord
from gt.sharding.rules import is_linear_with
from gt.sharding.spec import ShardingSpec
from gt.wire.codec import Buffer

MAX_SPLITS = 8  # splits of a program, for different layouts
MAX_VARIANTS = 16  # variants of a split, for different dead slots
MAX_PROGRAMS = 3 << 10  # of a session; clients forget theirs at two thirds of that


class RunPart(NamedTuple):
    """The dispatcher's own instruction to replay a part of a program, with the `values` of its slots in a run."""

    part: ProgramPart
    variant: PartVariant
    program: Program
    values: Values
    run: RunProgram

    def instructions(self) -> list[Instruction]:
        """The client's instructions that the replay takes the place of."""
        places = [place for place in range(self.part.start, self.part.end) if place not in self.part.notes]
        return [self.program.step(place, self.values) for place in places]


Single: TypeAlias = Instruction | RunPart
"""An instruction that is carried out in its own transaction."""


class Programs:
    """Defines, splits and runs the programs of all sessions. The `observer`, if there is one, sees each split."""

    def __init__(
        self, state: State, outgoing: MessageQueue, plan_cache: PlanCache, observer: PlanObserver | None = None
    ) -> None:
        self._state = state
        self._outgoing = outgoing
        self._plan_cache = plan_cache
        self._observer = observer

    # Definitions

    def define(self, session: SessionRecord, definition: DefineProgram, _: Buffer | None) -> None:
        if definition.program_id in session.programs or definition.program_id in session.ops:
            raise IdInUse("program", definition.program_id)
        if len(session.programs) >= MAX_PROGRAMS:
            raise InvalidInstruction(f"a session has at most {MAX_PROGRAMS} programs")
        program = Program.of(definition)
        _require_valid(session, program)
        nbytes = sum([session.ops[op.op_id].nbytes for op in program.ops])
        self._state.add_program(session, ProgramRecord(definition.program_id, program, nbytes))

    def forget(self, session: SessionRecord, program_ids: Iterable[int]) -> None:
        """Forget programs, here and on the workers."""
        self._forget_on_workers(self._state.forget_programs(session, program_ids))

    def forget_parts(self, session: SessionRecord) -> None:
        """Forget how all programs of a session are split."""
        self._forget_on_workers(self._state.forget_splits(session, list(session.programs)))

    def limit_plans(self, session: SessionRecord) -> None:
        """Forget all plans of a session if it has too many, and the parts that were made of them. This happens between
        two transactions, so the changes are committed here; and not between the steps of a program, whose plans a split
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
        """The instructions of a batch, where a RunProgram is replaced by its parts and steps. Each must be carried out
        before the next one is taken: the state decides whether the next one is a part. An invalid RunProgram is left as
        it is."""
        for instruction in batch:
            record = session.programs.get(instruction.program_id) if type(instruction) is RunProgram else None
            if record is None or not _fits(session, record.program, instruction):  # type: ignore[arg-type]
                yield instruction
            else:
                yield from self._run(session, record, instruction)  # type: ignore[arg-type]

    def refuse(self, session: SessionRecord, run: RunProgram, _: Buffer | None) -> None:
        """Raise an error for a RunProgram that is invalid."""
        if run.program_id not in session.programs:
            raise UnknownId("program", run.program_id)
        raise InvalidInstruction(f"a run of program {run.program_id} does not fit its definition")

    def _run(self, session: SessionRecord, record: ProgramRecord, run: RunProgram) -> Iterator[Single]:
        program = record.program
        values = program.values(run)
        layouts = self._layouts([values[slot] for slot in record.used])
        split = record.splits.get(layouts) if layouts is not None else None
        if split is not None:
            yield from self._run_split(session, program, split, run, values)
            return
        steps = yield from self._run_singly(session, program, run, values)
        if layouts is not None and steps is not None:
            self._split(session, record, layouts, steps)

    def _run_split(
        self, session: SessionRecord, program: Program, split: ProgramSplit, run: RunProgram, values: Values
    ) -> Iterator[Single]:
        position = 0
        variants, all_frees, other_frees = _variants(program, split, run.dead)
        for part, variant in zip(split.parts, variants, strict=True):
            if position < part.start:
                yield from program.expand_range(values, position, part.start, other_frees)
            position = part.end
            if not self._can_replay(session, part, variant, program, values):
                yield from program.expand_range(values, part.start, part.end, all_frees)
                continue
            yield RunPart(part, variant, program, values, run)
            for place in part.notes:
                yield program.step(place, values)
            if other_frees:
                left = [slot for place in range(part.start, part.end) for slot in other_frees.get(place, ())]
                if left:
                    yield FreeTensors(tuple([values[slot] for slot in left]))
        yield from program.expand_range(values, position, len(program.steps), other_frees)

    def _run_singly(
        self, session: SessionRecord, program: Program, run: RunProgram, values: Values
    ) -> Generator[Single, None, list[PlannedStep] | None]:
        """Run the steps one by one. Returns how each was carried out, or None if an op gave no value."""
        steps: list[PlannedStep] | None = []
        sent = self._outgoing.queued
        frees = program.last_uses(run.dead)
        for position, step in enumerate(program.steps):
            instruction, before = program.step(position, values), len(sent)
            layouts = self._layouts(instruction.inputs) if isinstance(instruction, RunOp) else None
            yield instruction
            if not isinstance(step, RunOp):
                is_silent = step.is_note and len(sent) == before
                steps = None if steps is None else [*steps, step if is_silent else None]
            else:
                results = [self._state.tensors.get(values[slot]) for slot in step.outputs]
                if steps is None or layouts is None or any(result is None for result in results):
                    steps = None
                else:
                    steps.append(self._planned(session, step, layouts, results))  # type: ignore[arg-type]
            if position in frees:
                yield FreeTensors(tuple([values[slot] for slot in frees[position]]))
        return steps

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
        part: ProgramPart,
        variant: PartVariant,
        program: Program,
        values: Values,
    ) -> bool:
        """Whether planning the ops of a part one by one would give the same commands as replaying it."""
        state = self._state
        inputs = [values[slot] for slot in part.inputs]
        if session.halted is not None or not variant.keeps_noted or self._layouts(inputs) != part.layouts:
            return False
        if state.limits is not None and not self._fits(session, program, part):
            return False
        if state.shared and any(values[old] in state.shared for old, _ in part.written):
            return False
        gradients = state.gradients.keys() & inputs if state.gradients else ()
        if gradients:
            written = {values[old] for old, _ in part.written}
            if any(ident in written or state.is_waiting(ident) for ident in gradients):
                return False
        if part.linear and not all(is_linear_with(op, _pick(values, slots)) for op, slots in part.linear):
            return False
        new = [values[slot] for slot, _ in variant.results]
        return all(ident not in table for table in (state.tensors, state.missing, state.may_resize) for ident in new)

    def _fits(self, session: SessionRecord, program: Program, part: ProgramPart) -> bool:
        """Whether the session may hold all results of a part at the same time. If not, it may hold those that are alive
        together, which planning the ops one by one finds out."""
        ops = [step for step in program.steps[part.start : part.end] if isinstance(step, RunOp)]
        nbytes = sum([session.ops[op.op_id].nbytes for op in ops])
        return fits(self._state, session.ident, nbytes, len(part.outputs))

    def run_part(self, session: SessionRecord, running: RunPart, _: Buffer | None) -> None:
        """Send a part to its workers, and change the state as its ops would. Hot path."""
        part, variant, values = running.part, running.variant, running.values
        state = self._state
        if part.placed:
            state.mark_placed([values[slot] for slot in part.placed])
        sources = [values[slot] if spec is None else self._copy(values[slot], spec) for slot, spec in part.sources]
        results = [(values[slot], record) for slot, record in variant.results]
        written = [values[old] for old, _ in part.written]
        if written:
            before = {values[new]: state.tensors[values[old]] for old, new in part.written}
            results = [(ident, record.with_placing(before.get(ident, record))) for ident, record in results]
        if variant.copied:
            self._free_unused([values[slot] for slot in variant.copied], sources)
        copies = state.apply_program(written, [values[slot] for slot in variant.freed], results)
        command = RunProgram(
            part.part_id, values[part.outputs.start], tuple(sources), tuple(values[part.scalars]), variant.dead
        )
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
        assert copy is not None, "the layouts of a part's inputs include those of their copies"
        return copy

    # Splits

    def _planned(
        self, session: SessionRecord, op: RunOp, layouts: tuple[InputLayout, ...], results: Sequence[TensorRecord]
    ) -> PlannedOp:
        signature = session.ops[op.op_id].signature
        policy = self._state.policy(session, op.scope)
        places = policy is not None and policy.places
        cached = self._plan(session, op, layouts)
        return PlannedOp(op, signature.op, signature.writes, layouts, tuple(results), cached, places)

    def _plan(self, session: SessionRecord, op: RunOp, layouts: tuple[InputLayout, ...]) -> CachedPlan | None:
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
        self, session: SessionRecord, record: ProgramRecord, layouts: Layouts, steps: Sequence[PlannedStep]
    ) -> None:
        """Split a program into parts, and define these on their workers. This happens between two transactions, so the
        changes are committed here."""
        if len(record.splits) >= MAX_SPLITS:
            self._forget_on_workers(self._state.forget_splits(session, [record.program_id]))
        parts: list[ProgramPart] = []
        for place in find_parts(steps):
            part = make_part(record.program, steps, place, self._state.new_id(session))
            self._outgoing.command(part.workers, part.program.definition(part.part_id))
            parts.append(part)
        self._state.add_split(session, record, layouts, ProgramSplit(tuple(parts)))
        self._state.commit()
        if self._observer is not None:
            self._observer(_record_split(session, record, steps, parts))


def _record_split(
    session: SessionRecord, record: ProgramRecord, steps: Sequence[PlannedStep], parts: Sequence[ProgramPart]
) -> SplitRecord:
    ops = [step for step in steps if isinstance(step, PlannedOp)]
    numbers = [sum([isinstance(step, PlannedOp) for step in steps[:place]]) for place in range(len(steps) + 1)]
    places = tuple([range(numbers[part.start], numbers[part.end]) for part in parts])
    scope, line = session.scope_name(ops[0].op.scope), session.site(ops[0].op.site)
    return SplitRecord(record.program_id, len(ops), places, ops[0].name, ops[-1].name, scope, line)


def _variants(program: Program, split: ProgramSplit, dead: tuple[int, ...]) -> SplitVariant:
    """The consequences of the dead slots of a run for all parts, worked out once for each set of dead slots."""
    found = split.variants.get(dead)
    if found is None:
        if len(split.variants) >= MAX_VARIANTS:
            split.variants.clear()
        frees = program.last_uses(dead)
        last_use = {slot: position for position, slots in frees.items() for slot in slots}
        parts = tuple(variant_of(part, last_use) for part in split.parts)
        left = [slot for slot in dead if not any(slot in part.gone for part in parts)]
        found = split.variants[dead] = SplitVariant(parts, frees, program.last_uses(left))
    return found


def _pick(values: Values, slots: Sequence[int]) -> tuple[float, ...]:
    return tuple([values[slot] for slot in slots])


def _fits(session: SessionRecord, program: Program, run: RunProgram) -> bool:
    """Whether the numbers of a run's tensors and scalars fit, its inputs are different and its dead slots are those of
    tensors."""
    end = (session.ident << SESSION_SHIFT) + FIRST_DISPATCHER_ID
    inputs = run.inputs
    return (
        len(inputs) == program.inputs
        and len(run.scalars) == program.scalars
        and len(set(inputs)) == len(inputs)
        and run.first + program.made <= end
        and len(set(run.dead)) == len(run.dead)
        and all(slot < program.inputs or program.first_new <= slot < program.slots for slot in run.dead)
    )


def _require_valid(session: SessionRecord, program: Program) -> None:
    """Raise InvalidInstruction if an op of a program is not known, or the slots do not fit."""
    new, scalar, gone = program.first_new, program.inputs, set[int]()
    for step in program.steps:
        named = step.inputs if isinstance(step, RunOp) else id_fields(type(step)).tensors(step)
        if any(slot >= new or program.inputs <= slot < program.first_new or slot in gone for slot in named):
            raise InvalidInstruction(f"{type(step).__name__} of a program names a tensor that is not there")
        if not isinstance(step, RunOp):
            continue
        op = session.op(step.op_id)
        if len(step.inputs) != op.input_count or len(step.outputs) != op.output_count or not step.outputs:
            raise InvalidInstruction(f"{op.signature.op} of a program has other numbers of tensors")
        if step.outputs != tuple(range(new, new + len(step.outputs))):
            raise InvalidInstruction("the slots of a program's new tensors do not follow one another")
        if step.scalars != tuple(range(scalar, scalar + len(step.scalars))):
            raise InvalidInstruction("the slots of a program's scalars do not follow one another")
        op.aliased_inputs(step.inputs)
        gone.update([step.inputs[position] for position in op.signature.writes])
        new, scalar = new + len(step.outputs), scalar + len(step.scalars)
    if not program.ops or scalar != program.first_new:
        raise InvalidInstruction("a program has at least one op, and as many scalars as its ops")
