"""Weight norm and renorm: norms over all dims of a weight but one."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.signatures import Input
from gt.sharding.factors import LINEAR, OpShardingRule, PartialPassthrough, bind
from gt.sharding.op_calls import OpCall
from gt.sharding.rules.entry import OpEntry, RuleFunction
from gt.sharding.rules.support.dims import dim_names, reduced_names, rule_text, wrap_dim
from gt.sharding.rules.support.expansion_builder import ExpansionBuilder
from gt.sharding.rules.support.local_programs import zeros_if_empty
from gt.sharding.rules.support.statistics import (
    SUM,
    WriteExpansion,
    expand_where_cut,
    mul,
    sub,
    widened_input,
)


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
