"""Fourier transforms. The transformed dims are whole; of several, one is transformed at a time if some are cut."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.signatures import Input, ListArg
from gt.sharding.factors import LINEAR, OpShardingRule, bind
from gt.sharding.op_calls import Expansion, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.dims import dim_names, rule_text, wrap_dim, wrap_dims
from gt.sharding.rules.support.expansion_builder import ExpansionBuilder, contiguous_meta
from gt.sharding.rules.support.local_programs import zeros_if_empty
from gt.sharding.spec import ShardingSpec


def _fft(call: OpCall) -> OpShardingRule:
    names = dim_names(len(call.inputs[0].shape))
    dims = wrap_dims(call.arg(1, "dim"), len(names))
    results = [f"r{dim}" if dim in dims else name for dim, name in enumerate(names)]
    whole = [side[dim] for side in (names, results) for dim in dims]
    text = rule_text([names], [results], {"whole": whole})
    return bind(text, call.shapes, call.result_shapes, passthroughs=LINEAR, lowering=zeros_if_empty())


def _split_dims(call: OpCall, spec: ShardingSpec) -> tuple[list[int], list[int], int] | None:
    """The whole and the cut ones of the transformed dims before the last, and the last one; None if the transform needs
    no expansion."""
    rank = len(call.inputs[0].shape)
    dims = [wrap_dim(dim, rank) for dim in call.arg(1, "dim")]
    cut = [dim for dim in dims if spec.dims[dim]]
    if not cut or len(dims) == 1 or not call.inputs[0].elements:
        return None
    others = dims[:-1]
    return [dim for dim in others if dim not in cut], [dim for dim in others if dim in cut], dims[-1]


def _complex_fft(expansion: ExpansionBuilder, values: Input, dims: Sequence[int], call: OpCall, forward: bool) -> Input:
    if not dims:
        return values
    args = (values, ListArg(tuple(dims)), call.arg(2, "normalization"), forward)
    return expansion.call(
        "aten._fft_c2c.default", args, contiguous_meta(expansion.shape(values), expansion.dtype(values))
    )


def _expand_c2c(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    """One transform per cut dim, so that the axes of the dim being transformed can move to another dim."""
    split = _split_dims(call, specs[0])
    if split is None:
        return None
    whole, cut, last = split
    expansion = ExpansionBuilder(call)
    values, forward = Input(0), call.arg(3, "forward")
    first, then = (whole, [*cut, last]) if specs[0].dims[last] else ([*whole, last], cut)
    for dims in [first, *[[dim] for dim in then]]:
        values = _complex_fft(expansion, values, dims, call, forward)
    return expansion.finish(values)


def _expand_r2c(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    """The last dim, of which the result may have only one half, is transformed first."""
    split = _split_dims(call, specs[0])
    if split is None:
        return None
    whole, cut, last = split
    expansion = ExpansionBuilder(call)
    first = [last] if specs[0].dims[last] else [*whole, last]
    halved = [*call.inputs[0].shape]
    halved[last] = call.outputs[0].shape[last]
    args = (Input(0), ListArg(tuple(first)), *call.args[2:])
    values = expansion.call(call.op, args, contiguous_meta(halved, call.outputs[0].dtype))
    for dims in [[dim for dim in whole if dim not in first], *[[dim] for dim in cut]]:
        values = _complex_fft(expansion, values, dims, call, forward=True)
    return expansion.finish(values)


def _expand_c2r(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    """The last dim, of which the input has only one half, is transformed last."""
    split = _split_dims(call, specs[0])
    if split is None:
        return None
    whole, cut, last = split
    expansion = ExpansionBuilder(call)
    values = Input(0)
    for dims in [whole, *[[dim] for dim in cut]]:
        values = _complex_fft(expansion, values, dims, call, forward=False)
    return expansion.finish(expansion.call(call.op, (values, ListArg((last,)), *call.args[2:]), call.outputs[0]))


FFT: dict[str, OpEntry] = {
    "aten._fft_c2c": OpEntry(_fft, _expand_c2c),
    "aten._fft_r2c": OpEntry(_fft, _expand_r2c),
    "aten._fft_c2r": OpEntry(_fft, _expand_c2r),
}
