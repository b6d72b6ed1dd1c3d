"""Vector norms, weight norm and renorm, and distances: of two tensors, and between the rows of matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gt.core.signatures import DType, Input, ListArg, MemoryFormat, Scalar, WorkerDevice
from gt.sharding.dtypes import accumulation_dtype
from gt.sharding.factors import LINEAR, OpShardingRule, PartialPassthrough, bind
from gt.sharding.op_calls import Expansion, LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.entry import OpEntry, RuleFunction
from gt.sharding.rules.matmul import linear_in, product_entry
from gt.sharding.rules.reduction import (
    ReducedDims,
    absolute,
    expand_reduction_where_cut,
    or_identity,
    reduced_dims,
    reduction_rule,
)
from gt.sharding.rules.support.dims import dim_names, reduced_names, rule_text, wrap_dim
from gt.sharding.rules.support.expansion_builder import ExpansionBuilder
from gt.sharding.rules.support.local_programs import same_op, zeros_if_empty
from gt.sharding.rules.support.statistics import SUM, WriteExpansion, expand_where_cut, mul, sub, widened_input
from gt.sharding.spec import ShardingSpec

_NORM_KINDS = {math.inf: ("max", 0.0), -math.inf: ("min", math.inf), 0.0: ("sum", 0.0), 1.0: ("sum", 0.0)}
"""For orders whose norms of shards are partial values: the reduction, and the norm of an empty tensor."""


def _norm(name: str) -> OpEntry:
    """A vector norm; `name` is that of its argument for the order. If the order is a scalar that changes from call to
    call, the dims have to be whole."""

    def rule(call: OpCall) -> OpShardingRule:
        reduced = reduced_dims(call, 2)
        order = _order(call, name)
        if order not in _NORM_KINDS:
            return reduction_rule(call, reduced, "whole")
        kind, identity = _NORM_KINDS[order]
        return reduction_rule(call, reduced, f"reduce({kind})", (), or_identity(reduced, identity))

    def write(expansion: ExpansionBuilder, call: OpCall, reduced: ReducedDims) -> tuple[Input, ...]:
        order, target = _order(call, name), call.outputs[0].dtype
        assert order, "expanded for known powers only"
        values = expansion.cast(absolute(expansion, Input(0)), accumulation_dtype(target))
        if order != 2:
            values = expansion.pointwise("aten.abs.default", values)
        powers = expansion.pointwise("aten.pow.Tensor_Scalar", values, order)
        total = expansion.reduce("aten.sum.dim_IntList", powers, reduced.dims, reduced.keepdim)
        return (expansion.cast(expansion.pointwise("aten.pow.Tensor_Scalar", total, 1 / order), target),)

    expand = expand_reduction_where_cut(write, 2)

    def expand_norm(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
        order = _order(call, name)
        return None if order is None or order in _NORM_KINDS else expand(call, specs)

    return OpEntry(rule, expand_norm)


def _distance(call: OpCall) -> OpShardingRule:
    names = dim_names(max(map(len, call.shapes)))
    operands = [names[len(names) - len(shape) :] for shape in call.shapes]
    return bind(rule_text(operands, [[]], {"whole": names}), call.shapes, call.result_shapes)


def _expand_distance(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    """The norm of the difference of two tensors."""
    if not any(spec.axes for spec in specs) or len(call.inputs) < 2:
        return None
    expansion = ExpansionBuilder(call)
    difference = expansion.pointwise("aten.sub.Tensor", Input(0), Input(1))
    norm = ("aten.linalg_vector_norm.default", (difference, call.arg(2, "p", 2)), call.outputs[0])
    return expansion.finish(expansion.call(*norm))


def _order(call: OpCall, name: str) -> float | None:
    """The order of a norm; None if it is not known before the op runs."""
    order = call.arg(1, name, 2.0)
    return None if isinstance(order, Scalar) else 2.0 if order is None else float(order)


VECTOR_NORM: dict[str, OpEntry] = {
    "aten.norm": _norm("p"),
    "aten.linalg_vector_norm": _norm("ord"),
    "aten.dist": OpEntry(_distance, _expand_distance),
}


def _other_dims(call: OpCall, position: int) -> tuple[int, ...]:
    """All dims but the one that the argument `dim` names."""
    rank = len(call.inputs[0].shape)
    kept = wrap_dim(call.arg(position, "dim", 0), rank)
    return tuple([dim for dim in range(rank) if dim != kept])


def _whole_but_one_rule(position: int, passthroughs: Sequence[PartialPassthrough] = ()) -> RuleFunction:
    """The rule of an op that needs all dims but one whole; `position` is that of the argument `dim`. In some of its
    tensors the whole dims have size 1."""

    def rule(call: OpCall) -> OpShardingRule:
        names = dim_names(len(call.inputs[0].shape))
        whole = [names[dim] for dim in _other_dims(call, position)]
        tensors = [reduced_names(names, _other_dims(call, position), keepdim=True), names]
        full = call.inputs[0].shape
        operands, results = [[tensors[meta.shape == full] for meta in metas] for metas in (call.inputs, call.outputs)]
        text = rule_text(operands, results, {"whole": whole})
        return bind(text, call.shapes, call.result_shapes, passthroughs=passthroughs, lowering=zeros_if_empty())

    return rule


def _write_weight_norm(expansion: ExpansionBuilder, call: OpCall, dims: Sequence[int]) -> list[Input]:
    values, size = widened_input(expansion, 0), widened_input(expansion, 1)
    squares = expansion.reduce(SUM, expansion.pointwise("aten.pow.Tensor_Scalar", values, 2), dims)
    norm = expansion.pointwise("aten.sqrt.default", squares)
    return [mul(expansion, values, expansion.pointwise("aten.div.Tensor", size, norm)), norm]


def _write_weight_norm_backward(expansion: ExpansionBuilder, call: OpCall, dims: Sequence[int]) -> list[Input]:
    gradient, values, size, norm = [widened_input(expansion, position) for position in range(4)]
    grad_norm = expansion.pointwise(
        "aten.div.Tensor", expansion.reduce(SUM, mul(expansion, gradient, values), dims), norm
    )
    inner = sub(expansion, gradient, mul(expansion, values, expansion.pointwise("aten.div.Tensor", grad_norm, norm)))
    return [mul(expansion, inner, expansion.pointwise("aten.div.Tensor", size, norm)), grad_norm]


def _weight_norm(position: int, write: WriteExpansion, passthroughs: Sequence[PartialPassthrough] = ()) -> OpEntry:
    return OpEntry(
        _whole_but_one_rule(position, passthroughs), expand_where_cut(lambda call: _other_dims(call, position), write)
    )


WEIGHT_NORM: dict[str, OpEntry] = {
    "aten._weight_norm_interface": _weight_norm(2, _write_weight_norm),
    "aten._weight_norm_interface_backward": _weight_norm(4, _write_weight_norm_backward, LINEAR),
    "aten.renorm": OpEntry(_whole_but_one_rule(2)),
}


def _pairs(call: OpCall) -> OpShardingRule:
    """pdist: one distance for each pair of rows, the pairs of the first row first."""
    return bind("1 1 -> p", call.shapes, call.result_shapes, lowering=_lower_pairs)


def _lower_pairs(shard: LocalContext) -> LocalProgram:
    rows = shard.call.inputs[0].shape[0]
    ((start, stop),) = shard.result_box()
    if (start, stop) == (0, shard.call.outputs[0].shape[0]):
        return same_op(shard)
    builder = LocalBuilder(1)
    pairs = builder.call("aten.triu_indices.default", rows, rows, 1, dtype=DType("int64"), device=WorkerDevice())
    pairs = builder.call("aten.slice.Tensor", pairs, 1, start, stop)
    sides = [builder.call("aten.select.int", pairs, 0, side) for side in (0, 1)]
    one, other = [builder.call("aten.index_select.default", Input(0), 0, side) for side in sides]
    difference = builder.call("aten.sub.Tensor", one, other)
    return builder.finish(
        builder.call("aten.linalg_vector_norm.default", difference, shard.call.arg(1, "p", 2.0), ListArg((1,)))
    )


def _pairs_backward(call: OpCall) -> OpShardingRule | None:
    """The gradient of each column depends on that column and the distances only."""
    return bind(
        "1, 1 m, 1 -> 1 m",
        call.shapes,
        call.result_shapes,
        passthroughs=linear_in((0,)),
        lowering=_lower_pairs_backward,
    )


def _lower_pairs_backward(shard: LocalContext) -> LocalProgram:
    """The op on a contiguous copy of the matrix, which its kernel requires."""
    builder = LocalBuilder(3)
    rows = builder.call("aten.clone.default", Input(1), memory_format=MemoryFormat("contiguous_format"))
    return builder.finish(builder.call(shard.call.op, Input(0), rows, shard.call.arg(2, "p"), Input(2)))


DISTANCE: dict[str, OpEntry] = {
    "aten._cdist_forward": product_entry("... i m, ... j m -> ... i j | whole: m"),
    "aten._euclidean_dist": product_entry("... i m, ... j m -> ... i j | whole: m"),
    "aten._cdist_backward": product_entry(
        "... i j, ... i m, ... j m, ... i j -> ... i m | reduce(sum): j", *linear_in((0,)), lowering=zeros_if_empty()
    ),
    "aten._pdist_forward": OpEntry(_pairs),
    "aten._pdist_backward": OpEntry(_pairs_backward),
}
