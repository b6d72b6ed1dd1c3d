"""Batch norm. In training, the statistics are those of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gt.core.signatures import Input
from gt.sharding.boxes import Shape
from gt.sharding.factors import LINEAR, OpShardingRule, bind
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.dims import dim_names, operand_names, rule_text
from gt.sharding.rules.support.expansion_builder import ExpansionBuilder
from gt.sharding.rules.support.local_programs import same_op, zeros
from gt.sharding.rules.support.statistics import (
    AFFINE,
    NormGradients,
    affine,
    by_output_mask,
    expand_where_cut,
    moments,
    mul,
    optional_input,
    per_channel_shape,
    sub,
    widened_input,
)

_FUNCTIONAL = "aten._native_batch_norm_legit_functional.default"
_UPDATING = "aten._batch_norm_with_update_functional.default"


def _batch_dims(call: OpCall) -> list[int]:
    return [dim for dim in range(len(call.inputs[0].shape)) if dim != 1]


def _batch_names(call: OpCall) -> list[str]:
    return ["n", "c", *dim_names(len(call.inputs[0].shape) - 2, "s")]


def _per_channel(call: OpCall, shape: Shape) -> list[str]:
    """The names of the dims of a per-channel tensor. Statistics that an op does not need are empty tensors."""
    return ["c" if shape == call.inputs[0].shape[1:2] else "1"] * len(shape)


class BatchNorm(NamedTuple):
    """One of torch's batch norm ops.

    - `trains`: whether a call computes statistics
    - `momentum_position`: the position of the argument momentum, which eps follows
    - `functional`: the op that returns new running statistics instead of writing them
    - `own_results`: the number of results without running statistics
    """

    trains: Callable[[OpCall], bool]
    momentum_position: int
    functional: str = _FUNCTIONAL
    own_results: int = 3

    def rule(self, call: OpCall) -> OpShardingRule:
        names = _batch_names(call)
        channel = [(name, ["c"]) for name in ("weight", "bias", "running_mean", "running_var")]
        operands = operand_names(call, [("input", names), *channel])
        results = [names, *[_per_channel(call, meta.shape) for meta in call.outputs[1:]]]
        whole = [names[dim] for dim in _batch_dims(call)] if self.trains(call) else []
        text = rule_text(operands, results, {"whole": whole})
        return bind(text, call.shapes, call.result_shapes, lowering=self.lower)

    def lower(self, shard: LocalContext) -> LocalProgram:
        call = shard.call
        builder = LocalBuilder(len(call.inputs))
        writes = len(call.outputs) > self.own_results
        if 0 not in shard.operand_shape(0):
            op = self.functional if writes else call.op
            return builder.finish(*builder.call_multi(op, len(call.outputs), *call.args, **call.kwargs))
        running = [call.arg(3, "running_mean"), call.arg(4, "running_var")] if writes else []
        new_results = [zeros(builder, shard.result_shape(p), call.outputs[p].dtype) for p in range(self.own_results)]
        return builder.finish(*new_results, *[builder.call("aten.clone.default", value) for value in running])

    def write(self, expansion: ExpansionBuilder, call: OpCall, dims: Sequence[int]) -> list[Input]:
        shape = call.inputs[0].shape
        momentum, eps = call.arg(self.momentum_position, "momentum"), call.arg(self.momentum_position + 1, "eps")
        stats = moments(expansion, widened_input(expansion, 0), dims, eps)
        weight, bias = [
            optional_input(expansion, call, position, name, per_channel_shape(shape)) for position, name in AFFINE
        ]
        values = affine(expansion, mul(expansion, stats.centered, stats.rstd), weight, bias)
        mean, variance, rstd = [expansion.squeeze(value, dims) for value in stats[1:]]
        results = [values, mean, rstd]
        if len(call.outputs) > self.own_results:
            count = math.prod([shape[dim] for dim in dims])
            spread = expansion.pointwise("aten.mul.Scalar", variance, count / (count - 1) if count > 1 else math.nan)
            old = [widened_input(expansion, call.arg(position, "").index) for position in (3, 4)]
            new = zip(old, (mean, spread), strict=True)
            results += [expansion.pointwise("aten.lerp.Scalar", before, now, momentum) for before, now in new]
        return results

    def entry(self) -> OpEntry:
        if self.own_results > 3:
            return OpEntry(self.rule)
        return OpEntry(
            self.rule, expand_where_cut(lambda call: _batch_dims(call) if self.trains(call) else (), self.write)
        )


def _batch_norm_backward(call: OpCall) -> OpShardingRule:
    names = _batch_names(call)
    channel = [
        (
            name,
            _per_channel(call, call.inputs[index].shape) if (index := call.tensor(position, name)) is not None else (),
        )
        for position, name in enumerate(("weight", "running_mean", "running_var", "save_mean", "save_invstd"), 2)
    ]
    rest: list[tuple[str, Sequence[str]]] = [("", ()), ("", ()), ("", ()), ("reserve", ["1"])]
    operands = operand_names(call, [("grad_out", names), ("input", names), *channel, *rest])
    batch = [names[dim] for dim in _batch_dims(call)]
    text = rule_text(
        operands,
        by_output_mask(call, 9, [names, ["c"], ["c"]]),
        {"whole" if call.arg(7, "train") else "reduce(sum)": batch},
    )
    return bind(text, call.shapes, call.result_shapes, passthroughs=LINEAR, lowering=_lower_batch_norm_backward)


def _lower_batch_norm_backward(shard: LocalContext) -> LocalProgram:
    if 0 not in shard.operand_shape(0):
        return same_op(shard)
    builder = LocalBuilder(len(shard.operands))
    outputs = enumerate(shard.call.outputs)
    return builder.finish(*[zeros(builder, shard.result_shape(position), meta.dtype) for position, meta in outputs])


def _write_batch_norm_backward(expansion: ExpansionBuilder, call: OpCall, dims: Sequence[int]) -> list[Input]:
    channel_shape = per_channel_shape(call.inputs[0].shape)
    mean, rstd = [
        expansion.view(widened_input(expansion, call.arg(position, "").index), channel_shape) for position in (5, 6)
    ]
    normalized = mul(expansion, sub(expansion, widened_input(expansion, 1), mean), rstd)
    gradients = NormGradients(widened_input(expansion, 0), normalized, rstd)
    weight = optional_input(expansion, call, 2, "weight", channel_shape)
    makes = [
        lambda: gradients.of_input(expansion, weight, dims),
        lambda: gradients.of_weight(expansion, dims),
        lambda: gradients.of_bias(expansion, dims),
    ]
    return [make() for make in by_output_mask(call, 9, makes)]


_BATCH_NORM = BatchNorm(lambda call: call.arg(5, "training"), 6).entry()
_BATCH_NORM_BACKWARD = OpEntry(
    _batch_norm_backward,
    expand_where_cut(lambda call: _batch_dims(call) if call.arg(7, "train") else (), _write_batch_norm_backward),
)

BATCH_NORM: dict[str, OpEntry] = {
    "aten.native_batch_norm": _BATCH_NORM,
    "aten._native_batch_norm_legit": _BATCH_NORM,
    "aten._native_batch_norm_legit_functional": _BATCH_NORM,
    "aten._native_batch_norm_legit.no_stats": BatchNorm(lambda call: call.arg(3, "training"), 4).entry(),
    "aten._native_batch_norm_legit_no_training": BatchNorm(lambda _: False, 5).entry(),
    "aten._batch_norm_with_update": BatchNorm(lambda _: True, 5, _UPDATING, 4).entry(),
    "aten._batch_norm_with_update_functional": BatchNorm(lambda _: True, 5, _UPDATING, 4).entry(),
    "aten._batch_norm_no_update": BatchNorm(lambda _: False, 5, own_results=4).entry(),
    "aten.native_batch_norm_backward": _BATCH_NORM_BACKWARD,
    "aten.batch_norm_backward": _BATCH_NORM_BACKWARD,
}
