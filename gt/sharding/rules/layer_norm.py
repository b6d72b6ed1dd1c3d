"""Layer norm, and norms of weights: the normalised dims need not be whole, only their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gt.core.signatures import Input
from gt.sharding.factors import OpShardingRule, PartialPassthrough, bind
from gt.sharding.op_calls import OpCall
from gt.sharding.rules.entry import OpEntry, Rule
from gt.sharding.rules.support.decomposition import Decomposition
from gt.sharding.rules.support.dims import named, operands_of, rule_text, without, wrap
from gt.sharding.rules.support.local_programs import unless_empty
from gt.sharding.rules.support.statistics import (
    LINEAR,
    SUM,
    Gradients,
    Write,
    affine,
    asked,
    mul,
    normal_of,
    optional,
    sub,
    where_cut,
    widened,
)


class Layers(NamedTuple):
    """The dims of a layer norm: those before, and the normalised ones."""

    batch: tuple[int, ...]
    normal: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        return [f"b{dim}" for dim in self.batch] + self.weight

    @property
    def weight(self) -> list[str]:
        return [f"n{dim}" for dim in self.normal]

    @property
    def statistics(self) -> list[str]:
        return [f"b{dim}" for dim in self.batch] + ["1"] * len(self.normal)


def _layers(call: OpCall, place: int) -> Layers:
    rank = len(call.inputs[0].shape)
    first = rank - len(call.arg(place, "normalized_shape"))
    return Layers(tuple(range(first)), tuple(range(first, rank)))


def _layer_norm(call: OpCall) -> OpShardingRule:
    dims = _layers(call, 1)
    operands = operands_of(call, [("input", dims.names), ("", ()), ("weight", dims.weight), ("bias", dims.weight)])
    text = rule_text(operands, [dims.names, dims.statistics, dims.statistics], {"whole": dims.weight})
    return bind(text, call.shapes, call.result_shapes)


def _write_layer_norm(pieces: Decomposition, call: OpCall, dims: Sequence[int]) -> list[Input]:
    normal = normal_of(pieces, widened(pieces, 0), dims, call.arg(4, "eps"))
    weight, bias = optional(pieces, call, 2, "weight"), optional(pieces, call, 3, "bias")
    values = affine(pieces, mul(pieces, normal.apart, normal.scale), weight, bias)
    return [values, normal.mean, normal.scale]


def _layer_norm_backward(call: OpCall) -> OpShardingRule:
    dims = _layers(call, 2)
    names, weight, statistics = dims.names, dims.weight, dims.statistics
    operands = operands_of(
        call,
        [
            ("grad_out", names), ("input", names), ("", ()), ("mean", statistics), ("rstd", statistics),
            ("weight", weight), ("bias", weight),
        ],
    )  # fmt: skip
    results = asked(call, 7, [names, weight, weight])
    classes = {"reduce(sum)": [f"b{dim}" for dim in dims.batch], "whole": weight}
    return bind(rule_text(operands, results, classes), call.shapes, call.result_shapes, passes=LINEAR)


def _write_layer_norm_backward(pieces: Decomposition, call: OpCall, dims: Sequence[int]) -> list[Input]:
    batch = _layers(call, 2).batch
    scale, weight = widened(pieces, 3), optional(pieces, call, 5, "weight")
    normal = mul(pieces, sub(pieces, widened(pieces, 1), widened(pieces, 2)), scale)
    parts = Gradients(widened(pieces, 0), normal, scale)
    makes = [
        lambda: parts.of_input(pieces, weight, dims),
        lambda: parts.of_weight(pieces, batch),
        lambda: parts.of_bias(pieces, batch),
    ]
    return [make() for make in asked(call, 7, makes)]


# --- Weight norm ------------------------------------------------------------------------------------------------------


def _others(call: OpCall, place: int) -> tuple[int, ...]:
    """All dims but the one that is named."""
    rank = len(call.inputs[0].shape)
    kept = wrap(call.arg(place, "dim", 0), rank)
    return tuple([dim for dim in range(rank) if dim != kept])


def _apart_from(place: int, passes: Sequence[PartialPassthrough] = ()) -> Rule:
    """Ops that need all dims but one whole; `place` is that of the argument that names it. Of some tensors the others
    have the size one."""

    def rule(call: OpCall) -> OpShardingRule:
        names = named(len(call.inputs[0].shape))
        whole = [names[dim] for dim in _others(call, place)]
        tensors = [without(names, _others(call, place), keepdim=True), names]
        full = call.inputs[0].shape
        operands, results = [[tensors[meta.shape == full] for meta in metas] for metas in (call.inputs, call.outputs)]
        text = rule_text(operands, results, {"whole": whole})
        return bind(text, call.shapes, call.result_shapes, passes=passes, lowering=unless_empty())

    return rule


def _write_weight_norm(pieces: Decomposition, call: OpCall, dims: Sequence[int]) -> list[Input]:
    values, size = widened(pieces, 0), widened(pieces, 1)
    squares = pieces.over(SUM, pieces.each("aten.pow.Tensor_Scalar", values, 2), dims)
    norm = pieces.each("aten.sqrt.default", squares)
    return [mul(pieces, values, pieces.each("aten.div.Tensor", size, norm)), norm]


def _write_weight_norm_backward(pieces: Decomposition, call: OpCall, dims: Sequence[int]) -> list[Input]:
    gradient, values, size, norm = [widened(pieces, place) for place in range(4)]
    along = pieces.each("aten.div.Tensor", pieces.over(SUM, mul(pieces, gradient, values), dims), norm)
    inner = sub(pieces, gradient, mul(pieces, values, pieces.each("aten.div.Tensor", along, norm)))
    return [mul(pieces, inner, pieces.each("aten.div.Tensor", size, norm)), along]


def _weight_norm(place: int, write: Write, passes: Sequence[PartialPassthrough] = ()) -> OpEntry:
    return OpEntry(_apart_from(place, passes), where_cut(lambda call: _others(call, place), write))


LAYER_NORM: dict[str, OpEntry] = {
    "aten.native_layer_norm": OpEntry(_layer_norm, where_cut(lambda call: _layers(call, 1).normal, _write_layer_norm)),
    "aten.native_layer_norm_backward": OpEntry(
        _layer_norm_backward, where_cut(lambda call: _layers(call, 2).normal, _write_layer_norm_backward)
    ),
    "aten._weight_norm_interface": _weight_norm(2, _write_weight_norm),
    "aten._weight_norm_interface_backward": _weight_norm(4, _write_weight_norm_backward, LINEAR),
    "aten.renorm": OpEntry(_apart_from(2)),
}
