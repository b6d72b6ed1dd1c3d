"""Splits programs into parts, by the plans that their ops had when they were planned one by one. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

from gt.core.message_fields import id_fields
from gt.core.messages import Instruction, RunOp
from gt.core.program import Program, scalar_slots
from gt.dispatcher.op_definitions import CachedPlan, InputLayout
from gt.dispatcher.tensor_records import TensorRecord
from gt.sharding.spec import ShardingSpec

Layouts: TypeAlias = tuple[InputLayout, ...]
"""Layouts of tensors, with those of their copies."""


class LinearOp(NamedTuple):
    """An op whose plan is valid only for scalars with which it is linear, and the slots of its scalars."""

    op: str
    scalars: tuple[int, ...]


class ProgramPart(NamedTuple):
    """Consecutive ops of a client's program, from its step `start` to `end`, that run on the same workers and neither
    move nor exchange tensors. The workers replay them as a program of their own, with the id `part_id`.

    Slots are those of the client's program, except in `program`. `inputs` are the tensors that exist before the part,
    and `layouts` their layouts. `sources` are the inputs of the workers' program: a slot, and the layout of its copy to
    use, None for the tensor itself. `written` are the inputs that the part writes to, each with the slot of its last
    version. `outputs` are all slots that the part gives; `results` are those of them that the part does not overwrite.
    Inputs in `placed` stay in their layouts from then on. `notes` are the steps between the ops, which follow the
    part, and `noted` the slots that they name.
    """

    part_id: int
    start: int
    end: int
    workers: tuple[int, ...]
    program: Program
    inputs: tuple[int, ...]
    layouts: Layouts
    sources: tuple[tuple[int, ShardingSpec | None], ...]
    written: tuple[tuple[int, int], ...]
    outputs: range
    results: tuple[tuple[int, TensorRecord], ...]
    placed: tuple[int, ...]
    linear: tuple[LinearOp, ...]
    scalars: slice
    notes: tuple[int, ...]
    noted: frozenset[int]


class PartVariant(NamedTuple):
    """The consequences for one part of the slots that die in a run. `dead` are the slots that die in the part, as slots
    of the workers' program, those of copies too. As slots of the client's program, `freed` are the inputs among them,
    `copied` those that have copies, and `gone` all of them, which need no FreeTensors. `results` are the new tensors
    that outlive the part. `keeps_noted`: no tensor dies that a note names, so the notes may follow the part."""

    dead: tuple[int, ...]
    freed: tuple[int, ...]
    copied: tuple[int, ...]
    gone: frozenset[int]
    results: tuple[tuple[int, TensorRecord], ...]
    keeps_noted: bool


class SplitVariant(NamedTuple):
    """The consequences for all parts of the slots that die in a run: the variant of each part, and the dead slots by
    the position of the last step that names them. `all_frees` has all of them, `other_frees` those that no part
    frees."""

    parts: tuple[PartVariant, ...]
    all_frees: Mapping[int, tuple[int, ...]]
    other_frees: Mapping[int, tuple[int, ...]]


@dataclass
class ProgramSplit:
    """The parts of a program, in order; the steps between them are planned one by one. `variants` has an entry for each
    set of dead slots."""

    parts: tuple[ProgramPart, ...]
    variants: dict[tuple[int, ...], SplitVariant] = field(default_factory=dict, compare=False)


@dataclass
class ProgramRecord:
    """A program of a client. `nbytes` is the size of all its outputs, and `splits` are by the layouts of the inputs
    that its ops use, and of their copies."""

    program_id: int
    program: Program
    nbytes: int
    splits: dict[Layouts, ProgramSplit] = field(default_factory=dict)

    @cached_property
    def used(self) -> tuple[int, ...]:
        """The inputs that the ops use: another step may name a tensor that is gone."""
        named = {slot for op in self.program.ops for slot in op.inputs}
        return tuple([slot for slot in range(self.program.inputs) if slot in named])


MIN_PART = 3  # ops that are worth a part


class PlannedOp(NamedTuple):
    """An op of a program as it was planned in one run. `writes` are the positions of the inputs that it writes to,
    `layouts` those of its inputs before the op, and `results` its outputs. `cached` is its plan for these layouts; None
    if the layouts alone do not determine the plan. `places`: its scope keeps tensors in their layouts."""

    op: RunOp
    name: str
    writes: tuple[int, ...]
    layouts: tuple[InputLayout, ...]
    results: tuple[TensorRecord, ...]
    cached: CachedPlan | None
    places: bool


PlannedStep: TypeAlias = PlannedOp | Instruction | None
"""A step of a program as it was carried out in one run: an op, or a note. None if it sends commands, or may do so
another time."""


def find_parts(steps: Sequence[PlannedStep]) -> list[range]:
    """The longest parts that a program can be split into from its first step on, as ranges of positions."""
    parts: list[range] = []
    start = 0
    while start < len(steps):
        end = _end_of_part(steps, start)
        if sum([isinstance(step, PlannedOp) for step in steps[start:end]]) >= MIN_PART:
            parts.append(range(start, end))
        start = max(end, start + 1)
    return parts


def _end_of_part(steps: Sequence[PlannedStep], start: int) -> int:
    """The position after the last op that can belong to a part which begins at `start`. A note may follow
    the part, unless an op after it overwrites a tensor that it names."""
    made: set[int] = set()
    noted: set[int] = set()
    workers: tuple[int, ...] | None = None
    end = start
    for position in range(start, len(steps)):
        step = steps[position]
        if step is not None and not isinstance(step, PlannedOp) and position > start:
            noted.update(id_fields(type(step)).tensors(step))
            continue
        if not isinstance(step, PlannedOp) or step.cached is None or not _is_local(step, step.cached, made):
            break
        if workers is not None and step.cached.plan.workers != workers:
            break
        if not noted.isdisjoint([step.op.inputs[write] for write in step.writes]):
            break
        workers = step.cached.plan.workers
        made.update(step.op.outputs)
        end = position + 1
    return end


def _is_local(planned: PlannedOp, cached: CachedPlan, made: set[int]) -> bool:
    """Whether an op is one command without an exchange. An input that the op needs in another layout must have a copy
    in that layout; tensors `made` in the part have no copies."""
    if cached.exchanges or cached.plan.collectives:
        return False
    if [result.spec for result in cached.results] != [result.spec for result in planned.results]:
        return False
    slots = planned.op.inputs
    if any(slot in made and isinstance(layout, tuple) for slot, layout in zip(slots, planned.layouts, strict=True)):
        return False
    return all(
        spec is None or (isinstance(layout := planned.layouts[position], tuple) and spec in layout[1:])
        for position, spec in cached.plan.sources
    )


def make_part(program: Program, steps: Sequence[PlannedStep], place: range, part_id: int) -> ProgramPart:
    """The part of a program at the positions `place`."""
    planned = [step for step in steps[place.start : place.stop] if isinstance(step, PlannedOp)]
    outputs = range(planned[0].op.outputs[0], planned[-1].op.outputs[-1] + 1)
    layouts: dict[int, InputLayout] = {}
    sources: dict[tuple[int, ShardingSpec | None], int] = {}
    placed: dict[int, None] = {}
    used: list[list[tuple[int, ShardingSpec | None]]] = []
    for op in planned:
        assert op.cached is not None
        for slot, layout in zip(op.op.inputs, op.layouts, strict=True):
            if slot not in outputs:
                layouts.setdefault(slot, layout)
        used.append([(op.op.inputs[position], spec) for position, spec in op.cached.plan.sources])
        for slot, spec in used[-1]:
            if slot not in outputs:
                sources.setdefault((slot, spec), len(sources))
        placed |= dict.fromkeys([slot for slot in _placed_by(op) if slot not in outputs])
    scalars = [slot for op in planned for slot in scalar_slots(op.op)]
    first_scalar = scalars[0] if scalars else 0
    local = _local_slots(sources, len(scalars), outputs)
    ops = [
        RunOp(
            op.cached.op_id,  # type: ignore[union-attr]
            tuple(map(local, picked)),
            tuple([local((slot, None)) for slot in op.op.outputs]),
            tuple([slot - first_scalar + len(sources) for slot in scalar_slots(op.op)]),
            op.op.scope,
            op.op.site,
        )
        for op, picked in zip(planned, used, strict=True)
    ]
    written, results = _versions(planned, outputs)
    notes = [position for position in place if not isinstance(steps[position], PlannedOp)]
    return ProgramPart(
        part_id,
        place.start,
        place.stop,
        planned[0].cached.plan.workers,  # type: ignore[union-attr]
        Program(ops, len(sources), len(scalars)),
        tuple(layouts),
        tuple(layouts.values()),
        tuple(sources),
        written,
        outputs,
        results,
        tuple(placed),
        tuple(_linear(planned)),
        slice(first_scalar, first_scalar + len(scalars)),
        tuple(notes),
        frozenset([slot for position in notes for slot in program.uses(position)]),
    )


def _local_slots(
    sources: Mapping[tuple[int, ShardingSpec | None], int], scalars: int, outputs: range
) -> Callable[[tuple[int, ShardingSpec | None]], int]:
    """A function from a slot of the client's program, and a layout, to a slot of the workers' program."""

    def local(used: tuple[int, ShardingSpec | None]) -> int:
        return len(sources) + scalars + used[0] - outputs.start if used[0] in outputs else sources[used]

    return local


def _versions(
    planned: Sequence[PlannedOp], outputs: range
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, TensorRecord], ...]]:
    """The inputs that a part writes to, each with the slot of its last version, and the results of the part."""
    root_of: dict[int, int] = {}
    written: dict[int, int] = {}
    results: dict[int, TensorRecord] = {}
    for op in planned:
        for slot in _placed_by(op):
            if slot in results:
                results[slot] = results[slot]._replace(placed=True)
        results |= zip(op.op.outputs, op.results, strict=True)
        for position, new in zip(op.writes, op.op.outputs[len(op.op.outputs) - len(op.writes) :], strict=True):
            old = op.op.inputs[position]
            results[new] = results[new].with_placing(results.pop(old, results[new]))
            root = root_of.get(old, old)
            if root not in outputs:
                root_of[new], written[root] = root, new
    return tuple(written.items()), tuple(results.items())


def _placed_by(op: PlannedOp) -> list[int]:
    """The inputs of an op that keep their layouts from then on, because a scope uses them as they are."""
    assert op.cached is not None
    return [op.op.inputs[position] for position, spec in op.cached.plan.sources if spec is None and op.places]


def _linear(planned: Sequence[PlannedOp]) -> list[LinearOp]:
    """The ops of a part whose plans are valid only while the ops are linear."""
    return [LinearOp(op.name, scalar_slots(op.op)) for op in planned if op.cached is not None and op.cached.plan.linear]


def variant_of(part: ProgramPart, last_use: Mapping[int, int]) -> PartVariant:
    """The consequences for a part of the slots that die in a run. `last_use` maps each dead slot to the position of the
    last step that names it. The part frees inputs that it uses, or whose copies it uses, exactly on its workers."""
    places = frozenset(range(part.start, part.end)).difference(part.notes)
    dying = {slot for slot, position in last_use.items() if position in places}
    written = dict(part.written)
    layouts = {
        slot: layout if isinstance(layout, tuple) else (layout,)
        for slot, layout in zip(part.inputs, part.layouts, strict=True)
        if slot in dying and slot not in written
    }
    sources = [source for source in part.sources if source[0] in layouts]
    elsewhere = {slot for slot, spec in sources if (spec or layouts[slot][0]).mesh.workers != part.workers}
    freed = [slot for slot in layouts if slot not in elsewhere]
    copied = [slot for slot in freed if len(layouts[slot]) > 1 or (slot, None) not in part.sources]
    inside = [slot for slot in dying if slot in part.outputs]
    numbers = {source: number for number, source in enumerate(part.sources)}
    local = _local_slots(numbers, part.program.scalars, part.outputs)
    used = [source for source in sources if source[0] not in elsewhere]
    return PartVariant(
        tuple(sorted(map(local, [*used, *[(slot, None) for slot in inside]]))),
        tuple([slot for slot in freed if slot not in copied]),
        tuple(copied),
        frozenset((*freed, *inside)),
        tuple((slot, record) for slot, record in part.results if slot not in dying),
        part.noted.isdisjoint(dying),
    )
