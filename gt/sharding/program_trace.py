"""Traces of programs, and their flows: the paths along which mesh axes propagate from tensor to tensor of an op.

Levels order the paths from certain to uncertain. Each level adds to the one before:

1  ops that pass all of their factors and whose results are read once
2  ops that pass all of their factors
3  passing factors of any op; from a result back to a broadcast operand
4  all factors
5  from a broadcast operand, such as a bias, to results
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


class TracedOp(NamedTuple):
    """A call, and the names of its inputs and outputs."""

    call: OpCall
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class ProgramTrace(NamedTuple):
    """Ops in the order of execution, and the meta of each named value. Values are immutable: an op that writes gives a
    new value."""

    values: Mapping[str, TensorMeta]
    ops: tuple[TracedOp, ...]


@dataclass(frozen=True, eq=False)
class FlowTensor:
    """An operand or result of an op: its dims in terms of factors, and the position of each factor (dim, index in the
    dim)."""

    value: str
    dims: tuple[Dim, ...]
    positions: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Flow:
    """The tensors of one op among which axes propagate; or one broadcast operand of the op and its results.

    - `op`: the index of the op in the program
    - `cuttable`: the factors along which axes may propagate
    - `passing`: the cuttable factors that pass, element by element
    - `passes_all`: all cuttable factors pass, and all operands have the same ones
    """

    op: int
    factors: Mapping[str, Factor]
    operands: tuple[FlowTensor, ...]
    results: tuple[FlowTensor, ...]
    cuttable: tuple[str, ...]
    passing: frozenset[str]
    passes_all: bool
    is_read_once: bool
    is_broadcast: bool

    @property
    def tensors(self) -> tuple[FlowTensor, ...]:
        return (*self.operands, *self.results)

    def sources(self, factor: str, level: int) -> list[FlowTensor]:
        """The tensors from which axes of a factor propagate to others."""
        from_operands, from_results = self._source_sides(factor, level)
        giving = (*(self.operands if from_operands else ()), *(self.results if from_results else ()))
        return [tensor for tensor in giving if factor in tensor.positions]

    def receives(self, tensor: FlowTensor, factor: str, level: int) -> bool:
        """Whether axes of a factor propagate to a tensor: to results from operands; to operands from results and from
        each other."""
        from_operands, from_results = self._source_sides(factor, level)
        return factor in tensor.positions and (from_operands or (from_results and tensor in self.operands))

    def _source_sides(self, factor: str, level: int) -> tuple[bool, bool]:
        """Whether axes propagate from operands, and whether from results."""
        in_any_op = level >= (3 if factor in self.passing else 4)
        if self.is_broadcast:
            return level >= 5, in_any_op
        both = in_any_op or (self.passes_all and level >= (1 if self.is_read_once else 2))
        return both, both


def flows_of(program: ProgramTrace) -> list[Flow]:
    """The flows of all ops that have a rule."""
    reads = Counter(name for op in program.ops for name in op.inputs)
    found: list[Flow] = []
    for number, op in enumerate(program.ops):
        rule = rule_of(op.call)
        if rule is not None:
            found += _flows(number, op, rule, all(reads[name] <= 1 for name in op.outputs))
    return [flow for flow in found if flow.cuttable and len(flow.tensors) > 1]


def _flows(number: int, op: TracedOp, rule: OpShardingRule, is_read_once: bool) -> Iterator[Flow]:
    """One flow for the operands with the most factors, and one for each broadcast operand. The only operand of an op is
    broadcast if the result has more factors."""
    operands = [_flow_tensor(value, dims) for value, dims in zip(op.inputs, rule.operands, strict=True)]
    results = [_flow_tensor(value, dims) for value, dims in zip(op.outputs, rule.results, strict=True)]
    cuttable = tuple([name for name in rule.factors if rule.factors[name].role != WHOLE])
    passing = frozenset([name for name in cuttable if _is_passing(name, rule)])
    own = [frozenset(cuttable).intersection(tensor.positions) for tensor in operands]
    others = own if len(operands) > 1 else [frozenset(cuttable).intersection(tensor.positions) for tensor in results]
    broadcast = [any(mine < other for other in others) for mine in own]
    same_factors = len({mine for mine, is_broadcast in zip(own, broadcast, strict=True) if not is_broadcast}) == 1
    passes_all = same_factors and len(passing) == len(cuttable)

    def flow(tensors: Sequence[FlowTensor], is_broadcast: bool) -> Flow:
        chosen = tuple(tensors), tuple(results)
        return Flow(number, rule.factors, *chosen, cuttable, passing, passes_all, is_read_once, is_broadcast)

    yield flow([tensor for tensor, is_broadcast in zip(operands, broadcast, strict=True) if not is_broadcast], False)
    yield from [flow([tensor], True) for tensor, is_broadcast in zip(operands, broadcast, strict=True) if is_broadcast]


def _flow_tensor(value: str, dims: tuple[Dim, ...]) -> FlowTensor:
    positions = {ref.factor: (dim, tensor) for dim, refs in enumerate(dims) for tensor, ref in enumerate(refs)}
    return FlowTensor(value, dims, positions)


def _is_passing(factor: str, rule: OpShardingRule) -> bool:
    tensors = [ref for dims in (*rule.operands, *rule.results) for dim in dims for ref in dim if ref.factor == factor]
    return rule.factors[factor].role == PASS and all(ref.window is None for ref in tensors)
