"""A recorded program as steps that mesh axes flow through, from tensor to tensor along factors.

Levels let axes flow along the surest ways first; each adds to the one before:

1  ops that pass all of their factors on, where nobody else reads the result
2  the same, read by many
3  factors that pass, in any op; from a result back to an operand that is repeated for it
4  all factors
5  also from an operand that is repeated: a bias says something about a sum only where nothing else does
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gt.core.meta import TensorMeta
from gt.sharding.factors import PASS, WHOLE, Dim, Factor, OpShardingRule
from gt.sharding.op_calls import OpCall
from gt.sharding.rules import rule_of

LEVELS = (1, 2, 3, 4, 5)


class RecordedOp(NamedTuple):
    """A call, and the names of the values that it takes and gives."""

    call: OpCall
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class RecordedProgram(NamedTuple):
    """Ops in the order of their execution, and what each value is. A value never changes: what an op writes is new."""

    values: Mapping[str, TensorMeta]
    ops: tuple[RecordedOp, ...]


@dataclass(frozen=True, eq=False)
class Place:
    """An operand or result of an op: its dims in terms of factors, and where each factor is (dim, place in it)."""

    value: str
    dims: tuple[Dim, ...]
    where: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Flow:
    """An op, or the repetition of one operand for the others that is a part of it.

    - `op`: its number
    - `cuttable`: the factors that axes may flow along
    - `plain`: those of them that pass, element by element
    - `passes`: all of them do, and all operands have the same
    """

    op: int
    factors: Mapping[str, Factor]
    operands: tuple[Place, ...]
    results: tuple[Place, ...]
    cuttable: tuple[str, ...]
    plain: frozenset[str]
    passes: bool
    is_read_once: bool
    repeats: bool

    @property
    def places(self) -> tuple[Place, ...]:
        return (*self.operands, *self.results)

    def givers(self, factor: str, level: int) -> list[Place]:
        """The places whose axes of a factor flow to others."""
        from_operands, from_results = self._gives(factor, level)
        giving = (*(self.operands if from_operands else ()), *(self.results if from_results else ()))
        return [place for place in giving if factor in place.where]

    def receives(self, place: Place, factor: str, level: int) -> bool:
        """Results get axes from operands; operands from results and from each other."""
        from_operands, from_results = self._gives(factor, level)
        return factor in place.where and (from_operands or (from_results and place in self.operands))

    def _gives(self, factor: str, level: int) -> tuple[bool, bool]:
        """Whether operands, and whether results, give."""
        in_any_op = level >= (3 if factor in self.plain else 4)
        if self.repeats:
            return level >= 5, in_any_op
        both = in_any_op or (self.passes and level >= (1 if self.is_read_once else 2))
        return both, both


def flows_of(program: RecordedProgram) -> list[Flow]:
    """Nothing flows through an op without a rule."""
    reads = Counter(name for op in program.ops for name in op.inputs)
    found: list[Flow] = []
    for number, op in enumerate(program.ops):
        rule = rule_of(op.call)
        if rule is not None:
            found += _flows(number, op, rule, all(reads[name] <= 1 for name in op.outputs))
    return [flow for flow in found if flow.cuttable and len(flow.places) > 1]


def _flows(number: int, op: RecordedOp, rule: OpShardingRule, is_read_once: bool) -> Iterator[Flow]:
    """One for the operands that have the most factors, and one more for each that is repeated for them. The operand of
    an op that has no other is repeated where the result has more factors."""
    operands = [_place(value, dims) for value, dims in zip(op.inputs, rule.operands, strict=True)]
    results = [_place(value, dims) for value, dims in zip(op.outputs, rule.results, strict=True)]
    cuttable = tuple([name for name in rule.factors if rule.factors[name].kind != WHOLE])
    plain = frozenset([name for name in cuttable if _is_plain(name, rule)])
    own = [frozenset(cuttable).intersection(place.where) for place in operands]
    others = own if len(operands) > 1 else [frozenset(cuttable).intersection(place.where) for place in results]
    repeated = [any(mine < other for other in others) for mine in own]
    alike = len({mine for mine, is_repeated in zip(own, repeated, strict=True) if not is_repeated}) == 1
    passes = alike and len(plain) == len(cuttable)

    def flow(places: Sequence[Place], repeats: bool) -> Flow:
        chosen = tuple(places), tuple(results)
        return Flow(number, rule.factors, *chosen, cuttable, plain, passes, is_read_once, repeats)

    yield flow([place for place, is_repeated in zip(operands, repeated, strict=True) if not is_repeated], False)
    yield from [flow([place], True) for place, is_repeated in zip(operands, repeated, strict=True) if is_repeated]


def _place(value: str, dims: tuple[Dim, ...]) -> Place:
    where = {ref.factor: (dim, place) for dim, refs in enumerate(dims) for place, ref in enumerate(refs)}
    return Place(value, dims, where)


def _is_plain(factor: str, rule: OpShardingRule) -> bool:
    places = [ref for dims in (*rule.operands, *rule.results) for dim in dims for ref in dim if ref.factor == factor]
    return rule.factors[factor].kind == PASS and all(ref.window is None for ref in places)
