"""Segments prepared for replay: the ops of a repeated run on one worker, called in order on a list of registers.

A replay does what the commands of the segment would do one by one, without looking up ids, records and ops for each:
values stay in registers, and only those that outlive the segment are stored under their ids. If an op fails, all values
are stored under their ids and the rest of the segment runs command by command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, TypeAlias

from gt.core.messages import RunSegment
from gt.core.segments import SegmentBody, SegmentOp
from gt.worker.bound_ops import BoundOp, UnavailableOp
from gt.worker.bound_op_programs import BoundOpProgram
from gt.worker.direct_calls import DirectCall
from gt.worker.engines.engine import Value
from gt.worker.failed_value import FailedValue

AnyBoundOp: TypeAlias = BoundOp | UnavailableOp | BoundOpProgram
Tensors: TypeAlias = MutableMapping[int, Value | FailedValue]
Pick: TypeAlias = Callable[[list[Any]], Sequence[Any]]

MAX_VARIANTS = 8  # variants of a segment: sets of slots that die in it


class DirectStep(NamedTuple):
    """A direct call: `pick` takes its arguments from the registers, `clear` are the registers to clear after it, and
    `position` is that of its op in the segment."""

    call: DirectCall
    pick: Pick
    clear: tuple[int, ...]
    position: int


class OtherStep(NamedTuple):
    """An op that is no direct call: it has several results, takes views of its inputs, or is a program. `clear` and
    `position` as in DirectStep."""

    op: SegmentOp
    bound: AnyBoundOp
    clear: tuple[int, ...]
    position: int


class BlockRunner(Protocol):
    """A block that runs itself: it takes the registers, to which it adds the results of its ops, and a function that
    runs blocks on them."""

    def run(self, registers: list[Any], run_blocks: Callable[[Sequence[Block]], None]) -> None: ...


Block: TypeAlias = "list[DirectStep] | OtherStep | BlockRunner"


class Variant(NamedTuple):
    """A segment prepared for a set of slots that die in it. `blocks` are direct steps that follow each other, and other
    steps between them. `taken` are the externals that the segment frees or writes to; `live` are the registers and the
    id offsets of the results that outlive it."""

    blocks: tuple[Block, ...]
    taken: tuple[int, ...]
    live: tuple[tuple[int, int], ...]


class BoundSegment:
    """A segment with its ops bound to an engine. `writes` are the slots of tensors that the segment writes to and that
    existed before it, each with the slot of the new version, in order. `has_program_writes`: a program among its ops
    writes. `compilations` has the state of the compiler for each set of dead slots."""

    def __init__(self, body: SegmentBody, ops: Mapping[int, AnyBoundOp]) -> None:
        self.body = body
        self.bound = [ops[op.op_id] for op in body.ops]
        self.compilations: dict[tuple[int, ...], Any] = {}
        self._variants: dict[tuple[int, ...], Variant] = {}
        self._renamed = {old: new for op, bound in self._pairs() for old, new in _renamed(op, bound)}
        self.has_program_writes = any(isinstance(bound, BoundOpProgram) and bound.writes for bound in self.bound)
        old_versions = set(range(body.external_count))
        self.writes: list[tuple[int, int]] = []
        for op, bound in self._pairs():
            for old, new in _renamed(op, bound):
                if old in old_versions:
                    self.writes.append((old, new))
                    old_versions.add(new)

    def _pairs(self) -> list[tuple[SegmentOp, AnyBoundOp]]:
        return list(zip(self.body.ops, self.bound, strict=True))

    def variant(self, dead: tuple[int, ...]) -> Variant:
        found = self._variants.get(dead)
        if found is None:
            if len(self._variants) >= MAX_VARIANTS:
                self._variants.clear()
                self.compilations.clear()
            found = self._variants[dead] = self._prepare(frozenset(dead))
        return found

    def _prepare(self, dead: frozenset[int]) -> Variant:
        body, renamed = self.body, self._renamed
        ends = dead | renamed.keys()
        clears = self._clears(ends)
        blocks: list[Block] = []
        for position, (op, bound) in enumerate(self._pairs()):
            clear = tuple(map(self.register, clears[position]))
            if not is_direct(op, bound):
                blocks.append(OtherStep(op, bound, clear, position))
                continue
            registers = [*map(self.register, op.inputs), *self.scalar_registers(op)]
            assert bound.direct is not None
            step = DirectStep(bound.direct, _picker(registers), clear, position)
            if blocks and isinstance(blocks[-1], list):
                blocks[-1].append(step)
            else:
                blocks.append([step])
        live = [
            (self.register(slot), offset)
            for slot, offset in enumerate(body.offsets, body.external_count)
            if slot not in ends
        ]
        taken = tuple(slot for slot in range(body.external_count) if slot in ends)
        return Variant(tuple(blocks), taken, tuple(live))

    def _clears(self, ends: frozenset[int]) -> list[list[int]]:
        """For each op, the slots among `ends` that no later op uses."""
        clears: list[list[int]] = [[] for _ in self.body.ops]
        seen: set[int] = set()
        for position in reversed(range(len(self.body.ops))):
            op = self.body.ops[position]
            for slot in {*op.inputs, *op.outputs} - seen:
                seen.add(slot)
                if slot in ends:
                    clears[position].append(slot)
        return clears

    # Registers: externals, scalars, then outputs

    def register(self, slot: int) -> int:
        return slot if slot < self.body.external_count else slot + self.body.scalar_count

    def scalar_registers(self, op: SegmentOp) -> range:
        first = self.body.external_count
        return range(first + op.first_scalar, first + op.end_scalar)

    def position(self, registers: Sequence[Any]) -> int:
        """The position of the op that has failed: the first one whose outputs are not among the registers."""
        done = len(registers) - self.body.scalar_count
        return next(number for number, op in enumerate(self.body.ops) if op.outputs[-1] >= done)

    def positions(self, before: int, after: int) -> range:
        """The positions of the ops that have added registers from `before` to `after`."""
        counts = [before - self.body.scalar_count, after - self.body.scalar_count]
        first, end = (sum(op.outputs[-1] < count for op in self.body.ops) for count in counts)
        return range(first, end)

    def restore(self, run: RunSegment, variant: Variant, registers: list[Any], position: int, tensors: Tensors) -> None:
        """Store all values under their ids, as they would be if the commands before `position` had run one by one."""
        ids = self.body.ids(run.first, run.externals)
        gone = {old for op, bound in self._pairs()[:position] for old, _ in _renamed(op, bound)}
        made = [slot for op in self.body.ops[:position] for slot in op.outputs]
        for slot in (*variant.taken, *made):
            value = registers[self.register(slot)]
            if slot not in gone and value is not None:
                tensors[ids[slot]] = value


def is_direct(op: SegmentOp, bound: AnyBoundOp) -> bool:
    return bound.direct is not None and len(op.outputs) == 1


def _renamed(op: SegmentOp, bound: AnyBoundOp) -> list[tuple[int, int]]:
    """The slots of the tensors that an op writes to, before and after it."""
    writes = bound.writes
    before = [op.inputs[position] for position in writes]
    return list(zip(before, op.outputs[len(op.outputs) - len(writes) :], strict=True))


def _picker(registers: Sequence[int]) -> Pick:
    """A function that picks the arguments of a call from the registers, always as a sequence: `itemgetter` of one
    register would give the bare value."""
    if len(registers) > 1:
        return itemgetter(*registers)
    first = registers[0] if registers else 0
    return itemgetter(slice(first, first + len(registers)))
