"""Norms of channels: group norm and batch norm. Batch statistics are those of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gt.core.signatures import Input
from gt.sharding.factors import OpShardingRule, bind
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.decomposition import Decomposition
from gt.sharding.rules.support.dims import named, operands_of, rule_text
from gt.sharding.rules.support.local_programs import same_op, unless_empty, zeros
from gt.sharding.rules.support.statistics import (
    LINEAR,
    Gradients,
    affine,
    asked,
    mul,
    normal_of,
    optional,
    sub,
    where_cut,
    widened,
)
from gt.sharding.spec import Shape

# --- Group norm -------------------------------------------------------------------------------------------------------


class Groups(NamedTuple):
    """The dims of a group norm: a batch, channels that are groups of channels, and space."""

    shape: Shape
    group: int

    @property
    def names(self) -> list[str]:
        return ["n", self.channels, *named(len(self.shape) - 2, "s")]

    @property
    def channels(self) -> str:
        return "c" if self.group == 1 else "(g c)"

    @property
    def statistics(self) -> list[str]:
        return ["n", "1" if self.group == 1 else "g"]

    @property
    def split(self) -> Shape:
        """The shape with the channels of each group apart: (n, g, c, ...)."""
        return (self.shape[0], self.group, self.shape[1] // self.group, *self.shape[2:])

    @property
    def inner(self) -> tuple[int, ...]:
        """The normalised dims of that shape."""
        return tuple(range(2, len(self.split)))

    def rule(
        self, call: OpCall, operands: Sequence[Sequence[str]], results: Sequence[Sequence[str]], first: int
    ) -> OpShardingRule:
        """`first` is the place of the arguments that say the sizes of the input. Of backward, the batch adds up."""
        whole = ["c", *named(len(self.shape) - 2, "s")]
        is_backward = results[1:2] != [self.statistics]
        text = rule_text(operands, results, {"reduce(sum)": ["n"] if is_backward else [], "whole": whole})
        sizes = {} if self.group == 1 else {"g": self.group}
        lowering = unless_empty(lambda shard: _lower_group_norm(shard, self, first))
        passes = LINEAR if is_backward else ()
        return bind(text, call.shapes, call.result_shapes, sizes=sizes, passes=passes, lowering=lowering)


def _groups(call: OpCall, place: int) -> Groups:
    return Groups(call.inputs[0].shape, call.arg(place, "group"))


def _lower_group_norm(shard: LocalContext, groups: Groups, first: int) -> LocalProgram:
    batch, channels, *space = shard.operand_shape(0)
    group = channels // (groups.shape[1] // groups.group)
    return same_op(shard, dict(enumerate([batch, channels, math.prod(space), group], first)))


def _group_norm(call: OpCall) -> OpShardingRule:
    groups = _groups(call, 6)
    weight = [groups.channels]
    operands = operands_of(call, [("input", groups.names), ("weight", weight), ("bias", weight)])
    return groups.rule(call, operands, [groups.names, groups.statistics, groups.statistics], 3)


def _group_norm_backward(call: OpCall) -> OpShardingRule:
    groups = _groups(call, 8)
    names, statistics, weight = groups.names, groups.statistics, [groups.channels]
    given = [("grad_out", names), ("input", names), ("mean", statistics), ("rstd", statistics), ("weight", weight)]
    return groups.rule(call, operands_of(call, given), asked(call, 9, [names, weight, weight]), 5)


def _inside(call: OpCall) -> Sequence[int]:
    """The dims of the input that a group norm normalises over, at least in part."""
    return range(1, len(call.inputs[0].shape))


def _write_group_norm(pieces: Decomposition, call: OpCall, _: Sequence[int]) -> list[Input]:
    groups = _groups(call, 6)
    normal = normal_of(pieces, pieces.view(widened(pieces, 0), groups.split), groups.inner, call.arg(7, "eps"))
    values = pieces.view(mul(pieces, normal.apart, normal.scale), groups.shape)
    weight, bias = [optional(pieces, call, place, name, _upright(groups.shape)) for place, name in _AFFINE]
    means = [pieces.squeeze(value, groups.inner) for value in (normal.mean, normal.scale)]
    return [affine(pieces, values, weight, bias), *means]


def _write_group_norm_backward(pieces: Decomposition, call: OpCall, _: Sequence[int]) -> list[Input]:
    groups = _groups(call, 8)
    flat = (*groups.split[:2], *[1] * len(groups.inner))
    mean, scale = [pieces.view(widened(pieces, place), flat) for place in (2, 3)]
    gradient, values = [pieces.view(widened(pieces, place), groups.split) for place in (0, 1)]
    parts = Gradients(gradient, mul(pieces, sub(pieces, values, mean), scale), scale)
    weight = optional(pieces, call, 4, "weight", (*groups.split[1:3], *[1] * len(groups.inner[1:])))
    batch = (0, *groups.inner[1:])
    makes = [
        lambda: pieces.view(parts.of_input(pieces, weight, groups.inner), groups.shape),
        lambda: pieces.view(parts.of_weight(pieces, batch), groups.shape[1:2]),
        lambda: pieces.view(parts.of_bias(pieces, batch), groups.shape[1:2]),
    ]
    return [make() for make in asked(call, 9, makes)]


_AFFINE = ((1, "weight"), (2, "bias"))


def _upright(shape: Shape) -> Shape:
    """The shape in which a tensor of one number for each channel broadcasts."""
    return (shape[1], *[1] * len(shape[2:]))


# --- Batch norm -------------------------------------------------------------------------------------------------------

_FUNCTIONAL = "aten._native_batch_norm_legit_functional.default"
_UPDATING = "aten._batch_norm_with_update_functional.default"


def _batch_dims(call: OpCall) -> list[int]:
    return [dim for dim in range(len(call.inputs[0].shape)) if dim != 1]


def _batch_names(call: OpCall) -> list[str]:
    return ["n", "c", *named(len(call.inputs[0].shape) - 2, "s")]


def _per_channel(call: OpCall, shape: Shape) -> list[str]:
    """Statistics that an op does not need are empty."""
    return ["c" if shape == call.inputs[0].shape[1:2] else "1"] * len(shape)


class BatchNorm(NamedTuple):
    """One of torch's batch norms: how it says that it trains, where its arguments momentum and eps begin, what it is
    called without writing to the running statistics, and how many results it gives apart from those."""

    trains: Callable[[OpCall], bool]
    numbers: int
    functional: str = _FUNCTIONAL
    gives: int = 3

    def rule(self, call: OpCall) -> OpShardingRule:
        names = _batch_names(call)
        channel = [(name, ["c"]) for name in ("weight", "bias", "running_mean", "running_var")]
        operands = operands_of(call, [("input", names), *channel])
        results = [names, *[_per_channel(call, meta.shape) for meta in call.outputs[1:]]]
        whole = [names[dim] for dim in _batch_dims(call)] if self.trains(call) else []
        text = rule_text(operands, results, {"whole": whole})
        return bind(text, call.shapes, call.result_shapes, lowering=self.lower)

    def lower(self, shard: LocalContext) -> LocalProgram:
        call = shard.call
        builder = LocalBuilder(len(call.inputs))
        writes = len(call.outputs) > self.gives
        if 0 not in shard.operand_shape(0):
            op = self.functional if writes else call.op
            return builder.finish(*builder.calls(op, len(call.outputs), *call.args, **call.kwargs))
        running = [call.arg(3, "running_mean"), call.arg(4, "running_var")] if writes else []
        fresh = [zeros(builder, shard.result_shape(p), call.outputs[p].dtype) for p in range(self.gives)]
        return builder.finish(*fresh, *[builder.call("aten.clone.default", value) for value in running])

    def write(self, pieces: Decomposition, call: OpCall, dims: Sequence[int]) -> list[Input]:
        shape = call.inputs[0].shape
        momentum, eps = call.arg(self.numbers, "momentum"), call.arg(self.numbers + 1, "eps")
        normal = normal_of(pieces, widened(pieces, 0), dims, eps)
        weight, bias = [optional(pieces, call, place, name, _upright(shape)) for place, name in _AFFINE]
        values = affine(pieces, mul(pieces, normal.apart, normal.scale), weight, bias)
        mean, variance, scale = [pieces.squeeze(value, dims) for value in normal[1:]]
        results = [values, mean, scale]
        if len(call.outputs) > self.gives:
            count = math.prod([shape[dim] for dim in dims])
            spread = pieces.each("aten.mul.Scalar", variance, count / (count - 1) if count > 1 else math.nan)
            old = [widened(pieces, call.arg(place, "").index) for place in (3, 4)]
            new = zip(old, (mean, spread), strict=True)
            results += [pieces.each("aten.lerp.Scalar", before, now, momentum) for before, now in new]
        return results

    def entry(self) -> OpEntry:
        if self.gives > 3:
            return OpEntry(self.rule)
        return OpEntry(self.rule, where_cut(lambda call: _batch_dims(call) if self.trains(call) else (), self.write))


def _batch_norm_backward(call: OpCall) -> OpShardingRule:
    names = _batch_names(call)
    channel = [
        (name, _per_channel(call, call.inputs[index].shape) if (index := call.tensor(place, name)) is not None else ())
        for place, name in enumerate(("weight", "running_mean", "running_var", "save_mean", "save_invstd"), 2)
    ]
    rest: list[tuple[str, Sequence[str]]] = [("", ()), ("", ()), ("", ()), ("reserve", ["1"])]
    operands = operands_of(call, [("grad_out", names), ("input", names), *channel, *rest])
    batch = [names[dim] for dim in _batch_dims(call)]
    text = rule_text(
        operands, asked(call, 9, [names, ["c"], ["c"]]), {"whole" if call.arg(7, "train") else "reduce(sum)": batch}
    )
    return bind(text, call.shapes, call.result_shapes, passes=LINEAR, lowering=_lower_batch_norm_backward)


def _lower_batch_norm_backward(shard: LocalContext) -> LocalProgram:
    if 0 not in shard.operand_shape(0):
        return same_op(shard)
    builder = LocalBuilder(len(shard.operands))
    outputs = enumerate(shard.call.outputs)
    return builder.finish(*[zeros(builder, shard.result_shape(place), meta.dtype) for place, meta in outputs])


def _write_batch_norm_backward(pieces: Decomposition, call: OpCall, dims: Sequence[int]) -> list[Input]:
    upright = _upright(call.inputs[0].shape)
    mean, scale = [pieces.view(widened(pieces, call.arg(place, "").index), upright) for place in (5, 6)]
    normal = mul(pieces, sub(pieces, widened(pieces, 1), mean), scale)
    parts = Gradients(widened(pieces, 0), normal, scale)
    weight = optional(pieces, call, 2, "weight", upright)
    makes = [
        lambda: parts.of_input(pieces, weight, dims),
        lambda: parts.of_weight(pieces, dims),
        lambda: parts.of_bias(pieces, dims),
    ]
    return [make() for make in asked(call, 9, makes)]


_BATCH_NORM = BatchNorm(lambda call: call.arg(5, "training"), 6).entry()
_BATCH_NORM_BACKWARD = OpEntry(
    _batch_norm_backward,
    where_cut(lambda call: _batch_dims(call) if call.arg(7, "train") else (), _write_batch_norm_backward),
)

CHANNEL_NORM: dict[str, OpEntry] = {
    "aten.native_group_norm": OpEntry(_group_norm, where_cut(_inside, _write_group_norm)),
    "aten.native_group_norm_backward": OpEntry(_group_norm_backward, where_cut(_inside, _write_group_norm_backward)),
    "aten.native_batch_norm": _BATCH_NORM,
    "aten._native_batch_norm_legit": _BATCH_NORM,
    "aten._native_batch_norm_legit_functional": _BATCH_NORM,
    "aten._native_batch_norm_legit.no_stats": BatchNorm(lambda call: call.arg(3, "training"), 4).entry(),
    "aten._native_batch_norm_legit_no_training": BatchNorm(lambda _: False, 5).entry(),
    "aten._batch_norm_with_update": BatchNorm(lambda _: True, 5, _UPDATING, 4).entry(),
    "aten._batch_norm_with_update_functional": BatchNorm(lambda _: True, 5, _UPDATING, 4).entry(),
    "aten._batch_norm_no_update": BatchNorm(lambda _: False, 5, gives=4).entry(),
    "aten.native_batch_norm_backward": _BATCH_NORM_BACKWARD,
    "aten.batch_norm_backward": _BATCH_NORM_BACKWARD,
}
