"""The negative log likelihood, of which cross entropy is made.

A class dim that is cut stays cut: each worker picks the targets that are among its classes.
"""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.signatures import Arg, DType, Input
from gt.sharding.factors import OpShardingRule, bind
from gt.sharding.op_calls import Expansion, LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.decomposition import Decomposition
from gt.sharding.rules.support.dims import named, operands_of, rule_text
from gt.sharding.rules.support.statistics import LINEAR
from gt.sharding.spec import ShardingSpec

NONE, MEAN, SUM = range(3)
"""What the argument `reduction` says."""

_ELSEWHERE = -(1 << 40)
"""Stands for targets to be ignored, so that a target that is wrong is still an error."""


def _likelihood_names(rank: int) -> tuple[list[str], list[str]]:
    """Of the input, and of the targets."""
    targets = ["n", *named(rank - 2, "s")] if rank > 1 else []
    return [*targets[:1], "c", *targets[1:]], targets


def _nll_loss(call: OpCall) -> OpShardingRule:
    """The mean needs the weight of all targets: it is whole here, and written as a sum otherwise."""
    names, targets = _likelihood_names(len(call.inputs[0].shape))
    reduction = call.arg(3, "reduction")
    operands = operands_of(call, [("self", names), ("target", targets), ("weight", ["c"])])
    results = [targets if reduction == NONE else [], []]
    classes = {
        NONE: {"mask(sum)": ["c"]},
        MEAN: {"whole": names},
        SUM: {"mask(sum)": ["c"], "reduce(sum)": targets},
    }[reduction]
    text = rule_text(operands, results, classes)
    return bind(text, call.shapes, call.result_shapes, lowering=lambda shard: _lower_nll(shard, 0, 1, 4))


def _expand_nll_loss(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    if call.arg(3, "reduction") != MEAN or not any(spec.axes for spec in specs[:2]):
        return None
    pieces = Decomposition(call)
    total, weights = pieces.call(call.op, (*call.args[:3], SUM, *call.args[4:]), call.outputs, call.kwargs)
    return pieces.finish(pieces.each("aten.div.Tensor", total, weights), weights)


def _nll_loss_backward(call: OpCall) -> OpShardingRule:
    names, targets = _likelihood_names(len(call.inputs[1].shape))
    gradient = targets if call.arg(4, "reduction") == NONE else []
    given = [
        ("grad_output", gradient), ("self", names), ("target", targets), ("weight", ["c"]), ("", ()), ("", ()),
        ("total_weight", ()),
    ]  # fmt: skip
    text = rule_text(operands_of(call, given), [names], {})
    lowering = lambda shard: _lower_nll(shard, 1, 2, 5)
    return bind(text, call.shapes, call.result_shapes, passes=LINEAR, lowering=lowering)


def _lower_nll(shard: LocalContext, values: int, target: int, ignored: int) -> LocalProgram:
    """The op on a range of classes; the numbers are the places of its arguments."""
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
    """Targets counted from the first class of a shard; those of other shards are ignored, those of none are not."""
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
    "aten.nll_loss_forward": OpEntry(_nll_loss, _expand_nll_loss),
    "aten.nll_loss2d_forward": OpEntry(_nll_loss, _expand_nll_loss),
    "aten.nll_loss_backward": OpEntry(_nll_loss_backward),
    "aten.nll_loss2d_backward": OpEntry(_nll_loss_backward),
}
