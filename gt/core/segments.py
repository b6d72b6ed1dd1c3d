"""Segments of the instruction stream: runs of ops that a program repeats, defined once and then named by their id.

A `SegmentBody` is a definition prepared for expansion: the RunOps of one run of a segment, equal to those that the
client would have sent, and the FreeTensors of the tensors that died in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from gt.core.messages import (
    BeginModule,
    DefineSegment,
    DropCopies,
    FreeTensors,
    NoteGradient,
    PlaceTensor,
    RunOp,
    RunSegment,
)
from gt.core.signatures import Number


class SegmentOp(NamedTuple):
    """One op of a segment: its inputs and outputs by slot, and its scalars as a range of those of the segment."""

    op_id: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    first_scalar: int
    end_scalar: int
    scope: int
    site: int


class SegmentBody(NamedTuple):
    """The definition of a segment, prepared for expansion. `offsets` are the differences between the ids of outputs and
    the first of these ids, in the order of slots. `scalar_count` is the number of scalars of all ops."""

    external_count: int
    ops: tuple[SegmentOp, ...]
    offsets: tuple[int, ...]
    scalar_count: int

    @classmethod
    def of(cls, definition: DefineSegment) -> SegmentBody:
        """The body of a definition."""
        ends = list(accumulate(definition.scalars))
        first_slots = accumulate(map(len, definition.outputs), initial=definition.externals)
        ops = tuple(
            SegmentOp(op_id, inputs, tuple(range(slot, slot + len(outputs))), end - count, end, scope, site)
            for op_id, inputs, outputs, slot, count, end, scope, site in zip(
                definition.op_ids,
                definition.inputs,
                definition.outputs,
                first_slots,
                definition.scalars,
                ends,
                definition.scopes,
                definition.sites,
                strict=False,
            )
        )
        offsets = tuple(offset for outputs in definition.outputs for offset in outputs)
        return cls(definition.externals, ops, offsets, ends[-1] if ends else 0)

    def ids(self, first: int, externals: Sequence[int]) -> list[int]:
        """The id of each slot."""
        return [*externals, *map(first.__add__, self.offsets)]

    def id(self, run: RunSegment, slot: int) -> int:
        """The id of one slot in a run."""
        outside = self.external_count
        return run.externals[slot] if slot < outside else run.first + self.offsets[slot - outside]

    def command(self, op: SegmentOp, ids: Sequence[int], scalars: tuple[Number, ...]) -> RunOp:
        """The RunOp of one op, given the ids of all slots and the scalars of the segment."""
        return RunOp(
            op.op_id,
            tuple([ids[slot] for slot in op.inputs]),
            tuple([ids[slot] for slot in op.outputs]),
            scalars[op.first_scalar : op.end_scalar],
            op.scope,
            op.site,
        )

    def last_uses(self, slots: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """For each op, by position, those of the slots that no later op uses."""
        wanted = set(slots)
        found: dict[int, tuple[int, ...]] = {}
        for position in reversed(range(len(self.ops))):
            op = self.ops[position]
            used = tuple(slot for slot in dict.fromkeys((*op.inputs, *op.outputs)) if slot in wanted)
            if used:
                found[position] = used
                wanted.difference_update(used)
        return found

    def expand(self, run: RunSegment) -> list[Expanded]:
        """The instructions for which a RunSegment stands."""
        return list(self.expand_range(run, 0, len(self.ops), self.last_uses(run.dead)))

    def commands(self, run: RunSegment) -> list[RunOp | FreeTensors]:
        """The commands for which a RunSegment to workers stands."""
        return list(self.expand_ops(run, 0, len(self.ops), self.last_uses(run.dead)))

    def expand_range(
        self, run: RunSegment, start: int, end: int, frees: Mapping[int, tuple[int, ...]]
    ) -> Iterator[Expanded]:
        """The same for a range of the segment's ops, with the instructions between them and after the last one. `frees`
        are the slots to free after an op, by the op's position."""
        position = start
        for between in run.between:
            if start < between.position <= end:
                yield from self.expand_ops(run, position, between.position, frees)
                yield between.instruction
                position = between.position
        yield from self.expand_ops(run, position, end, frees)

    def expand_ops(
        self, run: RunSegment, start: int, end: int, frees: Mapping[int, tuple[int, ...]]
    ) -> Iterator[RunOp | FreeTensors]:
        """A range of the segment's ops, without the instructions between them."""
        if start >= end:
            return
        ids = self.ids(run.first, run.externals)
        for position in range(start, end):
            yield self.command(self.ops[position], ids, run.scalars)
            if position in frees:
                yield FreeTensors(tuple([ids[slot] for slot in frees[position]]))


Expanded: TypeAlias = RunOp | FreeTensors | NoteGradient | BeginModule | DropCopies | PlaceTensor
