"""Fused optimizers and gradient scaling, which take lists of tensors. Lists of one tensor have a pointwise rule; longer
lists are expanded into one call per tensor."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.meta import TensorMeta
from gt.core.signatures import Arg, Input, ListArg
from gt.sharding.factors import OpShardingRule, bind
from gt.sharding.op_calls import Expansion, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.pointwise import elementwise
from gt.sharding.rules.support.dims import dim_names, rule_text
from gt.sharding.rules.support.expansion_builder import ExpansionBuilder
from gt.sharding.spec import ShardingSpec


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


OPTIMIZERS: dict[str, OpEntry] = {
    **{
        f"aten._fused_{name}": OpEntry(lambda call: _one_parameter_rule(call, ""), _one_by_one)
        for name in ("adam", "adamw", "sgd", "adagrad")
    },
    "aten._amp_foreach_non_finite_check_and_unscale": OpEntry(
        lambda call: _one_parameter_rule(call, "reduce(max)"), _unscale_one_by_one
    ),
    "aten._amp_update_scale": elementwise(),
}
