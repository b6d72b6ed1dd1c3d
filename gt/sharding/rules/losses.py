"""Losses: negative log likelihood, of which cross entropy is made, and losses that are a sum or mean of elements.

A class dim that is cut stays cut: each worker picks the targets among its classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gt.core.signatures import Arg, DType, Input
from gt.sharding.dtypes import accumulation_dtype
from gt.sharding.factors import LINEAR, OpShardingRule, bind
from gt.sharding.op_calls import Expansion, LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.entry import OpEntry, for_ops
from gt.sharding.rules.pointwise import elementwise
from gt.sharding.rules.support.dims import broadcast_shape, dim_names, operand_names, rule_text
from gt.sharding.rules.support.expansion_builder import ExpansionBuilder
from gt.sharding.rules.support.local_programs import cast
from gt.sharding.spec import ShardingSpec

NONE, MEAN, SUM = range(3)
"""The values of the argument `reduction`."""


# --- Sums and means of elements ---------------------------------------------------------------------------------------


def _loss(position: int) -> OpEntry:
    """A loss whose argument `reduction`, which defaults to the mean, is at `position`."""

    def rule(call: OpCall) -> OpShardingRule | None:
        if call.arg(position, "reduction", MEAN) == NONE:
            return elementwise().rule(call)
        whole = broadcast_shape(call.shapes)
        names = [f"d{dim}" for dim in range(len(whole))]
        operands = ", ".join([" ".join(names[len(names) - len(shape) :]) for shape in call.shapes])
        roles = f" | reduce(sum): {' '.join(names)}" if names else ""
        return bind(f"{operands} -> ...{roles}", call.shapes, call.result_shapes, lowering=lower)

    def lower(shard: LocalContext) -> LocalProgram:
        """The local sum, over the number of all elements for a mean. Narrow floats are summed in a wider dtype."""
        call, dtype = shard.call, shard.call.outputs[0].dtype
        builder = LocalBuilder(len(call.inputs))
        args = [*call.args, *[None] * (position + 1 - len(call.args))]
        args[position] = NONE
        wide = accumulation_dtype(dtype)
        each = builder.call(call.op, *args, **call.kwargs)
        total = builder.call("aten.sum.default", each, dtype=DType(wide))
        if call.arg(position, "reduction", MEAN) == MEAN:
            total = builder.call("aten.div.Scalar", total, math.prod(broadcast_shape(call.shapes)))
        return builder.finish(cast(builder, total, wide, dtype))

    return OpEntry(rule)


def _loss_backward(position: int) -> OpEntry:
    """The backward of a loss; its first argument is the gradient of the result."""

    def rule(call: OpCall) -> OpShardingRule | None:
        plain = elementwise(*LINEAR).rule(call)
        is_mean = call.arg(position, "reduction", MEAN) == MEAN
        return None if plain is None else replace(plain, lowering=lower if is_mean else None)

    def lower(shard: LocalContext) -> LocalProgram:
        """The backward of a sum, with the gradient divided by the number of all elements."""
        call = shard.call
        builder = LocalBuilder(len(call.inputs))
        args = [*call.args, *[None] * (position + 1 - len(call.args))]
        args[0] = builder.call("aten.div.Scalar", call.args[0], math.prod(broadcast_shape(call.shapes)))
        args[position] = SUM
        return builder.finish(builder.call(call.op, *args, **call.kwargs))

    return OpEntry(rule)


# --- Negative log likelihood ------------------------------------------------------------------------------------------

_ELSEWHERE = -(1 << 40)
"""Replaces the targets of other shards and the ignore_index: no target has this value, so invalid ones still raise."""


def _likelihood_names(rank: int) -> tuple[list[str], list[str]]:
    """The names of the dims of the input and of the targets."""
    targets = ["n", *dim_names(rank - 2, "s")] if rank > 1 else []
    return [*targets[:1], "c", *targets[1:]], targets


def _nll_loss(call: OpCall) -> OpShardingRule:
    """A mean needs the weights of all targets, so it has to be whole here; `_expand_nll_loss` makes it a sum."""
    names, targets = _likelihood_names(len(call.inputs[0].shape))
    reduction = call.arg(3, "reduction")
    operands = operand_names(call, [("self", names), ("target", targets), ("weight", ["c"])])
    results = [targets if reduction == NONE else [], []]
    roles = {
        NONE: {"mask(sum)": ["c"]},
        MEAN: {"whole": names},
        SUM: {"mask(sum)": ["c"], "reduce(sum)": targets},
    }[reduction]
    text = rule_text(operands, results, roles)
    return bind(text, call.shapes, call.result_shapes, lowering=lambda shard: _lower_nll(shard, 0, 1, 4))


def _expand_nll_loss(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    if call.arg(3, "reduction") != MEAN or not any(spec.axes for spec in specs[:2]):
        return None
    expansion = ExpansionBuilder(call)
    total, weights = expansion.call_multi(call.op, (*call.args[:3], SUM, *call.args[4:]), call.outputs, call.kwargs)
    return expansion.finish(expansion.pointwise("aten.div.Tensor", total, weights), weights)


def _nll_loss_backward(call: OpCall) -> OpShardingRule:
    names, targets = _likelihood_names(len(call.inputs[1].shape))
    gradient = targets if call.arg(4, "reduction") == NONE else []
    given = [
        ("grad_output", gradient), ("self", names), ("target", targets), ("weight", ["c"]), ("", ()), ("", ()),
        ("total_weight", ()),
    ]  # fmt: skip
    text = rule_text(operand_names(call, given), [names], {})
    lowering = lambda shard: _lower_nll(shard, 1, 2, 5)
    return bind(text, call.shapes, call.result_shapes, passthroughs=LINEAR, lowering=lowering)


def _lower_nll(shard: LocalContext, values: int, target: int, ignored: int) -> LocalProgram:
    """The op on a range of classes; `values`, `target` and `ignored` are positions of its arguments."""
    call = shard.call
    builder = LocalBuilder(len(call.inputs))
    args: list[Arg] = list(call.args)
    dim = min(len(call.inputs[values].shape) - 1, 1)
    start, stop = shard.operand_box(values)[dim]
    count = call.inputs[values].shape[dim]
    if (start, stop) != (0, count):
        args[target] = _own_targets(builder, call, target, (start, stop, count), call.args[ignored])
        args[ignored] = _ELSEWHERE
    return builder.finish(*builder.repeat(call, *args, **call.kwargs))


def _own_targets(
    builder: LocalBuilder, call: OpCall, target: int, classes: tuple[int, int, int], ignored: Arg
) -> Input:
    """Targets relative to the first class of a shard. Those in other shards are marked as ignored; invalid ones are
    kept, so that the op raises."""
    start, stop, count = classes
    given = builder.call("aten._to_copy.default", call.args[target], dtype=DType("int64"))

    def inside(low: int, high: int) -> Input:
        at_least, below = builder.call("aten.ge.Scalar", given, low), builder.call("aten.lt.Scalar", given, high)
        return builder.call("aten.logical_and.default", at_least, below)

    others = builder.call("aten.logical_xor.default", inside(0, count), inside(start, stop))
    skipped = builder.call("aten.logical_or.default", others, builder.call("aten.eq.Scalar", given, ignored))
    shifted = builder.call("aten.sub.Scalar", given, start)
    return builder.call("aten.masked_fill.Scalar", shifted, skipped, _ELSEWHERE)


LOSSES: dict[str, OpEntry] = {
    **for_ops(_loss(2), "mse_loss smooth_l1_loss huber_loss soft_margin_loss"),
    "aten.binary_cross_entropy": _loss(3),
    "aten.binary_cross_entropy_with_logits": _loss(4),
    **for_ops(
        _loss_backward(3), "mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward"
    ),
    "aten.binary_cross_entropy_backward": _loss_backward(4),
    "aten.nll_loss_forward": OpEntry(_nll_loss, _expand_nll_loss),
    "aten.nll_loss2d_forward": OpEntry(_nll_loss, _expand_nll_loss),
    "aten.nll_loss_backward": OpEntry(_nll_loss_backward),
    "aten.nll_loss2d_backward": OpEntry(_nll_loss_backward),
}
