"""Templates of segments, which are compared with the ops of a batch by a few calls for a whole run of ops.

Comparing op by op in Python would cost as much as planning the ops. So a template compares sequences: those of op ids,
lines and scopes, then those of tensor ids relative to the first new id of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from msgspec.structs import astuple

from gt.core.messages import MAX_SLOT, BetweenOps, DefineSegment, RunOp, RunSegment
from gt.core.signatures import Number

_TuplePicker: TypeAlias = Callable[[Sequence[Any]], tuple[Any, ...]]


class OpRun:
    """Consecutive RunOps, with each field of all of them in one tuple."""

    __slots__ = ("inputs", "op_ids", "ops", "outputs", "scalars", "scopes", "sites")

    def __init__(self, ops: list[RunOp]) -> None:
        self.ops = ops
        self.op_ids, self.inputs, self.outputs, self.scalars, self.scopes, self.sites = zip(
            *map(astuple, ops), strict=True
        )


class Tokens:
    """The ops of a run without their tensors and scalars: their op ids, sites and scopes. Repetitions have equal
    tokens."""

    __slots__ = ("count", "op_ids", "scopes", "sites")

    def __init__(self, run: OpRun, start: int, end: int) -> None:
        self.count = end - start
        self.op_ids, self.sites, self.scopes = run.op_ids[start:end], run.sites[start:end], run.scopes[start:end]

    def match(self, run: OpRun, start: int) -> bool:
        """Whether the ops of a run, from `start` on, have these tokens."""
        end = start + self.count
        return (
            run.op_ids[start:end] == self.op_ids
            and run.sites[start:end] == self.sites
            and run.scopes[start:end] == self.scopes
        )

    def match_beginning(self, run: OpRun, start: int) -> bool:
        """Whether a run ends too early for all of these tokens, and agrees with them as far as it goes."""
        count = len(run.op_ids) - start
        return (
            count < self.count
            and run.op_ids[start:] == self.op_ids[:count]
            and run.sites[start:] == self.sites[:count]
            and run.scopes[start:] == self.scopes[:count]
        )

    def first_difference(self, run: OpRun, start: int) -> tuple[int, str]:
        """The position of the first op of a run that differs from these tokens, and the kind of the difference."""
        for position in range(start, min(start + self.count, len(run.op_ids))):
            if run.op_ids[position] != self.op_ids[position - start]:
                return position, "another op, shape or constant"
            if run.sites[position] != self.sites[position - start]:
                return position, "another line"
            if run.scopes[position] != self.scopes[position - start]:
                return position, "another scope"
        if start + self.count > len(run.op_ids):
            return len(run.op_ids) - 1, "a read or another instruction"
        return start, "another operand"


class Match(NamedTuple):
    """A repetition of a segment at ops `start` to `end` of a run: the first id that it gives, its externals, all its
    inputs and outputs, and its scalars."""

    template: Template
    start: int
    end: int
    first: int
    externals: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scalars: tuple[Number, ...]

    def instruction(self, dead: set[int], between: tuple[BetweenOps, ...]) -> RunSegment:
        """The RunSegment of this repetition. `dead` are ids that no later instruction uses; `between` are instructions
        between its ops."""
        slots = self.template.dead_slots(self, dead) if dead else ()
        segment_id = self.template.definition.segment_id
        return RunSegment(segment_id, self.first, self.externals, self.scalars, slots, between)

    def last_use(self, ident: int) -> int:
        """The position in the run of the last op of this repetition that names a tensor."""
        slot = (*self.externals, *self.outputs).index(ident)
        return self.start + self.template.last_use[slot]


class Template:
    """The definition of a segment, and the functions that compare later ops with it. `successor` is the segment that
    followed last time, `last_use` the position of the last op that names each slot."""

    def __init__(self, segment_id: int, tokens: Tokens, ops: Sequence[RunOp]) -> None:
        self.tokens = tokens
        self.successor: Template | None = None
        outputs = [ident for op in ops for ident in op.outputs]
        slot_of = dict(zip(outputs, range(len(outputs)), strict=True))
        externals = list(dict.fromkeys(ident for op in ops for ident in op.inputs if ident not in slot_of))
        external_of = dict(zip(externals, range(len(externals)), strict=True))
        first = outputs[0]
        inputs = [ident for op in ops for ident in op.inputs]
        self._offsets = tuple(ident - first for ident in outputs)
        self._is_dense = self._offsets == tuple(range(len(outputs)))
        is_external = [ident in external_of for ident in inputs]
        self._pick_own_inputs = _picker([place for place, outside in enumerate(is_external) if not outside])
        self._pick_own_outputs = _picker([slot_of[ident] for ident in inputs if ident in slot_of])
        self._pick_external_uses = _picker([place for place, outside in enumerate(is_external) if outside])
        self._pick_externals = _picker([inputs.index(ident) for ident in externals])
        self._repeat = _picker([external_of[ident] for ident in inputs if ident in external_of])
        slots = external_of | {ident: len(externals) + slot for ident, slot in slot_of.items()}
        self._dead: tuple[int, ...] = ()
        self._pick_dead = _picker(())
        self.definition = DefineSegment(
            segment_id,
            tuple(tokens.op_ids),
            len(externals),
            tuple(tuple(slots[ident] for ident in op.inputs) for op in ops),
            tuple(tuple(ident - first for ident in op.outputs) for op in ops),
            tuple(len(op.scalars) for op in ops),
            tuple(tokens.scopes),
            tuple(tokens.sites),
        )
        self.last_use = {slots[ident]: place for place, op in enumerate(ops) for ident in (*op.inputs, *op.outputs)}

    def match(self, run: OpRun, start: int) -> Match | None:
        """The repetition of this segment at `start`, where the tokens match; None if other tensors are used. Hot
        path."""
        end = start + self.tokens.count
        outputs = tuple(chain.from_iterable(run.outputs[start:end]))
        first = outputs[0]
        expected = range(first, first + len(outputs)) if self._is_dense else map(first.__add__, self._offsets)
        if outputs != tuple(expected):
            return None
        inputs = tuple(chain.from_iterable(run.inputs[start:end]))
        if self._pick_own_inputs(inputs) != self._pick_own_outputs(outputs):
            return None
        externals = self._pick_externals(inputs)
        if self._pick_external_uses(inputs) != self._repeat(externals):
            return None
        if len(set(externals)) != len(externals):
            return None
        if externals and max(externals) >= first and not set(externals).isdisjoint(outputs):
            return None
        scalars = tuple(chain.from_iterable(run.scalars[start:end]))
        return Match(self, start, end, first, externals, inputs, outputs, scalars)

    def dead_slots(self, match: Match, dead: set[int]) -> tuple[int, ...]:
        """The slots of ids that die in a repetition: mostly those that died in the last one."""
        ids = (*match.externals, *match.outputs)
        if len(dead) != len(self._dead) or not dead.issuperset(self._pick_dead(ids)):
            self._dead = tuple(slot for slot, ident in enumerate(ids) if ident in dead)
            self._pick_dead = _picker(self._dead)
        return self._dead


def are_in_order(outputs: Sequence[tuple[int, ...]]) -> bool:
    """Whether the new ids of ops increase, and are near enough to each other for a segment. Ops of several threads may
    have ids in another order, because an id is taken before its op is queued."""
    ids = list(chain.from_iterable(outputs))
    return bool(ids) and ids == sorted(ids) and ids[-1] - ids[0] <= MAX_SLOT


def _picker(places: Sequence[int]) -> _TuplePicker:
    """A function that returns the items of a sequence at some places as a tuple. `itemgetter` does so for two and more
    places only."""
    if len(places) > 1:
        return itemgetter(*places)
    if not places:
        return lambda values: ()
    place = places[0]
    return lambda values: (values[place],)
