"""Group norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from gt.core.signatures import Input
from gt.sharding.boxes import Shape
from gt.sharding.factors import LINEAR, OpShardingRule, bind
from gt.sharding.op_calls import LocalContext, LocalProgram, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.dims import dim_names, operand_names, rule_text
from gt.sharding.rules.support.expansion_builder import ExpansionBuilder
from gt.sharding.rules.support.local_programs import same_op, zeros_if_empty
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
