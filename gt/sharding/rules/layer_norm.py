"""Layer norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gt.core.signatures import Input
from gt.sharding.factors import LINEAR, OpShardingRule, bind
from gt.sharding.op_calls import OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.dims import operand_names, rule_text
from gt.sharding.rules.support.expansion_builder import ExpansionBuilder
from gt.sharding.rules.support.statistics import (
    NormGradients,
    affine,
    by_output_mask,
    expand_where_cut,
    moments,
    mul,
    optional_input,
    sub,
    widened_input,
)


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
