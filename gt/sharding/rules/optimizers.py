"""Ops that take lists of parameters, gradients and state: fused optimizers and gradient scaling. A list of one is
computed element by element; a longer one is as many ops."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.meta import TensorMeta
from gt.core.signatures import Arg, Input, ListArg
from gt.sharding.factors import OpShardingRule, bind
from gt.sharding.op_calls import Expander, Expansion, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.pointwise import elementwise
from gt.sharding.rules.support.dims import named, rule_text
from gt.sharding.spec import ShardingSpec


def _length(call: OpCall) -> int:
    return len(call.arg(0, "self"))


def _each(call: OpCall, label: str) -> OpShardingRule | None:
    """`label` is the class of the dims of the parameter, for results that lack them; steps and scales are numbers."""
    if _length(call) != 1:
        return None
    shape = call.shapes[0]
    names = named(len(shape))
    operands, results = [
        [names if meta.shape == shape else ["1"] * len(meta.shape) for meta in metas]
        for metas in (call.inputs, call.outputs)
    ]
    text = rule_text(operands, results, {label: names} if label else {})
    return bind(text, call.shapes, call.result_shapes)


def _of(arg: Arg, place: int) -> Arg:
    """An argument for one parameter; some lists are empty."""
    return ListArg(arg.values[place : place + 1]) if isinstance(arg, ListArg) else arg


def _one_by_one(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    """The results are lists, one after another."""
    length = _length(call)
    if length < 2:
        return None
    pieces = Expander(len(call.inputs))
    made: list[tuple[Input, ...]] = []
    for place in range(length):
        args = [_of(arg, place) for arg in call.args]
        made.append(pieces.call(call.op, args, call.outputs[place::length], call.kwargs))
    return pieces.finish(*[result for results in zip(*made, strict=True) for result in results])


def _unscale_one_by_one(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    """Whether some element was infinite is handed on."""
    length = _length(call)
    if length < 2:
        return None
    pieces = Expander(len(call.inputs))
    gradients, found, scale = call.args
    made: list[Input] = []
    for place in range(length):
        metas: tuple[TensorMeta, ...] = (call.outputs[place], call.outputs[-1])
        unscaled, found = pieces.call(call.op, (_of(gradients, place), found, scale), metas)
        made.append(unscaled)
    assert isinstance(found, Input)
    return pieces.finish(*made, found)


OPTIMIZERS: dict[str, OpEntry] = {
    **{
        f"aten._fused_{name}": OpEntry(lambda call: _each(call, ""), _one_by_one)
        for name in ("adam", "adamw", "sgd", "adagrad")
    },
    "aten._amp_foreach_non_finite_check_and_unscale": OpEntry(
        lambda call: _each(call, "reduce(max)"), _unscale_one_by_one
    ),
    "aten._amp_update_scale": elementwise(),
}
