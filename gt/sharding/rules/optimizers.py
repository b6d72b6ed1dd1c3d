"""Ops on lists of tensors: the pointwise ones of which optimizers consist, fused optimizers, and gradient scaling.

A pointwise op runs on lists of shards as it does on lists of tensors. Fused ones have a pointwise rule for lists of one
tensor; longer lists are expanded into one call per tensor."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.meta import TensorMeta
from gt.core.signatures import Arg, Input, ListArg
from gt.sharding.constraints import Target
from gt.sharding.factors import OpShardingRule, bind
from gt.sharding.op_calls import Expansion, OpCall, inputs_in
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.pointwise import elementwise
from gt.sharding.rules.support.dims import dim_names, rule_text
from gt.sharding.rules.support.expansion_builder import ExpansionBuilder
from gt.sharding.spec import DeviceMesh, ShardingSpec, whole
from gt.sharding.strategies import OpOperand, OpStrategy
from gt.sharding.strategy_choice import moved_bytes


def _lay_out_lists(
    call: OpCall, operands: Sequence[OpOperand], targets: Sequence[Target], mesh: DeviceMesh
) -> OpStrategy | None:
    """The tensors at one position of all lists have one layout: that of the written one, or the one of theirs to which
    the fewest bytes move. An operand that is no list is whole, and so are tensors of different shapes. None if a
    written tensor is partial: it must be reduced first."""
    needed = [whole(mesh, len(operand.shape)) for operand in operands]
    lists = [arg.values for arg in call.args if isinstance(arg, ListArg) and isinstance(arg.values[0], Input)]
    results: list[ShardingSpec] = []
    for number, (meta, target) in enumerate(zip(call.outputs, targets, strict=True)):
        members = [found.index for found in inputs_in([values[number] for values in lists], {})]
        if isinstance(target, ShardingSpec) and target.partial:
            return None
        spec = whole(mesh, len(meta.shape))
        if all(operands[member].shape == meta.shape for member in members):
            spec = _common_layout([operands[member] for member in members], target, mesh)
            for member in members:
                needed[member] = spec
        results.append(spec)
    return OpStrategy(tuple(needed), tuple(results), {})


def _common_layout(operands: Sequence[OpOperand], target: Target, mesh: DeviceMesh) -> ShardingSpec:
    """The layout of tensors of one shape: the required one, or the one of theirs to which the fewest bytes move."""
    if isinstance(target, ShardingSpec):
        return target
    own = [operand.spec.replace(partial=()) for operand in operands if operand.spec.mesh is mesh]
    return min(
        own or [whole(mesh, len(operands[0].shape))],
        key=lambda spec: sum(moved_bytes(operand, spec) for operand in operands),
    )


def _length(call: OpCall) -> int:
    return len(call.arg(0, "self"))


def _one_parameter_rule(call: OpCall, label: str) -> OpShardingRule | None:
    """The rule of a call for one parameter. `label` is the role of the factors of the parameter's dims, if some result
    lacks them; steps and scales have one element."""
    if _length(call) != 1:
        return None
    shape = call.shapes[0]
    names = dim_names(len(shape))
    operands, results = [
        [names if meta.shape == shape else ["1"] * len(meta.shape) for meta in metas]
        for metas in (call.inputs, call.outputs)
    ]
    text = rule_text(operands, results, {label: names} if label else {})
    return bind(text, call.shapes, call.result_shapes)


def _argument_of(arg: Arg, position: int) -> Arg:
    """The part of an argument that is for one parameter. Some lists are empty."""
    return ListArg(arg.values[position : position + 1]) if isinstance(arg, ListArg) else arg


def _one_by_one(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    """One call per parameter. The results of the op are several lists, concatenated."""
    length = _length(call)
    if length < 2:
        return None
    expansion = ExpansionBuilder(call)
    made: list[tuple[Input, ...]] = []
    for position in range(length):
        args = [_argument_of(arg, position) for arg in call.args]
        made.append(expansion.call_multi(call.op, args, call.outputs[position::length], call.kwargs))
    return expansion.finish(*[result for results in zip(*made, strict=True) for result in results])


def _unscale_one_by_one(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    """One call per gradient. Each call takes and returns the flag that some element was infinite."""
    length = _length(call)
    if length < 2:
        return None
    expansion = ExpansionBuilder(call)
    gradients, found, scale = call.args
    made: list[Input] = []
    for position in range(length):
        metas: tuple[TensorMeta, ...] = (call.outputs[position], call.outputs[-1])
        unscaled, found = expansion.call_multi(call.op, (_argument_of(gradients, position), found, scale), metas)
        made.append(unscaled)
    assert isinstance(found, Input)
    return expansion.finish(*made, found)


# Pointwise ops on lists. The others give results of other shapes, and the client calls them tensor by tensor.
_POINTWISE_LISTS = """
    abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp expm1 floor
    frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt
    sub tan tanh trunc zero
"""

OPTIMIZERS: dict[str, OpEntry] = {
    **{
        f"aten._foreach_{name}": OpEntry(lambda call: None, lay_out=_lay_out_lists) for name in _POINTWISE_LISTS.split()
    },
    **{
        f"aten._fused_{name}": OpEntry(lambda call: _one_parameter_rule(call, ""), _one_by_one)
        for name in ("adam", "adamw", "sgd", "adagrad")
    },
    "aten._amp_foreach_non_finite_check_and_unscale": OpEntry(
        lambda call: _one_parameter_rule(call, "reduce(max)"), _unscale_one_by_one
    ),
    "aten._amp_update_scale": elementwise(),
}
