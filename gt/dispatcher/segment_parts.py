"""Splits segments into parts, by the plans that their ops had when they were planned one by one. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

from gt.core.messages import DefineSegment
from gt.core.segments import SegmentBody, SegmentOp
from gt.dispatcher.op_definitions import CachedPlan, InputLayout
from gt.dispatcher.segment_records import LinearOp, PartVariant, SegmentPart
from gt.dispatcher.tensor_records import TensorRecord
from gt.sharding.spec import ShardingSpec

MIN_PART = 3  # ops that are worth a part


class PlannedOp(NamedTuple):
    """An op of a segment as it was planned in one run. `writes` are the positions of the inputs that it writes to,
    `layouts` those of its inputs before the op, and `results` its outputs. `cached` is its plan for these layouts; None
    if the layouts alone do not determine the plan. `places`: its scope keeps tensors in their layouts."""

    op: SegmentOp
    name: str
    writes: tuple[int, ...]
    layouts: tuple[InputLayout, ...]
    results: tuple[TensorRecord, ...]
    cached: CachedPlan | None
    places: bool


def find_parts(ops: Sequence[PlannedOp], cuts: Container[int] = ()) -> list[range]:
    """The longest parts that a segment can be split into from its first op on, as ranges of positions of ops. No part
    goes on over a position in `cuts`, at which other instructions send commands."""
    parts: list[range] = []
    start = 0
    while start < len(ops):
        end = _end_of_part(ops, start, cuts)
        if end - start >= MIN_PART:
            parts.append(range(start, end))
        start = max(end, start + 1)
    return parts


def _end_of_part(ops: Sequence[PlannedOp], start: int, cuts: Container[int]) -> int:
    """The position of the first op that cannot belong to a part which begins at `start`."""
    made: set[int] = set()
    workers: tuple[int, ...] | None = None
    for position in range(start, len(ops)):
        planned = ops[position]
        if position in cuts and position > start:
            return position
        if planned.cached is None or not _is_local(planned, planned.cached, made):
            return position
        if workers is not None and planned.cached.plan.workers != workers:
            return position
        workers = planned.cached.plan.workers
        made.update(planned.op.outputs)
    return len(ops)


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


def make_part(
    body: SegmentBody, ops: Sequence[PlannedOp], place: range, part_id: int
) -> tuple[SegmentPart, DefineSegment]:
    """The part of a segment at the positions `place`, and its definition for the workers."""
    planned = ops[place.start : place.stop]
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
    local = _local_slots(sources, outputs)
    definition = DefineSegment(
        part_id,
        tuple(op.cached.op_id for op in planned if op.cached is not None),
        len(sources),
        tuple(tuple(map(local, picked)) for picked in used),
        tuple(tuple(body.offsets[slot - body.external_count] for slot in op.op.outputs) for op in planned),
        tuple(op.op.end_scalar - op.op.first_scalar for op in planned),
        tuple(op.op.scope for op in planned),
        tuple(op.op.site for op in planned),
    )
    written, results = _versions(planned, outputs)
    part = SegmentPart(
        part_id,
        place.start,
        place.stop,
        planned[0].cached.plan.workers,  # type: ignore[union-attr]
        SegmentBody.of(definition),
        tuple(layouts),
        tuple(layouts.values()),
        tuple(sources),
        written,
        outputs,
        results,
        tuple(placed),
        tuple(_linear(planned)),
        planned[0].op.first_scalar,
        planned[-1].op.end_scalar,
    )
    return part, definition


def _local_slots(
    sources: Mapping[tuple[int, ShardingSpec | None], int], outputs: range
) -> Callable[[tuple[int, ShardingSpec | None]], int]:
    """A function from a slot of the client's segment, and a layout, to a slot of the workers' segment."""

    def local(used: tuple[int, ShardingSpec | None]) -> int:
        return len(sources) + used[0] - outputs.start if used[0] in outputs else sources[used]

    return local


def _versions(
    planned: Sequence[PlannedOp], outputs: range
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, TensorRecord], ...]]:
    """The externals that a part writes to, each with the slot of its last version, and the results of the part."""
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
    return [
        LinearOp(op.name, op.op.first_scalar, op.op.end_scalar)
        for op in planned
        if op.cached is not None and op.cached.plan.linear
    ]


def variant_of(part: SegmentPart, last_use: Mapping[int, int]) -> PartVariant:
    """The consequences for a part of the slots that die in a run. `last_use` maps each dead slot to the position of the
    last op that uses it. The part frees externals that it uses, or whose copies it uses, exactly on its workers."""
    dying = {slot for slot, position in last_use.items() if part.start <= position < part.end}
    written = dict(part.written)
    layouts = {
        slot: layout if isinstance(layout, tuple) else (layout,)
        for slot, layout in zip(part.externals, part.layouts, strict=True)
        if slot in dying and slot not in written
    }
    sources = [source for source in part.sources if source[0] in layouts]
    elsewhere = {slot for slot, spec in sources if (spec or layouts[slot][0]).mesh.workers != part.workers}
    freed = [slot for slot in layouts if slot not in elsewhere]
    copied = [slot for slot in freed if len(layouts[slot]) > 1 or (slot, None) not in part.sources]
    inside = [slot for slot in dying if slot in part.outputs]
    local = _local_slots({source: number for number, source in enumerate(part.sources)}, part.outputs)
    used = [source for source in sources if source[0] not in elsewhere]
    return PartVariant(
        tuple(sorted(map(local, [*used, *[(slot, None) for slot in inside]]))),
        tuple([slot for slot in freed if slot not in copied]),
        tuple(copied),
        frozenset((*freed, *inside)),
        tuple((slot, record) for slot, record in part.results if slot not in dying),
    )
