"""Reductions: sum, mean, max, any, var, argmax, median and others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from gt.core.signatures import Arg, DType, Input, ListArg, WorkerDevice
from gt.sharding.dtypes import (
    accumulation_dtype,
    cast_keeps_sums,
    highest,
    is_complex,
    is_floating,
    lowest,
    real_dtype,
)
from gt.sharding.factors import OpShardingRule, PartialPassthrough, bind
from gt.sharding.op_calls import Expansion, LocalBuilder, LocalContext, LocalProgram, Lowering, OpCall
from gt.sharding.rules.entry import Expand, OpEntry
from gt.sharding.rules.support.dims import dim_names, is_any_cut, reduced_names, rule_text, wrap_dims
from gt.sharding.rules.support.expansion_builder import ExpansionBuilder, contiguous_meta
from gt.sharding.rules.support.local_programs import cast, same_op
from gt.sharding.spec import ShardingSpec


class ReducedDims(NamedTuple):
    """The dims that a call reduces, and whether the result keeps them with size 1."""

    dims: tuple[int, ...]
    keepdim: bool

    def count(self, call: OpCall) -> int:
        """The number of elements that are reduced to one."""
        return math.prod([call.inputs[0].shape[dim] for dim in self.dims])

    def is_empty(self, shard: LocalContext) -> bool:
        """Whether a worker has no elements to reduce."""
        return not all(shard.operand_shape(0)[dim] for dim in self.dims)


def reduced_dims(call: OpCall, position: int = 1, default: int | None = None) -> ReducedDims:
    """The dims from the argument `dim` at `position`, and `keepdim` after it. No dims means all dims."""
    rank = len(call.inputs[0].shape)
    dims = call.arg(position, "dim", default)
    return ReducedDims(
        wrap_dims(range(rank) if dims in (None, ()) else dims, rank), bool(call.arg(position + 1, "keepdim"))
    )


def reduction_rule(
    call: OpCall,
    reduced: ReducedDims,
    label: str,
    passthroughs: Sequence[PartialPassthrough] = (),
    lowering: Lowering | None = None,
) -> OpShardingRule:
    """The rule of a reduction. `label` is the role of the factors of the reduced dims. Operands but the first have the
    shape of the result."""
    names = dim_names(len(call.inputs[0].shape))
    left = reduced_names(names, reduced.dims, reduced.keepdim)
    operands = [names, *[left] * (len(call.inputs) - 1)]
    text = rule_text(operands, [left] * len(call.outputs), {label: [names[dim] for dim in reduced.dims]})
    return bind(text, call.shapes, call.result_shapes, passthroughs=passthroughs, lowering=lowering)


# --- Reductions that give partial values ------------------------------------------------------------------------------


def fold(kind: str, lowers: Callable[[ReducedDims, str], Lowering] | None = None, passthroughs: bool = True) -> OpEntry:
    """A reduction whose partial results are reduced in the same way. `lowers` makes the lowering, from the reduced dims
    and the dtype of the result."""

    def rule(call: OpCall) -> OpShardingRule:
        reduced = reduced_dims(call)
        source, target = call.inputs[0].dtype, call.outputs[0].dtype
        same = cast_keeps_sums(source, target) if kind == "sum" else source == target
        passing = [PartialPassthrough(frozenset({0}), kind, kind)] if passthroughs and same else []
        lowering = None if lowers is None else lowers(reduced, target)
        return reduction_rule(call, reduced, f"reduce({kind})", passing, lowering)

    return OpEntry(rule)


def _in_dtype(reduced: ReducedDims, dtype: str) -> Lowering:
    """The op with an explicit dtype, that of the result (which may be an `out=` tensor): elements are cast first."""
    return lambda shard: same_op(shard, dtype=DType(dtype))


def _or_lowest(reduced: ReducedDims, dtype: str) -> Lowering:
    return or_identity(reduced, lowest(dtype))


def _or_highest(reduced: ReducedDims, dtype: str) -> Lowering:
    return or_identity(reduced, highest(dtype))


def or_identity(reduced: ReducedDims, identity: Arg) -> Lowering:
    """The op, or the identity on a worker with an empty shard, which the op refuses. An empty whole tensor is left to
    the op."""

    def lower(shard: LocalContext) -> LocalProgram:
        builder = LocalBuilder(1)
        call = shard.call
        if reduced.count(call) and reduced.is_empty(shard):
            return builder.finish(_full_result(builder, shard, identity))
        return builder.finish(builder.call(call.op, *call.args, **call.kwargs))

    return lower


def _full_result(builder: LocalBuilder, shard: LocalContext, value: Arg) -> Input:
    dtype = DType(shard.call.outputs[0].dtype)
    return builder.call("aten.full.default", ListArg(shard.result_shape()), value, dtype=dtype, device=WorkerDevice())


def _any_or_all(bools: str, bytes: str) -> OpEntry:
    """any and all. On bytes they return the bytes 0 and 1; with an empty list of dims they reduce none."""

    def rule(call: OpCall) -> OpShardingRule:
        reduced = ReducedDims((), False) if call.arg(1, "dim") == () else reduced_dims(call)
        kind = bytes if call.outputs[0].dtype == "uint8" else bools
        passing = [PartialPassthrough(frozenset({0}), kind, kind)] if call.inputs[0].dtype == "bool" else []
        return reduction_rule(call, reduced, f"reduce({kind})", passing)

    return OpEntry(rule)


def _mean() -> OpEntry:
    """The local sum divided by the global count: partial sums."""

    def rule(call: OpCall) -> OpShardingRule:
        reduced = reduced_dims(call)
        source, target = call.inputs[0].dtype, call.outputs[0].dtype
        passing = [PartialPassthrough(frozenset({0}))] if cast_keeps_sums(source, target) else []

        def lower(shard: LocalContext) -> LocalProgram:
            builder = LocalBuilder(1)
            args = (Input(0), ListArg(reduced.dims), reduced.keepdim)
            total = builder.call("aten.sum.dim_IntList", *args, dtype=DType(accumulation_dtype(target)))
            mean = builder.call("aten.div.Scalar", total, reduced.count(call))
            return builder.finish(cast(builder, mean, accumulation_dtype(target), target))

        return reduction_rule(call, reduced, "reduce(sum)", passing, lower)

    return OpEntry(rule)


# --- Reductions in several steps --------------------------------------------------------------------------------------


WriteReduction: TypeAlias = Callable[[ExpansionBuilder, OpCall, ReducedDims], tuple[Input, ...]]
"""Expands a reduction; returns its results."""


def whole_dims(write: WriteReduction | None = None, position: int = 1, default: int | None = None) -> OpEntry:
    """A reduction that needs its dims whole, unless `write` expands it."""

    def rule(call: OpCall) -> OpShardingRule:
        return reduction_rule(call, reduced_dims(call, position, default), "whole")

    return OpEntry(rule, write and expand_reduction_where_cut(write, position, default))


def expand_reduction_where_cut(write: WriteReduction, position: int = 1, default: int | None = None) -> Expand:
    def expand(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
        reduced = reduced_dims(call, position, default)
        if not call.inputs[0].elements or not is_any_cut(specs[0], reduced.dims):
            return None
        expansion = ExpansionBuilder(call)
        return expansion.finish(*write(expansion, call, reduced))

    return expand


def _variance(root: bool, with_mean: bool) -> OpEntry:
    """Two passes: the mean, then the squared deviations from it."""

    def write(expansion: ExpansionBuilder, call: OpCall, reduced: ReducedDims) -> tuple[Input, ...]:
        values = expansion.cast(Input(0), accumulation_dtype(call.inputs[0].dtype))
        mean = expansion.reduce("aten.mean.dim", values, reduced.dims)
        apart = expansion.pointwise("aten.sub.Tensor", values, mean)
        squares = expansion.pointwise("aten.pow.Tensor_Scalar", absolute(expansion, apart), 2)
        total = expansion.reduce("aten.sum.dim_IntList", squares, reduced.dims, reduced.keepdim)
        correction = call.kwargs.get("correction")
        args = (reduced.count(call), 1 if correction is None else correction, root)
        spread = expansion.cast(expansion.pointwise("gt.variance", total, *args), call.outputs[0].dtype)
        if not with_mean:
            return (spread,)
        return spread, expansion.cast(expansion.squeeze(mean, reduced.dims, reduced.keepdim), call.outputs[1].dtype)

    return whole_dims(write)


def absolute(expansion: ExpansionBuilder, values: Input) -> Input:
    """Real values with the same absolute values."""
    dtype = expansion.dtype(values)
    return expansion.pointwise("aten.abs.default", values, dtype=real_dtype(dtype)) if is_complex(dtype) else values


def _variance_of_squares(call: OpCall) -> OpShardingRule:
    """gt.variance(squares, count, correction, root): the variance, or its root, from the sum of squared deviations. A
    separate op, since the correction is a scalar that is not known before it runs."""

    def lower(shard: LocalContext) -> LocalProgram:
        builder = LocalBuilder(1)
        _, count, correction, root = call.args
        dtype = DType(call.outputs[0].dtype)
        number = builder.call("aten.full.default", ListArg(()), count, dtype=dtype, device=WorkerDevice())
        degrees = builder.call("aten.clamp_min.default", builder.call("aten.sub.Scalar", number, correction), 0)
        variance = builder.call("aten.div.Tensor", Input(0), degrees)
        return builder.finish(builder.call("aten.sqrt.default", variance) if root else variance)

    return bind("... -> ...", call.shapes, call.result_shapes, lowering=lower)


def _whole_if(applies: Callable[[str], bool], entry: OpEntry) -> OpEntry:
    """A reduction that is not expanded for dtypes for which `applies` is true."""

    def expand(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
        return None if entry.expand is None or applies(call.inputs[0].dtype) else entry.expand(call, specs)

    return OpEntry(entry.rule, expand)


def _logsumexp(expansion: ExpansionBuilder, call: OpCall, reduced: ReducedDims) -> tuple[Input, ...]:
    target = call.outputs[0].dtype
    values = expansion.cast(Input(0), accumulation_dtype(target))
    largest = expansion.reduce("aten.amax.default", values, reduced.dims)
    infinite = expansion.pointwise("aten.isinf.default", largest, dtype="bool")
    largest = expansion.pointwise("aten.masked_fill.Scalar", largest, infinite, 0)
    powers = expansion.pointwise("aten.exp.default", expansion.pointwise("aten.sub.Tensor", values, largest))
    total = expansion.reduce("aten.sum.dim_IntList", powers, reduced.dims)
    result = expansion.pointwise("aten.add.Tensor", expansion.pointwise("aten.log.default", total), largest)
    return (expansion.cast(expansion.squeeze(result, reduced.dims, reduced.keepdim), target),)


def _aminmax(expansion: ExpansionBuilder, call: OpCall, reduced: ReducedDims) -> tuple[Input, ...]:
    ops = ("aten.amin.default", "aten.amax.default")
    return tuple([expansion.reduce(op, Input(0), reduced.dims, reduced.keepdim) for op in ops])


# --- Indices of maxima ------------------------------------------------------------------------------------------------

_NOWHERE = (1 << 63) - 1


def _max_with_index(amax: str, index_op: str, with_values: bool) -> OpEntry:
    """The largest value of all shards, then the smallest index at which a shard has it."""

    def write(expansion: ExpansionBuilder, call: OpCall, reduced: ReducedDims) -> tuple[Input, ...]:
        best = expansion.reduce(amax, Input(0), reduced.dims, reduced.keepdim)
        args = (Input(0), best, ListArg(reduced.dims), reduced.keepdim)
        index = expansion.call(index_op, args, contiguous_meta(expansion.shape(best), "int64"))
        return (best, index) if with_values else (index,)

    # argmax of bools is left to the op, which refuses them
    return whole_dims(write) if with_values else _whole_if(lambda dtype: dtype == "bool", whole_dims(write))


def _index_of_extreme(max_dim: str, argmax: str, amax: str) -> OpEntry:
    """gt.index_of_max(x, best, dims, keepdim): the first index along the dim, or in the flat tensor, at which x equals
    best; _NOWHERE if no element of the shard does."""

    def rule(call: OpCall) -> OpShardingRule:
        reduced = reduced_dims(call, 2)

        def lower(shard: LocalContext) -> LocalProgram:
            builder = LocalBuilder(2)
            if reduced.is_empty(shard):
                return builder.finish(_full_result(builder, shard, _NOWHERE))
            if len(reduced.dims) == 1:
                value, index = builder.call_multi(max_dim, 2, Input(0), reduced.dims[0], reduced.keepdim)
                index = builder.call("aten.add.Scalar", index, shard.operand_box(0)[reduced.dims[0]][0])
            else:
                value = builder.call(amax, Input(0), ListArg(reduced.dims), reduced.keepdim)
                index = _global_index(builder, shard, builder.call(argmax, Input(0), None, reduced.keepdim))
            is_best = builder.call("aten.eq.Tensor", value, Input(1))
            if is_floating(call.inputs[0].dtype):  # a NaN is the maximum, and does not equal itself
                is_best = builder.call("aten.logical_or.default", is_best, builder.call("aten.isnan.default", value))
            loses = builder.call("aten.logical_not.default", is_best)
            return builder.finish(builder.call("aten.masked_fill.Scalar", index, loses, _NOWHERE))

        return reduction_rule(call, reduced, "reduce(min)", (), lower)

    return OpEntry(rule)


def _global_index(builder: LocalBuilder, shard: LocalContext, index: Input) -> Input:
    """The index in the flat tensor of an element with a given index in the flat shard."""
    local, whole = shard.operand_shape(0), shard.call.inputs[0].shape
    if local == whole:
        return index
    result: Input | None = None
    for dim, (start, stop) in enumerate(shard.operand_box(0)):
        along = builder.call("aten.floor_divide.Scalar", index, math.prod(local[dim + 1 :]))
        along = builder.call("aten.remainder.Scalar", along, stop - start)
        along = builder.call("aten.add.Scalar", along, start)
        along = builder.call("aten.mul.Scalar", along, math.prod(whole[dim + 1 :]))
        result = along if result is None else builder.call("aten.add.Tensor", result, along)
    assert result is not None, "a tensor without dims is its own shard"
    return result


def _histogram(call: OpCall) -> OpShardingRule | None:
    """Each shard counts its own elements. No rule if min equals max: the bins then depend on all elements."""
    if call.arg(2, "min", 0) == call.arg(3, "max", 0):
        return None
    names = dim_names(len(call.shapes[0]))
    text = rule_text([names], [["bin"]], {"reduce(sum)": names, "whole": ["bin"]})
    return bind(text, call.shapes, call.result_shapes)


REDUCTION: dict[str, OpEntry] = {
    "aten.sum": fold("sum", _in_dtype),
    "aten.nansum": fold("sum", _in_dtype, passthroughs=False),
    "aten.prod": fold("prod", _in_dtype),
    "aten.count_nonzero": fold("sum", passthroughs=False),
    "aten.amax": fold("max", _or_lowest),
    "aten.amin": fold("min", _or_highest),
    "aten.max.default": fold("max", _or_lowest),
    "aten.min.default": fold("min", _or_highest),
    "aten.any": _any_or_all("or", "max"),
    "aten.all": _any_or_all("and", "min"),
    "aten._is_any_true": _any_or_all("or", "max"),
    "aten._is_all_true": _any_or_all("and", "min"),
    "aten.mean": _mean(),
    "aten.var": _variance(root=False, with_mean=False),
    "aten.std": _variance(root=True, with_mean=False),
    "aten.var_mean": _variance(root=False, with_mean=True),
    "aten.std_mean": _variance(root=True, with_mean=True),
    "aten.histc": OpEntry(_histogram),
    "aten.logsumexp": _whole_if(is_complex, whole_dims(_logsumexp)),  # complex numbers have no maximum
    "aten.aminmax": whole_dims(_aminmax),
    "aten.max.dim": _max_with_index("aten.amax.default", "gt.index_of_max", with_values=True),
    "aten.min.dim": _max_with_index("aten.amin.default", "gt.index_of_min", with_values=True),
    "aten.argmax": _max_with_index("aten.amax.default", "gt.index_of_max", with_values=False),
    "aten.argmin": _max_with_index("aten.amin.default", "gt.index_of_min", with_values=False),
    "aten.median": whole_dims(),
    "aten.nanmedian": whole_dims(),
    "aten.mode": whole_dims(default=-1),
    "aten.kthvalue": whole_dims(position=2, default=-1),
    "gt.variance": OpEntry(_variance_of_squares),
    "gt.index_of_max": _index_of_extreme("aten.max.dim", "aten.argmax.default", "aten.amax.default"),
    "gt.index_of_min": _index_of_extreme("aten.min.dim", "aten.argmin.default", "aten.amin.default"),
}
