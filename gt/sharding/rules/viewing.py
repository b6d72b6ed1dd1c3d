"""Ops that only name elements differently, and some that repeat or reorder them.

What is a view on whole tensors is one view of the shard on every worker, so that writes through it reach the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gt.core.meta import TensorMeta, contiguous_strides, same_places
from gt.core.signatures import Input, ListArg
from gt.sharding.factors import (
    HALO,
    REDUCE,
    Dim,
    HaloWindow,
    OpShardingRule,
    PartialPassthrough,
    Ref,
    RuleBuilder,
    bind,
)
from gt.sharding.op_calls import Expander, Expansion, LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.diagonals import DIAGONALS
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.reshaping import reinterpret, reshape
from gt.sharding.rules.slicing import SLICING
from gt.sharding.rules.support.decomposition import meta_of
from gt.sharding.rules.support.dims import wrap, wrap_all
from gt.sharding.rules.support.element_moves import every_kind, once, own_dims, padded
from gt.sharding.rules.support.local_programs import zeros
from gt.sharding.spec import ShardingSpec


def text(rule: str, *passes: PartialPassthrough) -> OpEntry:
    """A view whose rule can be written down; partial values pass as given, or all of them."""
    return OpEntry(
        lambda call: bind(rule, call.shapes, call.result_shapes, passes=passes or every_kind(call, 0)),
    )


def relabel(dims_of: Callable[[OpCall, list[Dim]], Sequence[Dim]]) -> OpEntry:
    """A view whose result has the dims of its operand at other places."""

    def rule(call: OpCall) -> OpShardingRule:
        builder = RuleBuilder()
        dims = own_dims(builder, call.shapes[0])
        builder.operands.append(tuple(dims))
        builder.results.append(tuple(dims_of(call, dims)))
        return builder.build(every_kind(call, 0))

    return OpEntry(rule)


def _transposed(call: OpCall, dims: list[Dim]) -> Sequence[Dim]:
    if not dims:
        return dims
    dims = list(dims)
    first, second = call.arg(1, "dim0"), call.arg(2, "dim1")
    dims[first], dims[second] = dims[second], dims[first]
    return dims


def _unsqueezed(call: OpCall, dims: list[Dim]) -> Sequence[Dim]:
    place = wrap(call.arg(1, "dim"), len(dims) + 1)
    return [*dims[:place], (), *dims[place:]]


def _squeeze(call: OpCall) -> OpShardingRule:
    """A dim that the op keeps may have one element in some shard, so each worker names the dims that it drops."""
    shape = call.shapes[0]
    asked = wrap_all(call.arg(1, "dim", range(len(shape))), len(shape))
    dropped = tuple([dim for dim, size in enumerate(shape) if size == 1 and dim in asked])
    builder = RuleBuilder()
    dims = own_dims(builder, shape, dropped)
    builder.operands.append(tuple(dims))
    builder.results.append(tuple([refs for dim, refs in enumerate(dims) if dim not in dropped]))
    op = call.op.rpartition(".")[0] + ".dims"
    return builder.build(every_kind(call, 0), lambda shard: once(shard, op, shard.call.args[0], ListArg(dropped)))


# --- More elements, or the same in another order ----------------------------------------------------------------------


def _expand(call: OpCall) -> OpShardingRule:
    def lower(shard: LocalContext) -> LocalProgram:
        return once(shard, shard.call.op, shard.call.args[0], ListArg(shard.result_shape()))

    return bind("... -> ...", call.shapes, call.result_shapes, passes=every_kind(call, 0), lowering=lower)


def _repeat(call: OpCall) -> OpShardingRule:
    """Every dim becomes one of (repeats, elements)."""
    shape, repeats = call.shapes[0], call.arg(1, "repeats")
    new = len(repeats) - len(shape)
    builder = RuleBuilder()
    dims = own_dims(builder, shape, [dim for dim, size in enumerate(shape) if size == 1 or not repeats[new + dim]])
    times = [(Ref(builder.factor(f"r{place}", count)),) if count != 1 else () for place, count in enumerate(repeats)]
    builder.operands.append(tuple(dims))
    builder.results.append(tuple([(*major, *minor) for major, minor in zip(times, [()] * new + dims, strict=True)]))

    def lower(shard: LocalContext) -> LocalProgram:
        sizes = (*[1] * new, *shard.operand_shape(0))
        local = [
            given // size if size else count
            for given, size, count in zip(shard.result_shape(), sizes, repeats, strict=True)
        ]
        return once(shard, shard.call.op, shard.call.args[0], ListArg(tuple(local)))

    return builder.build(every_kind(call, 0), lower)


def _as_strided(call: OpCall) -> OpShardingRule | None:
    """The same elements in the same order: strides that differ only in dims of one element, as pooling gives them."""
    (source,), size, stride = call.inputs, call.arg(1, "size"), call.arg(2, "stride")
    if tuple(size) != source.shape or call.arg(3, "storage_offset") or not same_places(size, source.stride, stride):
        return None
    builder = RuleBuilder()
    dims = tuple(own_dims(builder, source.shape))
    builder.operands.append(dims)
    builder.results.append(dims)
    return builder.build(every_kind(call, 0), lambda shard: once(shard, "aten.alias.default", Input(0)))


def _unfold(call: OpCall) -> OpShardingRule | None:
    """Window o along the dim shows the elements o * step to o * step + size - 1."""
    shape, size, step = call.shapes[0], call.arg(2, "size"), call.arg(3, "step")
    if not shape or size == 0:
        return None
    dim = wrap(call.arg(1, "dimension"), len(shape))
    builder = RuleBuilder()
    dims = own_dims(builder, shape)
    name = builder.factor(f"d{dim}", call.result_shapes[0][dim], HALO)
    reach = (Ref(name, HaloWindow(step, 0, size - 1, shape[dim])),)
    builder.operands.append((*dims[:dim], reach, *dims[dim + 1 :]))
    builder.results.append((*dims, ()))

    def lower(shard: LocalContext) -> LocalProgram:
        local = shard.result_shape()
        if local[dim] == 0:  # no window fits into an empty shard
            strides = ListArg(contiguous_strides(local))
            return once(shard, "aten.as_strided.default", shard.call.args[0], ListArg(local), strides)
        return once(shard, shard.call.op, *shard.call.args, **shard.call.kwargs)

    return builder.build(every_kind(call, 0), lower)


def _unfold_backward(call: OpCall) -> OpShardingRule | None:
    """Windows may overlap, so each worker adds up its own ones, among zeros."""
    sizes, size, step = call.arg(1, "input_sizes"), call.arg(3, "size"), call.arg(4, "step")
    if not sizes:
        return None
    dim = wrap(call.arg(2, "dim"), len(sizes))
    builder = RuleBuilder()
    dims = own_dims(builder, call.shapes[0][:-1])
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
        return program.finish(padded(program, summed, len(local), {dim: (start, after)}))

    return builder.build([PartialPassthrough(frozenset({0}))], lower)


def reorder(dims_of: Callable[[OpCall, int], Sequence[int]]) -> OpEntry:
    """An op that reorders the elements along some dims, which then cannot be cut."""

    def rule(call: OpCall) -> OpShardingRule:
        shape = call.shapes[0]
        builder = RuleBuilder()
        dims = tuple(own_dims(builder, shape, dims_of(call, len(shape))))
        builder.operands.append(dims)
        builder.results.append(dims)
        return builder.build(every_kind(call, 0))

    return OpEntry(rule)


def _rolled(call: OpCall, rank: int) -> Sequence[int]:
    """Without dims the elements move as if the tensor were flat."""
    return wrap_all(call.arg(2, "dims") or range(rank), rank)


def _rotated(call: OpCall, rank: int) -> Sequence[int]:
    return wrap_all(call.arg(2, "dims", (0, 1)), rank) if call.arg(1, "k", 1) % 4 else ()


def _expand_roll(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    """Two slices, joined the other way round: only what crosses a cut moves."""
    shape, shifts = call.shapes[0], call.arg(1, "shifts")
    dims = [wrap(dim, len(shape)) for dim in call.arg(2, "dims", ())]
    moves = [(dim, shift % shape[dim]) for dim, shift in zip(dims, shifts, strict=False) if shape[dim]]
    moves = [(dim, shift) for dim, shift in moves if shift]
    if not any(specs[0].dims[dim] for dim, _ in moves):
        return None
    expander, rolled = Expander(1), Input(0)
    for dim, shift in moves:
        cut = shape[dim] - shift
        tail, head = [
            expander.one("aten.slice.Tensor", (rolled, dim, start, stop), _resized(call.inputs[0], dim, stop - start))
            for start, stop in ((cut, shape[dim]), (0, cut))
        ]
        rolled = expander.one("aten.cat.default", (ListArg((tail, head)), dim), call.outputs[0])
    return expander.finish(rolled)


def _resized(meta: TensorMeta, dim: int, size: int) -> TensorMeta:
    return meta_of((*meta.shape[:dim], size, *meta.shape[dim + 1 :]), meta.dtype)


_SUM = PartialPassthrough(frozenset({0}))
_PROD = PartialPassthrough(frozenset({0}), "prod", "prod")


def _views(form: str) -> dict[str, OpEntry]:
    """Each op as a view, and in the form that copies."""
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


VIEWING: dict[str, OpEntry] = {
    **_views(""),
    **_views("_copy"),
    **SLICING,
    **DIAGONALS,
    "aten.reshape": OpEntry(reshape),
    "aten._unsafe_view": OpEntry(reshape),
    "aten._reshape_copy": OpEntry(reshape),
    "aten.lift": text("... -> ..."),
    "aten.repeat": OpEntry(_repeat),
    "aten.as_strided": OpEntry(_as_strided),
    "aten.unfold_backward": OpEntry(_unfold_backward),
    "aten.flip": reorder(lambda call, rank: wrap_all(call.arg(1, "dims"), rank)),
    "aten.roll": reorder(_rolled)._replace(expand=_expand_roll),
    "aten.rot90": reorder(_rotated),
}
