"""The instructions of a recorded call as segments: a skipped call sends one RunSegment for up to 64 ops.

Segments are defined when a recorded call is first repeated. The recording tells which tensors die in each segment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, finalize

from gt.client.segment_matcher import MAX_TENSORS
from gt.client.segment_templates import are_in_order
from gt.client.session import Session
from gt.core.message_fields import id_fields
from gt.core.messages import (
    MAX_SEGMENT,
    BeginModule,
    BetweenOps,
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
from gt.core.segments import SegmentBody

MAX_SEGMENTS = 1 << 10  # of the recorded calls of a session; the dispatcher limits all segments of a session

Table: TypeAlias = tuple[int, ...]
"""The ids of a call's tensors, by slot."""

OpScalars: TypeAlias = Sequence[tuple[Any, ...]]
"""The scalars of each op of a call."""

Build: TypeAlias = Callable[..., Any]
"""A function that makes an instruction of a table of ids, and of its scalars if it is an op."""


class _Single:
    """An instruction that is sent by itself."""

    def __init__(self, instruction: Instruction, build: Build, number: int | None = None) -> None:
        is_ignoring = isinstance(instruction, DropCopies)  # tensors that are gone
        self.named = set() if is_ignoring else set(id_fields(type(instruction)).all(instruction))
        self.dead: tuple[int, ...] = ()
        self._build = build
        self._number = number  # of an op

    def frees(self, ident: int) -> bool:
        return False

    def instruction(self, table: Table, scalars: OpScalars) -> Instruction:
        if self._number is None:
            return self._build(table)  # type: ignore[no-any-return]
        return self._build(table, scalars[self._number])  # type: ignore[no-any-return]


class _Segment:
    """Ops of a call, numbered from `first` on, and the instructions between them, each with the position of the next
    op. All ids are those of the recorded call, `slots` are their slots in the call."""

    def __init__(
        self,
        ops: Sequence[RunOp],
        first: int,
        between: Sequence[tuple[int, Instruction, Build]],
        slots: Mapping[int, int],
    ) -> None:
        self.segment_id = 0
        self._range = slice(first, first + len(ops))
        outputs = [ident for op in ops for ident in op.outputs]
        made = set(outputs)
        externals = list(dict.fromkeys(ident for op in ops for ident in op.inputs if ident not in made))
        self._slots = {ident: slot for slot, ident in enumerate([*externals, *outputs])}
        self._between = [(position, build) for position, _, build in between]
        others = [each for _, each, _ in between if not isinstance(each, DropCopies | PlaceTensor)]
        self._kept = {ident for each in others for ident in id_fields(type(each)).all(each)}
        self._placed = {each.id: number for number, (_, each, _) in enumerate(between) if isinstance(each, PlaceTensor)}
        self._last_use = {ident: place for place, op in enumerate(ops) for ident in (*op.inputs, *op.outputs)}
        self.named = {*externals, *outputs, *self._kept, *self._placed}
        self.dead: tuple[int, ...] = ()
        self._first = slots[outputs[0]]
        # By slots of the call: requests, such as those of flow control, took ids between those of the recorded ops.
        self._offsets = tuple(tuple(slots[ident] - self._first for ident in op.outputs) for op in ops)
        self._externals = picker([slots[ident] for ident in externals])
        self._ops = ops
        self.count = len(ops)

    def frees(self, ident: int) -> bool:
        """Whether a tensor that no later instruction uses may die in the segment: it may not if an instruction between
        the segment's ops names it, other than a PlaceTensor, or a DropCopies, which ignores tensors that are gone."""
        return (ident in self._slots or ident in self._placed) and ident not in self._kept

    def set_dead(self, idents: Iterable[int], slots: Mapping[int, int]) -> None:
        """Let tensors die in the segment: after their last use, or after their placing if that is later."""
        placed = [ident for ident in idents if self._is_placed_last(ident)]
        self.dead = tuple(sorted(self._slots[ident] for ident in idents if ident not in placed))
        for ident in sorted(placed, key=self._placed.__getitem__, reverse=True):
            number = self._placed[ident]
            self._between.insert(number + 1, (self._between[number][0], _freeing([slots[ident]])))

    def _is_placed_last(self, ident: int) -> bool:
        number = self._placed.get(ident)
        return number is not None and self._last_use.get(ident, -1) < self._between[number][0]

    def define(self, segment_id: int) -> DefineSegment:
        self.segment_id = segment_id
        ops, slots = self._ops, self._slots
        return DefineSegment(
            segment_id,
            tuple(op.op_id for op in ops),
            len(slots) - sum(len(op.outputs) for op in ops),
            tuple(tuple(slots[ident] for ident in op.inputs) for op in ops),
            self._offsets,
            tuple(len(op.scalars) for op in ops),
            tuple(op.scope for op in ops),
            tuple(op.site for op in ops),
        )

    def instruction(self, table: Table, scalars: OpScalars) -> RunSegment:
        own = tuple(chain.from_iterable(scalars[self._range]))
        between = tuple([BetweenOps(position, build(table)) for position, build in self._between])
        return RunSegment(self.segment_id, table[self._first], self._externals(table), own, self.dead, between)


class SegmentedCall:
    """The instructions of a recorded call, in order, as segments and single instructions, which `builds` make. `slots`
    are the slots of ids, `dying` the ids of tensors that do not outlive the call. `shortest` is the fewest ops of a
    segment; None: there are none."""

    def __init__(
        self,
        instructions: Sequence[Instruction],
        builds: Sequence[Build],
        slots: Mapping[int, int],
        dying: Iterable[int],
        shortest: int | None,
    ) -> None:
        self._items = list(_split(instructions, builds, slots, shortest))
        self.segments = [item for item in self._items if isinstance(item, _Segment)]
        self._frees = self._place_deaths(dying, slots)
        self.op_count = sum(segment.count for segment in self.segments)

    def _place_deaths(self, dying: Iterable[int], slots: Mapping[int, int]) -> list[Build | None]:
        """Let each tensor die in the segment that uses it last, or free it after the single instruction that does.
        Returns, for each item, a function that makes the FreeTensors after it of a table."""
        last_use = {ident: number for number, item in enumerate(self._items) for ident in item.named}
        by_item: dict[int, list[int]] = {}
        for ident in dying:
            by_item.setdefault(last_use[ident], []).append(ident)
        frees: list[Build | None] = []
        for number, item in enumerate(self._items):
            dead = by_item.get(number, [])
            if isinstance(item, _Segment):
                item.set_dead([ident for ident in dead if item.frees(ident)], slots)
            left = [slots[ident] for ident in dead if not item.frees(ident)]
            frees.append(_freeing(left) if left else None)
        return frees

    def instructions(self, table: Table, scalars: OpScalars) -> list[Instruction]:
        """The instructions of one call."""
        emitted: list[Instruction] = []
        for item, free in zip(self._items, self._frees, strict=True):
            emitted.append(item.instruction(table, scalars))
            if free is not None:
                emitted.append(free(table))
        return emitted


def _freeing(slots: Sequence[int]) -> Build:
    """A function that makes the FreeTensors of some slots of a table."""
    pick = picker(slots)
    return lambda table: FreeTensors(pick(table))


def _split(
    instructions: Sequence[Instruction], builds: Sequence[Build], slots: Mapping[int, int], shortest: int | None
) -> Iterator[_Single | _Segment]:
    """The items of a call, in order."""
    numbers = _op_numbers(instructions)
    for run in _runs(instructions):
        ops = [(number, each) for number in run if isinstance(each := instructions[number], RunOp)]
        if shortest is None or len(ops) < shortest or not are_in_order(_output_slots(ops, slots)):
            for number in run:
                yield _Single(instructions[number], builds[number], numbers[number])
            continue
        end = ops[-1][0]
        between = [number for number in run if number < end and not isinstance(instructions[number], RunOp)]
        positions = [sum(place < number for place, _ in ops) for number in between]
        placed = [
            (position, instructions[number], builds[number])
            for position, number in zip(positions, between, strict=True)
        ]
        first = numbers[ops[0][0]]
        assert first is not None
        yield _Segment([op for _, op in ops], first, placed, slots)
        for number in run:
            if number > end:
                yield _Single(instructions[number], builds[number])


def _output_slots(ops: Sequence[tuple[int, RunOp]], slots: Mapping[int, int]) -> list[tuple[int, ...]]:
    return [tuple([slots[ident] for ident in op.outputs]) for _, op in ops]


def _op_numbers(instructions: Sequence[Instruction]) -> list[int | None]:
    """For each instruction its number among the ops; None if it is no op."""
    numbers: list[int | None] = []
    count = 0
    for instruction in instructions:
        is_op = isinstance(instruction, RunOp)
        numbers.append(count if is_op else None)
        count += is_op
    return numbers


def _runs(instructions: Sequence[Instruction]) -> Iterator[range]:
    """Splits instructions into ranges: those that may become a segment, which begin with an op, and single ones."""
    start = count = tensors = 0
    for number, instruction in enumerate(instructions):
        is_op = isinstance(instruction, RunOp) and bool(instruction.outputs)
        if is_op:
            size = len(instruction.inputs) + len(instruction.outputs)  # type: ignore[union-attr]
            if count == MAX_SEGMENT or (count and tensors + size > MAX_TENSORS):
                yield range(start, number)
                start, count, tensors = number, 0, 0
            count, tensors = count + 1, tensors + size
        elif not count or not isinstance(instruction, NoteGradient | BeginModule | DropCopies | PlaceTensor):
            if start < number:
                yield range(start, number)
            yield range(number, number + 1)
            start, count, tensors = number + 1, 0, 0
    if start < len(instructions):
        yield range(start, len(instructions))


def picker(places: Sequence[int]) -> Callable[[Any], Any]:
    """A function that picks the items of a tuple at some places, as a tuple: `itemgetter` of one place would give the
    bare item."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0, 0))


class DefinedSegments:
    """The segments of the recorded calls of one session, as long as it knows the same ops."""

    def __init__(self, session: Session) -> None:
        self.signatures = session.signatures
        self._bodies = session.segment_bodies = {}
        self._unused: deque[int] = deque()  # segments of calls that were collected

    def define(self, session: Session, call: SegmentedCall) -> list[Instruction] | None:
        """The instructions that define the segments of a call; None if there are too many."""
        unused = [self._unused.popleft() for _ in range(len(self._unused))]
        for segment_id in unused:
            self._bodies.pop(segment_id, None)
        if len(self._bodies) + len(call.segments) > MAX_SEGMENTS:
            self._unused.extend(unused)
            return None
        definitions = [segment.define(session.new_op_id()) for segment in call.segments]
        ids = [definition.segment_id for definition in definitions]
        self._bodies.update(zip(ids, map(SegmentBody.of, definitions), strict=True))
        finalize(call, self._unused.extend, ids)
        return [*([ForgetOps(tuple(unused))] if unused else []), *definitions]


_defined: WeakKeyDictionary[Session, DefinedSegments] = WeakKeyDictionary()


def defined_segments(session: Session) -> DefinedSegments:
    """The segments of a session; a new table if the session has forgotten its ops."""
    found = _defined.get(session)
    if found is None or found.signatures is not session.signatures:
        found = _defined[session] = DefinedSegments(session)
    return found
