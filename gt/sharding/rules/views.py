"""Views, reshapes, and ops that repeat or reorder elements.

A view of the whole tensor is one view of the shard on every worker, so that writes through it reach the shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gt.core.meta import ITEM_BYTES, TensorMeta, contiguous_strides, same_places
from gt.core.signatures import DType, Input, ListArg
from gt.sharding.boxes import Shape
from gt.sharding.factors import (
    HALO,
    REDUCE,
    WHOLE,
    Dim,
    FactorRef,
    HaloWindow,
    OpShardingRule,
    PartialPassthrough,
    RuleBuilder,
    bind,
)
from gt.sharding.op_calls import Expansion, LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.dims import dim_factors, wrap_dim, wrap_dims
from gt.sharding.rules.support.element_moves import all_partial_kinds
from gt.sharding.rules.support.expansion_builder import ExpansionBuilder, contiguous_meta
from gt.sharding.rules.support.local_programs import pad_tensor, single_call, zeros
from gt.sharding.spec import ShardingSpec


def reshape(call: OpCall) -> OpShardingRule:
    builder = RuleBuilder()
    source, target = _ReshapeSide(call.shapes[0]), _ReshapeSide(call.result_shapes[0])
    if 0 in source.shape:
        _share_prefix(builder, source, target)
    else:
        _share_factors(builder, source, target)
    builder.operands.append(tuple(map(tuple, source.dims)))
    builder.results.append(tuple(map(tuple, target.dims)))

    def lower(shard: LocalContext) -> LocalProgram:
        return single_call(shard, shard.call.op, Input(0), ListArg(shard.result_shape()))

    return builder.build(all_partial_kinds(call, 0), lower)


class _ReshapeSide:
    """One shape of a reshape: the factors assigned to its dims so far, their product, and the remaining size of the
    current dim (`left`)."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.dims: list[list[FactorRef]] = [[] for _ in shape]
        self.product = 1
        self._dim = -1
        self.left = 1
        self._advance()

    def take(self, factor: str, size: int) -> None:
        self.dims[self._dim].append(FactorRef(factor))
        self.product *= size
        self.left //= size
        self._advance()

    def _advance(self) -> None:
        while self.left == 1 and self._dim + 1 < len(self.shape):
            self._dim += 1
            self.left = self.shape[self._dim]


def _share_factors(builder: RuleBuilder, source: _ReshapeSide, target: _ReshapeSide) -> None:
    """Walk both shapes from the left. If the products of the factors so far are equal, so are the strides, and a common
    divisor of the remaining sizes is a shared factor. Otherwise the side with the smaller product gets a private
    factor, which cannot be cut: one that makes the products equal, or leaves a common divisor for later."""

    def private(side: _ReshapeSide, size: int) -> None:
        if size > 1:
            side.take(builder.factor(f"p{len(builder.factors)}", size, WHOLE), size)

    while source.left > 1 or target.left > 1:
        shared = math.gcd(source.left, target.left)
        if source.product != target.product:
            behind, ahead = sorted((source, target), key=lambda side: side.product)
            meet, off = divmod(ahead.product, behind.product)
            size = meet if not off and behind.left % meet == 0 else behind.left // shared
            private(behind, size if size > 1 else behind.left)
        elif shared > 1:
            name = builder.factor(f"f{len(builder.factors)}", shared)
            source.take(name, shared)
            target.take(name, shared)
        else:
            sizes = source.left, target.left
            private(source, sizes[0])
            private(target, sizes[1])


def _share_prefix(builder: RuleBuilder, source: _ReshapeSide, target: _ReshapeSide) -> None:
    """Factors for tensors without elements: the dims that both shapes start with."""
    for dim, (a, b) in enumerate(zip(source.shape, target.shape, strict=False)):
        if a != b or a == 0:
            break
        name = builder.factor(f"f{dim}", a)
        source.dims[dim].append(FactorRef(name))
        target.dims[dim].append(FactorRef(name))


def reinterpret(call: OpCall) -> OpShardingRule:
    """The rule of `view(dtype)`: the tensor with the smaller dtype has several elements for each of the other, along
    the last dim."""
    dtype = call.arg(1, "dtype")
    assert isinstance(dtype, DType)
    before, after = ITEM_BYTES[call.inputs[0].dtype], ITEM_BYTES[dtype.name]
    if before == after:
        return bind("... -> ...", call.shapes, call.result_shapes)
    sides = ("... d", "... (d k)") if before > after else ("... (d k)", "... d")
    return bind(f"{sides[0]} -> {sides[1]} | whole: k", call.shapes, call.result_shapes)


def text(rule: str, *passthroughs: PartialPassthrough) -> OpEntry:
    """A view with the rule of a text. Partial values of all kinds pass unless passthroughs are given."""
    return OpEntry(
        lambda call: bind(
            rule, call.shapes, call.result_shapes, passthroughs=passthroughs or all_partial_kinds(call, 0)
        ),
    )


def relabel(dims_of: Callable[[OpCall, list[Dim]], Sequence[Dim]]) -> OpEntry:
    """A view whose result has the dims of its operand in another order, or with new dims of size 1."""

    def rule(call: OpCall) -> OpShardingRule:
        builder = RuleBuilder()
        dims = dim_factors(builder, call.shapes[0])
        builder.operands.append(tuple(dims))
        builder.results.append(tuple(dims_of(call, dims)))
        return builder.build(all_partial_kinds(call, 0))

    return OpEntry(rule)


def _transposed(call: OpCall, dims: list[Dim]) -> Sequence[Dim]:
    if not dims:
        return dims
    dims = list(dims)
    first, second = call.arg(1, "dim0"), call.arg(2, "dim1")
    dims[first], dims[second] = dims[second], dims[first]
    return dims


def _unsqueezed(call: OpCall, dims: list[Dim]) -> Sequence[Dim]:
    position = wrap_dim(call.arg(1, "dim"), len(dims) + 1)
    return [*dims[:position], (), *dims[position:]]


def _squeeze(call: OpCall) -> OpShardingRule:
    """Each worker names the dropped dims, since a shard of a kept dim may have one element too."""
    shape = call.shapes[0]
    asked = wrap_dims(call.arg(1, "dim", range(len(shape))), len(shape))
    dropped = tuple([dim for dim, size in enumerate(shape) if size == 1 and dim in asked])
    builder = RuleBuilder()
    dims = dim_factors(builder, shape, dropped)
    builder.operands.append(tuple(dims))
    builder.results.append(tuple([refs for dim, refs in enumerate(dims) if dim not in dropped]))
    op = call.op.rpartition(".")[0] + ".dims"
    return builder.build(
        all_partial_kinds(call, 0), lambda shard: single_call(shard, op, shard.call.args[0], ListArg(dropped))
    )


# --- Repeating and reordering -----------------------------------------------------------------------------------------


def _expand(call: OpCall) -> OpShardingRule:
    def lower(shard: LocalContext) -> LocalProgram:
        return single_call(shard, shard.call.op, shard.call.args[0], ListArg(shard.result_shape()))

    return bind("... -> ...", call.shapes, call.result_shapes, passthroughs=all_partial_kinds(call, 0), lowering=lower)


def _repeat(call: OpCall) -> OpShardingRule:
    """Each dim of the result is a compound of repeats and elements."""
    shape, repeats = call.shapes[0], call.arg(1, "repeats")
    new = len(repeats) - len(shape)
    builder = RuleBuilder()
    dims = dim_factors(builder, shape, [dim for dim, size in enumerate(shape) if size == 1 or not repeats[new + dim]])
    times = [
        (FactorRef(builder.factor(f"r{position}", count)),) if count != 1 else ()
        for position, count in enumerate(repeats)
    ]
    builder.operands.append(tuple(dims))
    builder.results.append(tuple([(*major, *minor) for major, minor in zip(times, [()] * new + dims, strict=True)]))

    def lower(shard: LocalContext) -> LocalProgram:
        sizes = (*[1] * new, *shard.operand_shape(0))
        local = [
            given // size if size else count
            for given, size, count in zip(shard.result_shape(), sizes, repeats, strict=True)
        ]
        return single_call(shard, shard.call.op, shard.call.args[0], ListArg(tuple(local)))

    return builder.build(all_partial_kinds(call, 0), lower)


def _as_strided(call: OpCall) -> OpShardingRule | None:
    """Only for the same elements in the same order: strides differ only in dims of one element, as from pooling."""
    (source,), size, stride = call.inputs, call.arg(1, "size"), call.arg(2, "stride")
    if tuple(size) != source.shape or call.arg(3, "storage_offset") or not same_places(size, source.stride, stride):
        return None
    builder = RuleBuilder()
    dims = tuple(dim_factors(builder, source.shape))
    builder.operands.append(dims)
    builder.results.append(dims)
    return builder.build(all_partial_kinds(call, 0), lambda shard: single_call(shard, "aten.alias.default", Input(0)))


def _unfold(call: OpCall) -> OpShardingRule | None:
    """Window o along the dim has the elements o * step to o * step + size - 1."""
    shape, size, step = call.shapes[0], call.arg(2, "size"), call.arg(3, "step")
    if not shape or size == 0:
        return None
    dim = wrap_dim(call.arg(1, "dimension"), len(shape))
    builder = RuleBuilder()
    dims = dim_factors(builder, shape)
    name = builder.factor(f"d{dim}", call.result_shapes[0][dim], HALO)
    reach = (FactorRef(name, HaloWindow(step, 0, size - 1, shape[dim])),)
    builder.operands.append((*dims[:dim], reach, *dims[dim + 1 :]))
    builder.results.append((*dims, ()))

    def lower(shard: LocalContext) -> LocalProgram:
        local = shard.result_shape()
        if local[dim] == 0:  # no window fits into an empty shard
            strides = ListArg(contiguous_strides(local))
            return single_call(shard, "aten.as_strided.default", shard.call.args[0], ListArg(local), strides)
        return single_call(shard, shard.call.op, *shard.call.args, **shard.call.kwargs)

    return builder.build(all_partial_kinds(call, 0), lower)


def _unfold_backward(call: OpCall) -> OpShardingRule | None:
    """Windows may overlap, so each worker sums its own and pads with zeros: partial sums."""
    sizes, size, step = call.arg(1, "input_sizes"), call.arg(3, "size"), call.arg(4, "step")
    if not sizes:
        return None
    dim = wrap_dim(call.arg(2, "dim"), len(sizes))
    builder = RuleBuilder()
    dims = dim_factors(builder, call.shapes[0][:-1])
    builder.factor(f"d{dim}", call.shapes[0][dim], REDUCE)
    builder.operands.append((*dims, ()))
    builder.results.append((*dims[:dim], (), *dims[dim + 1 :]))

    def lower(shard: LocalContext) -> LocalProgram:
        program = LocalBuilder(1)
        first, stop = shard.operand_box(0)[dim]
        local = list(shard.result_shape())
        if first == stop:
            return program.finish(zeros(program, tuple(local), shard.call.outputs[0].dtype))
        start, end = first * step, (stop - 1) * step + size
        after, local[dim] = local[dim] - end, end - start
        summed = program.call(shard.call.op, Input(0), ListArg(tuple(local)), dim, size, step)
        return program.finish(pad_tensor(program, summed, len(local), {dim: (start, after)}))

    return builder.build([PartialPassthrough(frozenset({0}))], lower)


def reorder(dims_of: Callable[[OpCall, int], Sequence[int]]) -> OpEntry:
    """An op that reorders the elements along some dims, which cannot be cut."""

    def rule(call: OpCall) -> OpShardingRule:
        shape = call.shapes[0]
        builder = RuleBuilder()
        dims = tuple(dim_factors(builder, shape, dims_of(call, len(shape))))
        builder.operands.append(dims)
        builder.results.append(dims)
        return builder.build(all_partial_kinds(call, 0))

    return OpEntry(rule)


def _rolled(call: OpCall, rank: int) -> Sequence[int]:
    """The dims that a roll moves elements along: all, if none are given, since the flat tensor is rolled."""
    return wrap_dims(call.arg(2, "dims") or range(rank), rank)


def _rotated(call: OpCall, rank: int) -> Sequence[int]:
    return wrap_dims(call.arg(2, "dims", (0, 1)), rank) if call.arg(1, "k", 1) % 4 else ()


def _expand_roll(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    """Two slices, concatenated in reverse order: only elements that cross a cut move."""
    shape, shifts = call.shapes[0], call.arg(1, "shifts")
    dims = [wrap_dim(dim, len(shape)) for dim in call.arg(2, "dims", ())]
    moves = [(dim, shift % shape[dim]) for dim, shift in zip(dims, shifts, strict=False) if shape[dim]]
    moves = [(dim, shift) for dim, shift in moves if shift]
    if not any(specs[0].dims[dim] for dim, _ in moves):
        return None
    expansion, rolled = ExpansionBuilder(call), Input(0)
    for dim, shift in moves:
        cut = shape[dim] - shift
        tail, head = [
            expansion.call("aten.slice.Tensor", (rolled, dim, start, stop), _resized(call.inputs[0], dim, stop - start))
            for start, stop in ((cut, shape[dim]), (0, cut))
        ]
        rolled = expansion.call("aten.cat.default", (ListArg((tail, head)), dim), call.outputs[0])
    return expansion.finish(rolled)


def _resized(meta: TensorMeta, dim: int, size: int) -> TensorMeta:
    return contiguous_meta((*meta.shape[:dim], size, *meta.shape[dim + 1 :]), meta.dtype)


_SUM = PartialPassthrough(frozenset({0}))
_PROD = PartialPassthrough(frozenset({0}), "prod", "prod")


def _views(form: str) -> dict[str, OpEntry]:
    """The entries of view ops, or of their copying forms."""
    return {
        f"aten.view{form}": OpEntry(reshape),
        f"aten.view{form}.dtype": OpEntry(reinterpret),
        f"aten.expand{form}": OpEntry(_expand),
        f"aten.permute{form}": relabel(lambda call, dims: [dims[dim] for dim in call.arg(1, "dims")]),
        f"aten.transpose{form}": relabel(_transposed),
        f"aten.t{form}": relabel(lambda call, dims: dims[::-1]),
        f"aten.squeeze{form}": OpEntry(_squeeze),
        f"aten.unsqueeze{form}": relabel(_unsqueezed),
        f"aten.unfold{form}": OpEntry(_unfold),
        f"aten.alias{form}": text("... -> ..."),
        f"aten.detach{form}": text("... -> ..."),
        f"aten.lift_fresh{form}": text("... -> ..."),
        f"aten.view_as_real{form}": text("... -> ... z | whole: z", _SUM),
        f"aten.view_as_complex{form}": text("... z -> ... | whole: z", _SUM),
        f"aten._conj{form}": text("... -> ...", _SUM, _PROD),
        f"aten._neg_view{form}": text("... -> ...", _SUM),
    }


VIEWS: dict[str, OpEntry] = {
    **_views(""),
    **_views("_copy"),
    "aten.reshape": OpEntry(reshape),
    "aten._unsafe_view": OpEntry(reshape),
    "aten._reshape_copy": OpEntry(reshape),
    "aten.lift": text("... -> ..."),
    "aten.repeat": OpEntry(_repeat),
    "aten.as_strided": OpEntry(_as_strided),
    "aten.unfold_backward": OpEntry(_unfold_backward),
    "aten.flip": reorder(lambda call, rank: wrap_dims(call.arg(1, "dims"), rank)),
    "aten.roll": reorder(_rolled)._replace(expand=_expand_roll),
    "aten.rot90": reorder(_rotated),
}
