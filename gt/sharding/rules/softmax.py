"""Softmax and log softmax. Over a cut dim they are expanded: maximum, exponentials, and their sum."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.signatures import Input
from gt.sharding.factors import LINEAR, OpShardingRule, PartialPassthrough
from gt.sharding.op_calls import OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.dims import whole_dim_rule, wrap_dim
from gt.sharding.rules.support.expansion_builder import ExpansionBuilder
from gt.sharding.rules.support.statistics import SUM, WriteExpansion, expand_where_cut, mul, sub, widened_input


def _softmax(position: int, write: WriteExpansion, passthroughs: Sequence[PartialPassthrough] = ()) -> OpEntry:
    """A softmax; `position` is that of its argument `dim`."""

    def dims(call: OpCall) -> tuple[int, ...]:
        rank = len(call.inputs[0].shape)
        return (wrap_dim(call.arg(position, "dim"), rank),) if rank else ()

    def rule(call: OpCall) -> OpShardingRule:
        return whole_dim_rule(call, dims(call)[0] if dims(call) else 0, passthroughs)

    return OpEntry(rule, expand_where_cut(dims, write))


def _powers(expansion: ExpansionBuilder, dims: Sequence[int]) -> tuple[Input, Input, Input]:
    """The elements minus their maximum, the maximum, and the exponentials of the former."""
    values = widened_input(expansion, 0)
    largest = expansion.reduce("aten.amax.default", values, dims)
    below = sub(expansion, values, largest)
    return below, largest, expansion.pointwise("aten.exp.default", below)


def _write_softmax(expansion: ExpansionBuilder, call: OpCall, dims: Sequence[int]) -> list[Input]:
    _, _, powers = _powers(expansion, dims)
    return [expansion.pointwise("aten.div.Tensor", powers, expansion.reduce(SUM, powers, dims))]


def _write_safe_softmax(expansion: ExpansionBuilder, call: OpCall, dims: Sequence[int]) -> list[Input]:
    """Like softmax, with zeros instead of NaN if all elements are -inf."""
    _, largest, powers = _powers(expansion, dims)
    softmax = expansion.pointwise("aten.div.Tensor", powers, expansion.reduce(SUM, powers, dims))
    empty = expansion.pointwise("aten.eq.Scalar", largest, float("-inf"), dtype="bool")
    return [expansion.pointwise("aten.masked_fill.Scalar", softmax, empty, 0)]


def _write_log_softmax(expansion: ExpansionBuilder, call: OpCall, dims: Sequence[int]) -> list[Input]:
    below, _, powers = _powers(expansion, dims)
    return [sub(expansion, below, expansion.pointwise("aten.log.default", expansion.reduce(SUM, powers, dims)))]


def _write_softmax_backward(expansion: ExpansionBuilder, call: OpCall, dims: Sequence[int]) -> list[Input]:
    gradient, output = widened_input(expansion, 0), widened_input(expansion, 1)
    weighted = mul(expansion, gradient, output)
    return [sub(expansion, weighted, mul(expansion, output, expansion.reduce(SUM, weighted, dims)))]


def _write_log_softmax_backward(expansion: ExpansionBuilder, call: OpCall, dims: Sequence[int]) -> list[Input]:
    gradient, output = widened_input(expansion, 0), widened_input(expansion, 1)
    share = mul(expansion, expansion.pointwise("aten.exp.default", output), expansion.reduce(SUM, gradient, dims))
    return [sub(expansion, gradient, share)]


SOFTMAX: dict[str, OpEntry] = {
    "aten._softmax": _softmax(1, _write_softmax),
    "aten._safe_softmax": _softmax(1, _write_safe_softmax),
    "aten._log_softmax": _softmax(1, _write_log_softmax),
    "aten._softmax_backward_data": _softmax(2, _write_softmax_backward, LINEAR),
    "aten._log_softmax_backward_data": _softmax(2, _write_log_softmax_backward, LINEAR),
}
