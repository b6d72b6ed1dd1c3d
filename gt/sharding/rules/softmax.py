"""Softmax and its kin: the largest, and the sum of powers."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.signatures import Input
from gt.sharding.factors import OpShardingRule, PartialPassthrough
from gt.sharding.op_calls import OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.decomposition import Decomposition
from gt.sharding.rules.support.dims import whole_along, wrap
from gt.sharding.rules.support.statistics import LINEAR, SUM, Write, mul, sub, where_cut, widened


def _softmax(place: int, write: Write, passes: Sequence[PartialPassthrough] = ()) -> OpEntry:
    """`place` is that of the argument `dim`."""

    def dims(call: OpCall) -> tuple[int, ...]:
        rank = len(call.inputs[0].shape)
        return (wrap(call.arg(place, "dim"), rank),) if rank else ()

    def rule(call: OpCall) -> OpShardingRule:
        return whole_along(call, dims(call)[0] if dims(call) else 0, passes)

    return OpEntry(rule, where_cut(dims, write))


def _powers(pieces: Decomposition, dims: Sequence[int]) -> tuple[Input, Input, Input]:
    """What the elements are below the largest, the largest itself, and their powers of e."""
    values = widened(pieces, 0)
    largest = pieces.over("aten.amax.default", values, dims)
    below = sub(pieces, values, largest)
    return below, largest, pieces.each("aten.exp.default", below)


def _write_softmax(pieces: Decomposition, call: OpCall, dims: Sequence[int]) -> list[Input]:
    _, _, powers = _powers(pieces, dims)
    return [pieces.each("aten.div.Tensor", powers, pieces.over(SUM, powers, dims))]


def _write_safe_softmax(pieces: Decomposition, call: OpCall, dims: Sequence[int]) -> list[Input]:
    """Zeros instead of NaN where nothing is more than -inf."""
    _, largest, powers = _powers(pieces, dims)
    softmax = pieces.each("aten.div.Tensor", powers, pieces.over(SUM, powers, dims))
    empty = pieces.each("aten.eq.Scalar", largest, float("-inf"), dtype="bool")
    return [pieces.each("aten.masked_fill.Scalar", softmax, empty, 0)]


def _write_log_softmax(pieces: Decomposition, call: OpCall, dims: Sequence[int]) -> list[Input]:
    below, _, powers = _powers(pieces, dims)
    return [sub(pieces, below, pieces.each("aten.log.default", pieces.over(SUM, powers, dims)))]


def _write_softmax_backward(pieces: Decomposition, call: OpCall, dims: Sequence[int]) -> list[Input]:
    gradient, output = widened(pieces, 0), widened(pieces, 1)
    weighted = mul(pieces, gradient, output)
    return [sub(pieces, weighted, mul(pieces, output, pieces.over(SUM, weighted, dims)))]


def _write_log_softmax_backward(pieces: Decomposition, call: OpCall, dims: Sequence[int]) -> list[Input]:
    gradient, output = widened(pieces, 0), widened(pieces, 1)
    share = mul(pieces, pieces.each("aten.exp.default", output), pieces.over(SUM, gradient, dims))
    return [sub(pieces, gradient, share)]


SOFTMAX: dict[str, OpEntry] = {
    "aten._softmax": _softmax(1, _write_softmax),
    "aten._safe_softmax": _softmax(1, _write_safe_softmax),
    "aten._log_softmax": _softmax(1, _write_log_softmax),
    "aten._softmax_backward_data": _softmax(2, _write_softmax_backward, LINEAR),
    "aten._log_softmax_backward_data": _softmax(2, _write_log_softmax_backward, LINEAR),
}
