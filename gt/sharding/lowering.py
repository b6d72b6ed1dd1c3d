"""Applies the sharding rule of one op call: chooses its layouts, and lowers it to each worker's local calls.

The dispatcher calls `infer_output_sharding` while it plans; each worker calls `get_shard_args` and
`create_sharded_output` once for every op of a program. `program_builder.py` strings such calls and the moves between
them together into a worker program.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from gt.core.meta import ITEM_BYTES, TensorMeta
from gt.core.signatures import Arg
from gt.sharding.constraints import Target
from gt.sharding.factors import OpShardingRule
from gt.sharding.op_calls import LocalContext, LocalProgram, OpCall
from gt.sharding.rules import lower, rule_of
from gt.sharding.spec import DeviceMesh, ShardingSpec, compute_local_shape
from gt.sharding.strategies import OpOperand, OpResult
from gt.sharding.strategy_choice import Choice, RankedChoice, propagate_sharding, ranked_choices

_FrozenCall: TypeAlias = tuple[
    str,
    tuple[Arg, ...],
    tuple[tuple[str, Arg], ...],
    tuple[TensorMeta, ...],
    tuple[TensorMeta, ...],
    tuple[int, ...],
]
"""The fields of an OpCall, which can be hashed."""


class NoRule(Exception):
    """An op that cannot run on shards, because it has no rule."""


def infer_output_sharding(
    call: OpCall,
    specs: Sequence[ShardingSpec],
    mesh: DeviceMesh,
    targets: Sequence[Target] = (),
    copies: Sequence[tuple[ShardingSpec, ...]] = (),
    reduces_first: bool = False,
) -> Choice:
    """The strategy of the op's rule that moves the fewest bytes. Raises NoRule for an op without a rule.

    - `targets`: per output, its required layout
    - `copies`: per input, layouts of the copies that exist of it
    - `reduces_first`: the op neither takes nor gives partial values
    """
    frozen = (call.op, call.args, tuple(call.kwargs.items()), call.inputs, call.outputs, call.output_positions)
    return _infer(frozen, tuple(specs), mesh, tuple(targets), tuple(copies), reduces_first)


# A new length of a sequence needs most choices several times: of views that several ops take, and of weights.
@functools.lru_cache(maxsize=1 << 12)
def _infer(
    frozen: _FrozenCall,
    specs: tuple[ShardingSpec, ...],
    mesh: DeviceMesh,
    targets: tuple[Target, ...],
    copies: tuple[tuple[ShardingSpec, ...], ...],
    reduces_first: bool,
) -> Choice:
    op, args, kwargs, inputs, outputs, positions = frozen
    call = OpCall(op, args, dict(kwargs), inputs, outputs, positions)
    problem = _problem_of(call, specs, targets, copies, reduces_first)
    if problem is None:
        raise NoRule(call.op)
    rule, operands, results = problem
    choice = propagate_sharding(rule, operands, results, mesh)
    return choice if rule.reads_values else _with_partial_inputs(choice, specs, operands)


class _Problem(NamedTuple):
    """A rule, and the operands and results that it is to be applied to."""

    rule: OpShardingRule
    operands: list[OpOperand]
    results: list[OpResult]


def _problem_of(
    call: OpCall,
    specs: Sequence[ShardingSpec],
    targets: Sequence[Target],
    copies: Sequence[tuple[ShardingSpec, ...]],
    reduces_first: bool,
) -> _Problem | None:
    rule = rule_of(call)
    if rule is None:
        return None
    rule = rule.reducing_first() if reduces_first else rule
    assert (len(rule.operands), len(rule.results)) == (len(call.inputs), len(call.outputs)), (
        f"{call} has the rule {rule}"
    )
    needed = specs if rule.reads_values else [spec.replace(partial=()) for spec in specs]
    operands = [
        OpOperand(meta.shape, ITEM_BYTES[meta.dtype], spec, own_copies)
        for meta, spec, own_copies in zip(call.inputs, needed, copies or [()] * len(specs), strict=True)
    ]
    results = [
        OpResult(meta.shape, ITEM_BYTES[meta.dtype], target)
        for meta, target in zip(call.outputs, list(targets) or [None] * len(call.outputs), strict=True)
    ]
    return _Problem(rule, operands, results)


def _with_partial_inputs(choice: Choice, specs: Sequence[ShardingSpec], operands: Sequence[OpOperand]) -> Choice:
    """The choice of an op that does not read the values of its inputs: partial ones may stay as they are."""
    chosen = zip(specs, operands, choice.strategy.operands, strict=True)
    unmoved = tuple([spec if taken is operand.spec else taken for spec, operand, taken in chosen])
    return choice._replace(strategy=choice.strategy._replace(operands=unmoved))


class ConsideredRule(NamedTuple):
    """A rule with all its strategies, the best one first."""

    rule: OpShardingRule
    choices: list[RankedChoice]


def all_strategies(
    call: OpCall,
    specs: Sequence[ShardingSpec],
    mesh: DeviceMesh,
    targets: Sequence[Target] = (),
    copies: Sequence[tuple[ShardingSpec, ...]] = (),
    reduces_first: bool = False,
) -> ConsideredRule | None:
    """All strategies among which `infer_output_sharding` chooses; None for an op without a rule."""
    problem = _problem_of(call, specs, targets, copies, reduces_first)
    if problem is None:
        return None
    rule, operands, results = problem
    choices = ranked_choices(rule, operands, results, mesh)
    if not rule.reads_values:
        choices = [each._replace(choice=_with_partial_inputs(each.choice, specs, operands)) for each in choices]
    return ConsideredRule(rule, choices)


def forget_choices() -> None:
    """Forget the strategies that were chosen: a rule has changed."""
    _infer.cache_clear()


def get_shard_args(shard: LocalContext) -> LocalProgram:
    """The ops that one worker runs for a call, with the arguments for its shards."""
    return lower(shard)


def create_sharded_output(meta: TensorMeta, spec: ShardingSpec, worker: int) -> TensorMeta:
    """The meta of a worker's shard of a tensor."""
    return meta.part(compute_local_shape(spec, meta.shape, worker))
