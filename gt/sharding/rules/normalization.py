"""Batch, group and layer norm. In training, the statistics of batch norm are those of the whole batch."""

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
from gt.sharding.rules.support.local_programs import same_op, zeros, zeros_if_empty
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


class GroupNormDims(NamedTuple):
    """The dims of a group norm: batch, channels in groups, and spatial dims."""

    shape: Shape
    group: int

    @property
    def names(self) -> list[str]:
        return ["n", self.channels, *dim_names(len(self.shape) - 2, "s")]

    @property
    def channels(self) -> str:
        return "c" if self.group == 1 else "(g c)"

    @property
    def statistics(self) -> list[str]:
        return ["n", "1" if self.group == 1 else "g"]

    @property
    def split(self) -> Shape:
        """The shape with a dim for the groups: (n, g, c, ...)."""
        return (self.shape[0], self.group, self.shape[1] // self.group, *self.shape[2:])

    @property
    def inner(self) -> tuple[int, ...]:
        """The normalized dims of the shape `split`."""
        return tuple(range(2, len(self.split)))

    def rule(
        self, call: OpCall, operands: Sequence[Sequence[str]], results: Sequence[Sequence[str]], first: int
    ) -> OpShardingRule:
        """The rule of the forward or backward op. `first` is the position of the arguments N, C, HxW, group. The
        backward op sums over the batch."""
        whole = ["c", *dim_names(len(self.shape) - 2, "s")]
        is_backward = results[1:2] != [self.statistics]
        text = rule_text(operands, results, {"reduce(sum)": ["n"] if is_backward else [], "whole": whole})
        sizes = {} if self.group == 1 else {"g": self.group}
        lowering = zeros_if_empty(lambda shard: _lower_group_norm(shard, self, first))
        passthroughs = LINEAR if is_backward else ()
        return bind(text, call.shapes, call.result_shapes, sizes=sizes, passthroughs=passthroughs, lowering=lowering)


def _group_norm_dims(call: OpCall, position: int) -> GroupNormDims:
    return GroupNormDims(call.inputs[0].shape, call.arg(position, "group"))


def _lower_group_norm(shard: LocalContext, groups: GroupNormDims, first: int) -> LocalProgram:
    batch, channels, *space = shard.operand_shape(0)
    group = channels // (groups.shape[1] // groups.group)
    return same_op(shard, dict(enumerate([batch, channels, math.prod(space), group], first)))


def _group_norm(call: OpCall) -> OpShardingRule:
    groups = _group_norm_dims(call, 6)
    weight = [groups.channels]
    operands = operand_names(call, [("input", groups.names), ("weight", weight), ("bias", weight)])
    return groups.rule(call, operands, [groups.names, groups.statistics, groups.statistics], 3)


def _group_norm_backward(call: OpCall) -> OpShardingRule:
    groups = _group_norm_dims(call, 8)
    names, statistics, weight = groups.names, groups.statistics, [groups.channels]
    given = [("grad_out", names), ("input", names), ("mean", statistics), ("rstd", statistics), ("weight", weight)]
    return groups.rule(call, operand_names(call, given), by_output_mask(call, 9, [names, weight, weight]), 5)


def _inside(call: OpCall) -> Sequence[int]:
    """The dims of the input that a group norm normalizes over, at least in part."""
    return range(1, len(call.inputs[0].shape))


def _write_group_norm(expansion: ExpansionBuilder, call: OpCall, _: Sequence[int]) -> list[Input]:
    groups = _group_norm_dims(call, 6)
    stats = moments(
        expansion, expansion.view(widened_input(expansion, 0), groups.split), groups.inner, call.arg(7, "eps")
    )
    values = expansion.view(mul(expansion, stats.centered, stats.rstd), groups.shape)
    weight, bias = [
        optional_input(expansion, call, position, name, per_channel_shape(groups.shape)) for position, name in AFFINE
    ]
    means = [expansion.squeeze(value, groups.inner) for value in (stats.mean, stats.rstd)]
    return [affine(expansion, values, weight, bias), *means]


def _write_group_norm_backward(expansion: ExpansionBuilder, call: OpCall, _: Sequence[int]) -> list[Input]:
    groups = _group_norm_dims(call, 8)
    flat = (*groups.split[:2], *[1] * len(groups.inner))
    mean, rstd = [expansion.view(widened_input(expansion, position), flat) for position in (2, 3)]
    gradient, values = [expansion.view(widened_input(expansion, position), groups.split) for position in (0, 1)]
    gradients = NormGradients(gradient, mul(expansion, sub(expansion, values, mean), rstd), rstd)
    weight = optional_input(expansion, call, 4, "weight", (*groups.split[1:3], *[1] * len(groups.inner[1:])))
    batch = (0, *groups.inner[1:])
    makes = [
        lambda: expansion.view(gradients.of_input(expansion, weight, groups.inner), groups.shape),
        lambda: expansion.view(gradients.of_weight(expansion, batch), groups.shape[1:2]),
        lambda: expansion.view(gradients.of_bias(expansion, batch), groups.shape[1:2]),
    ]
    return [make() for make in by_output_mask(call, 9, makes)]


GROUP_NORM: dict[str, OpEntry] = {
    "aten.native_group_norm": OpEntry(_group_norm, expand_where_cut(_inside, _write_group_norm)),
    "aten.native_group_norm_backward": OpEntry(
        _group_norm_backward, expand_where_cut(_inside, _write_group_norm_backward)
    ),
}


class LayerNormDims(NamedTuple):
    """The dims of a layer norm: batch dims, and the normalized dims after them."""

    batch: tuple[int, ...]
    normalized: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        return [f"b{dim}" for dim in self.batch] + self.weight

    @property
    def weight(self) -> list[str]:
        return [f"n{dim}" for dim in self.normalized]

    @property
    def statistics(self) -> list[str]:
        return [f"b{dim}" for dim in self.batch] + ["1"] * len(self.normalized)


def _layer_norm_dims(call: OpCall, position: int) -> LayerNormDims:
    rank = len(call.inputs[0].shape)
    first = rank - len(call.arg(position, "normalized_shape"))
    return LayerNormDims(tuple(range(first)), tuple(range(first, rank)))


def _layer_norm(call: OpCall) -> OpShardingRule:
    dims = _layer_norm_dims(call, 1)
    operands = operand_names(call, [("input", dims.names), ("", ()), ("weight", dims.weight), ("bias", dims.weight)])
    text = rule_text(operands, [dims.names, dims.statistics, dims.statistics], {"whole": dims.weight})
    return bind(text, call.shapes, call.result_shapes)


def _write_layer_norm(expansion: ExpansionBuilder, call: OpCall, dims: Sequence[int]) -> list[Input]:
    stats = moments(expansion, widened_input(expansion, 0), dims, call.arg(4, "eps"))
    weight, bias = optional_input(expansion, call, 2, "weight"), optional_input(expansion, call, 3, "bias")
    values = affine(expansion, mul(expansion, stats.centered, stats.rstd), weight, bias)
    return [values, stats.mean, stats.rstd]


def _layer_norm_backward(call: OpCall) -> OpShardingRule:
    dims = _layer_norm_dims(call, 2)
    names, weight, statistics = dims.names, dims.weight, dims.statistics
    operands = operand_names(
        call,
        [
            ("grad_out", names), ("input", names), ("", ()), ("mean", statistics), ("rstd", statistics),
            ("weight", weight), ("bias", weight),
        ],
    )  # fmt: skip
    results = by_output_mask(call, 7, [names, weight, weight])
    roles = {"reduce(sum)": [f"b{dim}" for dim in dims.batch], "whole": weight}
    return bind(rule_text(operands, results, roles), call.shapes, call.result_shapes, passthroughs=LINEAR)


def _write_layer_norm_backward(expansion: ExpansionBuilder, call: OpCall, dims: Sequence[int]) -> list[Input]:
    batch = _layer_norm_dims(call, 2).batch
    rstd, weight = widened_input(expansion, 3), optional_input(expansion, call, 5, "weight")
    normalized = mul(expansion, sub(expansion, widened_input(expansion, 1), widened_input(expansion, 2)), rstd)
    gradients = NormGradients(widened_input(expansion, 0), normalized, rstd)
    makes = [
        lambda: gradients.of_input(expansion, weight, dims),
        lambda: gradients.of_weight(expansion, batch),
        lambda: gradients.of_bias(expansion, batch),
    ]
    return [make() for make in by_output_mask(call, 7, makes)]


LAYER_NORM: dict[str, OpEntry] = {
    "aten.native_layer_norm": OpEntry(
        _layer_norm, expand_where_cut(lambda call: _layer_norm_dims(call, 1).normalized, _write_layer_norm)
    ),
    "aten.native_layer_norm_backward": OpEntry(
        _layer_norm_backward,
        expand_where_cut(lambda call: _layer_norm_dims(call, 2).normalized, _write_layer_norm_backward),
    ),
}
