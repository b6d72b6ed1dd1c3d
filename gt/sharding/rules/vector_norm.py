"""Vector norms, and the distance of two tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gt.core.signatures import Input, Scalar
from gt.sharding.dtypes import (
    accumulation_dtype,
)
from gt.sharding.factors import OpShardingRule, bind
from gt.sharding.op_calls import Expansion, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.reduction import (
    ReducedDims,
    absolute,
    expand_reduction_where_cut,
    or_identity,
    reduced_dims,
    reduction_rule,
)
from gt.sharding.rules.support.dims import dim_names, rule_text
from gt.sharding.rules.support.expansion_builder import ExpansionBuilder
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
