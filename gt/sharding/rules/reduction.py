"""Ops that reduce dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from gt.core.signatures import Arg, DType, Input, ListArg, Scalar, WorkerDevice
from gt.sharding.factors import OpShardingRule, PartialPassthrough, bind
from gt.sharding.op_calls import Expansion, LocalBuilder, LocalContext, LocalProgram, Lowering, OpCall
from gt.sharding.rules.entry import Expand, OpEntry
from gt.sharding.rules.support.decomposition import Decomposition, meta_of
from gt.sharding.rules.support.dims import dims_cut, named, rule_text, without, wrap_all
from gt.sharding.rules.support.dtypes import adds_up, highest, is_complex, is_floating, lowest, real, wide
from gt.sharding.rules.support.local_programs import cast, same_op
from gt.sharding.spec import ShardingSpec


class Reduced(NamedTuple):
    """What a reduction reduces."""

    dims: tuple[int, ...]
    keepdim: bool

    def count(self, call: OpCall) -> int:
        """How many elements make one."""
        return math.prod([call.inputs[0].shape[dim] for dim in self.dims])

    def is_empty(self, shard: LocalContext) -> bool:
        """Whether a worker has nothing to reduce."""
        return not all(shard.operand_shape(0)[dim] for dim in self.dims)


def reduced(call: OpCall, place: int = 1, default: int | None = None) -> Reduced:
    """Read from the arguments `dim`, at the given place, and `keepdim` after it. No dims are all of them."""
    rank = len(call.inputs[0].shape)
    dims = call.arg(place, "dim", default)
    return Reduced(wrap_all(range(rank) if dims in (None, ()) else dims, rank), bool(call.arg(place + 1, "keepdim")))


def reduction_rule(
    call: OpCall, over: Reduced, label: str, passes: Sequence[PartialPassthrough] = (), lowering: Lowering | None = None
) -> OpShardingRule:
    """`label` is the class of the reduced dims. Further operands have the shape of the result."""
    names = named(len(call.inputs[0].shape))
    left = without(names, over.dims, over.keepdim)
    operands = [names, *[left] * (len(call.inputs) - 1)]
    text = rule_text(operands, [left] * len(call.outputs), {label: [names[dim] for dim in over.dims]})
    return bind(text, call.shapes, call.result_shapes, passes=passes, lowering=lowering)


# --- Reductions that give partial values ------------------------------------------------------------------------------


def fold(kind: str, lowers: Callable[[Reduced, str], Lowering] | None = None, passes: bool = True) -> OpEntry:
    """A reduction whose partial results are reduced in the same way. `lowers` gives the lowering, by what is reduced
    and the dtype of the result."""

    def rule(call: OpCall) -> OpShardingRule:
        over = reduced(call)
        source, target = call.inputs[0].dtype, call.outputs[0].dtype
        same = adds_up(source, target) if kind == "sum" else source == target
        passing = [PartialPassthrough(frozenset({0}), kind, kind)] if passes and same else []
        lowering = None if lowers is None else lowers(over, target)
        return reduction_rule(call, over, f"reduce({kind})", passing, lowering)

    return OpEntry(rule)


def _in_dtype(over: Reduced, dtype: str) -> Lowering:
    """With the dtype of the result, which may be that of a tensor given as `out=`: elements become it first."""
    return lambda shard: same_op(shard, dtype=DType(dtype))


def _or_lowest(over: Reduced, dtype: str) -> Lowering:
    return _or_identity(over, lowest(dtype))


def _or_highest(over: Reduced, dtype: str) -> Lowering:
    return _or_identity(over, highest(dtype))


def _or_identity(over: Reduced, identity: Arg) -> Lowering:
    """An empty shard gives the identity, as the op refuses it. If there is nothing at all, the op is asked."""

    def lower(shard: LocalContext) -> LocalProgram:
        builder = LocalBuilder(1)
        call = shard.call
        if over.count(call) and over.is_empty(shard):
            return builder.finish(_filled(builder, shard, identity))
        return builder.finish(builder.call(call.op, *call.args, **call.kwargs))

    return lower


def _filled(builder: LocalBuilder, shard: LocalContext, value: Arg) -> Input:
    dtype = DType(shard.call.outputs[0].dtype)
    return builder.call("aten.full.default", ListArg(shard.result_shape()), value, dtype=dtype, device=WorkerDevice())


def _truth(bools: str, bytes: str) -> OpEntry:
    """any and all; on bytes they give the bytes 0 and 1. Of an empty list of dims they reduce none."""

    def rule(call: OpCall) -> OpShardingRule:
        over = Reduced((), False) if call.arg(1, "dim") == () else reduced(call)
        kind = bytes if call.outputs[0].dtype == "uint8" else bools
        passing = [PartialPassthrough(frozenset({0}), kind, kind)] if call.inputs[0].dtype == "bool" else []
        return reduction_rule(call, over, f"reduce({kind})", passing)

    return OpEntry(rule)


def _mean() -> OpEntry:
    """The local sum over the global count: partial sums."""

    def rule(call: OpCall) -> OpShardingRule:
        over = reduced(call)
        source, target = call.inputs[0].dtype, call.outputs[0].dtype
        passing = [PartialPassthrough(frozenset({0}))] if adds_up(source, target) else []

        def lower(shard: LocalContext) -> LocalProgram:
            builder = LocalBuilder(1)
            args = (Input(0), ListArg(over.dims), over.keepdim)
            total = builder.call("aten.sum.dim_IntList", *args, dtype=DType(wide(target)))
            mean = builder.call("aten.div.Scalar", total, over.count(call))
            return builder.finish(cast(builder, mean, wide(target), target))

        return reduction_rule(call, over, "reduce(sum)", passing, lower)

    return OpEntry(rule)


# --- Reductions of several steps --------------------------------------------------------------------------------------


Write: TypeAlias = Callable[[Decomposition, OpCall, Reduced], tuple[Input, ...]]
"""Writes a reduction as several ops; gives its results."""


def whole_dims(write: Write | None = None, place: int = 1, default: int | None = None) -> OpEntry:
    """A reduction that needs its dims whole, unless it is written as several."""

    def rule(call: OpCall) -> OpShardingRule:
        return reduction_rule(call, reduced(call, place, default), "whole")

    return OpEntry(rule, write and _where_cut(write, place, default))


def _where_cut(write: Write, place: int = 1, default: int | None = None) -> Expand:
    def expand(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
        over = reduced(call, place, default)
        if not call.inputs[0].elements or not dims_cut(specs[0], over.dims):
            return None
        pieces = Decomposition(call)
        return pieces.finish(*write(pieces, call, over))

    return expand


def _variance(root: bool, with_mean: bool) -> OpEntry:
    """Two passes: the mean, then the squares of what differs from it."""

    def write(pieces: Decomposition, call: OpCall, over: Reduced) -> tuple[Input, ...]:
        values = pieces.cast(Input(0), wide(call.inputs[0].dtype))
        mean = pieces.over("aten.mean.dim", values, over.dims)
        apart = pieces.each("aten.sub.Tensor", values, mean)
        squares = pieces.each("aten.pow.Tensor_Scalar", _absolute(pieces, apart), 2)
        total = pieces.over("aten.sum.dim_IntList", squares, over.dims, over.keepdim)
        correction = call.kwargs.get("correction")
        args = (over.count(call), 1 if correction is None else correction, root)
        spread = pieces.cast(pieces.each("gt.variance", total, *args), call.outputs[0].dtype)
        if not with_mean:
            return (spread,)
        return spread, pieces.cast(pieces.squeeze(mean, over.dims, over.keepdim), call.outputs[1].dtype)

    return whole_dims(write)


def _absolute(pieces: Decomposition, values: Input) -> Input:
    """Real numbers whose squares are those of the absolute values."""
    dtype = pieces.dtype(values)
    return pieces.each("aten.abs.default", values, dtype=real(dtype)) if is_complex(dtype) else values


def _variance_of_squares(call: OpCall) -> OpShardingRule:
    """gt.variance(total of squares, count, correction, root). A number of its own, as the correction is not known
    before it runs."""

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
    """A reduction that needs whole dims for some dtypes."""

    def expand(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
        return None if entry.expand is None or applies(call.inputs[0].dtype) else entry.expand(call, specs)

    return OpEntry(entry.rule, expand)


def _logsumexp(pieces: Decomposition, call: OpCall, over: Reduced) -> tuple[Input, ...]:
    target = call.outputs[0].dtype
    values = pieces.cast(Input(0), wide(target))
    largest = pieces.over("aten.amax.default", values, over.dims)
    infinite = pieces.each("aten.isinf.default", largest, dtype="bool")
    largest = pieces.each("aten.masked_fill.Scalar", largest, infinite, 0)
    powers = pieces.each("aten.exp.default", pieces.each("aten.sub.Tensor", values, largest))
    total = pieces.over("aten.sum.dim_IntList", powers, over.dims)
    result = pieces.each("aten.add.Tensor", pieces.each("aten.log.default", total), largest)
    return (pieces.cast(pieces.squeeze(result, over.dims, over.keepdim), target),)


def _aminmax(pieces: Decomposition, call: OpCall, over: Reduced) -> tuple[Input, ...]:
    ops = ("aten.amin.default", "aten.amax.default")
    return tuple([pieces.over(op, Input(0), over.dims, over.keepdim) for op in ops])


# --- Norms ------------------------------------------------------------------------------------------------------------

_NORM_KINDS = {math.inf: ("max", 0.0), -math.inf: ("min", math.inf), 0.0: ("sum", 0.0), 1.0: ("sum", 0.0)}
"""Orders whose norms of shards are partial norms, and the norm of nothing."""


def _norm(name: str) -> OpEntry:
    """A vector norm; `name` is what the op calls the order. Where the order changes from call to call, it is whole."""

    def rule(call: OpCall) -> OpShardingRule:
        over = reduced(call, 2)
        order = _order(call, name)
        if order not in _NORM_KINDS:
            return reduction_rule(call, over, "whole")
        kind, identity = _NORM_KINDS[order]
        return reduction_rule(call, over, f"reduce({kind})", (), _or_identity(over, identity))

    def write(pieces: Decomposition, call: OpCall, over: Reduced) -> tuple[Input, ...]:
        order, target = _order(call, name), call.outputs[0].dtype
        assert order, "expanded for known powers only"
        values = pieces.cast(_absolute(pieces, Input(0)), wide(target))
        if order != 2:
            values = pieces.each("aten.abs.default", values)
        powers = pieces.each("aten.pow.Tensor_Scalar", values, order)
        total = pieces.over("aten.sum.dim_IntList", powers, over.dims, over.keepdim)
        return (pieces.cast(pieces.each("aten.pow.Tensor_Scalar", total, 1 / order), target),)

    expand = _where_cut(write, 2)

    def expand_norm(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
        order = _order(call, name)
        return None if order is None or order in _NORM_KINDS else expand(call, specs)

    return OpEntry(rule, expand_norm)


def _distance(call: OpCall) -> OpShardingRule:
    names = named(max(map(len, call.shapes)))
    operands = [names[len(names) - len(shape) :] for shape in call.shapes]
    return bind(rule_text(operands, [[]], {"whole": names}), call.shapes, call.result_shapes)


def _expand_distance(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    """The norm of the difference."""
    if not any(spec.axes for spec in specs) or len(call.inputs) < 2:
        return None
    pieces = Decomposition(call)
    difference = pieces.each("aten.sub.Tensor", Input(0), Input(1))
    norm = ("aten.linalg_vector_norm.default", (difference, call.arg(2, "p", 2)), call.outputs[0])
    return pieces.finish(pieces.one(*norm))


def _order(call: OpCall, name: str) -> float | None:
    """The order of a norm; None where it is not known before the op runs."""
    order = call.arg(1, name, 2.0)
    return None if isinstance(order, Scalar) else 2.0 if order is None else float(order)


# --- Where the largest is ---------------------------------------------------------------------------------------------

_NOWHERE = (1 << 63) - 1


def _extreme(amax: str, place: str, with_values: bool) -> OpEntry:
    """The largest value of all shards, then the smallest index at which some shard has it."""

    def write(pieces: Decomposition, call: OpCall, over: Reduced) -> tuple[Input, ...]:
        best = pieces.over(amax, Input(0), over.dims, over.keepdim)
        args = (Input(0), best, ListArg(over.dims), over.keepdim)
        index = pieces.one(place, args, meta_of(pieces.shape(best), "int64"))
        return (best, index) if with_values else (index,)

    # torch gives no index alone of truth values: the op is asked, and refuses
    return whole_dims(write) if with_values else _whole_if(lambda dtype: dtype == "bool", whole_dims(write))


def _place(max_dim: str, argmax: str, amax: str) -> OpEntry:
    """gt.place_of_max(x, best, dims, keepdim): the first index of the dim, or of the whole tensor, where x is best;
    one that is larger than any where no element of the shard is."""

    def rule(call: OpCall) -> OpShardingRule:
        over = reduced(call, 2)

        def lower(shard: LocalContext) -> LocalProgram:
            builder = LocalBuilder(2)
            if over.is_empty(shard):
                return builder.finish(_filled(builder, shard, _NOWHERE))
            if len(over.dims) == 1:
                value, index = builder.calls(max_dim, 2, Input(0), over.dims[0], over.keepdim)
                index = builder.call("aten.add.Scalar", index, shard.operand_box(0)[over.dims[0]][0])
            else:
                value = builder.call(amax, Input(0), ListArg(over.dims), over.keepdim)
                index = _global_index(builder, shard, builder.call(argmax, Input(0), None, over.keepdim))
            is_best = builder.call("aten.eq.Tensor", value, Input(1))
            if is_floating(call.inputs[0].dtype):  # if there is a NaN, it is the best, and nothing equals it
                is_best = builder.call("aten.logical_or.default", is_best, builder.call("aten.isnan.default", value))
            loses = builder.call("aten.logical_not.default", is_best)
            return builder.finish(builder.call("aten.masked_fill.Scalar", index, loses, _NOWHERE))

        return reduction_rule(call, over, "reduce(min)", (), lower)

    return OpEntry(rule)


def _global_index(builder: LocalBuilder, shard: LocalContext, index: Input) -> Input:
    """The index in the flattened tensor of an element with a given index in a flattened shard."""
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
    """Every shard counts its own elements, if the ends of the bins are given: equal ones mean those of all elements."""
    if call.arg(2, "min", 0) == call.arg(3, "max", 0):
        return None
    names = named(len(call.shapes[0]))
    text = rule_text([names], [["bin"]], {"reduce(sum)": names, "whole": ["bin"]})
    return bind(text, call.shapes, call.result_shapes)


REDUCTION: dict[str, OpEntry] = {
    "aten.sum": fold("sum", _in_dtype),
    "aten.nansum": fold("sum", _in_dtype, passes=False),
    "aten.prod": fold("prod", _in_dtype),
    "aten.count_nonzero": fold("sum", passes=False),
    "aten.amax": fold("max", _or_lowest),
    "aten.amin": fold("min", _or_highest),
    "aten.max.default": fold("max", _or_lowest),
    "aten.min.default": fold("min", _or_highest),
    "aten.any": _truth("or", "max"),
    "aten.all": _truth("and", "min"),
    "aten._is_any_true": _truth("or", "max"),
    "aten._is_all_true": _truth("and", "min"),
    "aten.mean": _mean(),
    "aten.var": _variance(root=False, with_mean=False),
    "aten.std": _variance(root=True, with_mean=False),
    "aten.var_mean": _variance(root=False, with_mean=True),
    "aten.std_mean": _variance(root=True, with_mean=True),
    "aten.norm": _norm("p"),
    "aten.linalg_vector_norm": _norm("ord"),
    "aten.dist": OpEntry(_distance, _expand_distance),
    "aten.histc": OpEntry(_histogram),
    "aten.logsumexp": _whole_if(is_complex, whole_dims(_logsumexp)),  # complex numbers have no largest
    "aten.aminmax": whole_dims(_aminmax),
    "aten.max.dim": _extreme("aten.amax.default", "gt.place_of_max", with_values=True),
    "aten.min.dim": _extreme("aten.amin.default", "gt.place_of_min", with_values=True),
    "aten.argmax": _extreme("aten.amax.default", "gt.place_of_max", with_values=False),
    "aten.argmin": _extreme("aten.amin.default", "gt.place_of_min", with_values=False),
    "aten.median": whole_dims(),
    "aten.nanmedian": whole_dims(),
    "aten.mode": whole_dims(default=-1),
    "aten.kthvalue": whole_dims(place=2, default=-1),
    "gt.variance": OpEntry(_variance_of_squares),
    "gt.place_of_max": _place("aten.max.dim", "aten.argmax.default", "aten.amax.default"),
    "gt.place_of_min": _place("aten.min.dim", "aten.argmin.default", "aten.amin.default"),
}
