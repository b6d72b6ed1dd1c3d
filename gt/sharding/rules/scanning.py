"""Running totals, sorting, and the largest of many.

Where the dim is cut, each shard is a block: it gives a few candidates or its total, and those of all blocks are put
together. The ops of the `gt` namespace do that; they mean the same however their tensors are laid out, as the blocks
are among their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from gt.core.signatures import Arg, DType, Input, ListArg, WorkerDevice
from gt.sharding.factors import Blocks, Dim, OpShardingRule, PartialPassthrough, Ref, RuleBuilder
from gt.sharding.op_calls import Expansion, LocalBuilder, LocalContext, LocalProgram, Lowering, OpCall
from gt.sharding.rules.entry import Expand, OpEntry
from gt.sharding.rules.support.blocks import as_cuts, as_items, one_each, own_blocks, parts_of
from gt.sharding.rules.support.decomposition import Decomposition, meta_of
from gt.sharding.rules.support.dims import named, whole_along, wrap
from gt.sharding.rules.support.dtypes import adds_up, is_complex, wide
from gt.sharding.rules.support.local_programs import cast, same_op
from gt.sharding.rules.support.statistics import LINEAR
from gt.sharding.spec import Cuts, Interval, ShardingSpec


def along(
    place: int, default: int = -1, expand: Expand | None = None, passes: Sequence[PartialPassthrough] = ()
) -> OpEntry:
    """Ops that need one dim whole; `place` is that of the argument that names it."""

    def rule(call: OpCall) -> OpShardingRule:
        dim = _dim(call, place, default)
        return whole_along(call, dim, passes)

    return OpEntry(rule, expand)


def _dim(call: OpCall, place: int, default: int = -1) -> int:
    return wrap(call.arg(place, "dim", default), len(call.inputs[0].shape))


# --- Blocks -----------------------------------------------------------------------------------------------------------


def _blocks(call: OpCall, spec: ShardingSpec, dim: int) -> Cuts | None:
    """The shards of a dim, where it is cut into fewer than it has elements."""
    shape = call.inputs[0].shape
    if not shape or not spec.dims[dim] or spec.shards(dim) >= shape[dim] or not call.inputs[0].elements:
        return None
    return spec.intervals(shape, dim)


def _block_rule(
    call: OpCall, dim: int, windows: Sequence[Blocks | None], passes: Sequence[PartialPassthrough], lowering: Lowering
) -> OpShardingRule:
    """A rule of tensors that have the same dims, apart from one in which some have a part for each block: `windows`,
    operands first."""
    builder = RuleBuilder()
    shape = call.inputs[0].shape
    names = [builder.factor(name, size) for name, size in zip(named(len(shape)), shape, strict=True)]
    tensors: list[tuple[Dim, ...]] = [
        tuple([(Ref(name, window if place == dim else None),) for place, name in enumerate(names)])
        for window in windows
    ]
    builder.operands = tensors[: len(call.inputs)]
    builder.results = tensors[len(call.inputs) :]
    return builder.build(passes, lowering)


Make: TypeAlias = Callable[[LocalBuilder, Input, Interval], tuple[Input, ...]]
"""Makes the parts of one block: a piece of a tensor, from one element to another."""


def _by_block(shard: LocalContext, blocks: Blocks, dim: int, make: Make) -> LocalProgram:
    """The parts of all blocks that a worker has to give, next to each other."""
    builder = LocalBuilder(len(shard.call.inputs))
    start = shard.operand_box(0)[dim][0]
    made = []
    for low, high in own_blocks(shard, blocks, dim) or [(start, start)]:
        piece = builder.call("aten.slice.Tensor", Input(0), dim, low - start, high - start)
        made.append(make(builder, piece, (low, high)))
    results = [
        parts[0] if len(parts) == 1 else builder.call("aten.cat.default", ListArg(parts), dim)
        for parts in zip(*made, strict=True)
    ]
    return builder.finish(*results)


# --- The largest of many ----------------------------------------------------------------------------------------------


def _expand_topk(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    """The largest of each shard, and the largest of those."""
    dim, count = _dim(call, 2), call.arg(1, "k")
    blocks = _blocks(call, specs[0], dim)
    shape = call.inputs[0].shape
    kept = [min(count, high - low) for low, high in blocks or ()]
    if blocks is None or sum(kept) >= shape[dim]:
        return None
    pieces = Decomposition(call)
    candidates = (*shape[:dim], sum(kept), *shape[dim + 1 :])
    largest, ordered = call.arg(3, "largest", True), call.arg(4, "sorted", True)
    metas = meta_of(candidates, call.outputs[0].dtype), meta_of(candidates, "int64")
    found = pieces.call("gt.block_topk", (Input(0), count, dim, largest, as_items(blocks)), metas)
    return pieces.finish(*pieces.call("gt.topk_of", (*found, count, dim, largest, ordered), call.outputs))


def _block_topk(call: OpCall) -> OpShardingRule:
    """gt.block_topk(x, k, dim, largest, blocks): the k largest of each block, or all of it, and their indices."""
    count, dim, largest, cuts = [call.arg(place, "") for place in range(1, 5)]
    blocks = parts_of(as_cuts(cuts), [min(count, high - low) for low, high in as_cuts(cuts)])

    def make(builder: LocalBuilder, piece: Input, block: Interval) -> tuple[Input, ...]:
        low, high = block
        values, places = builder.calls("aten.topk.default", 2, piece, min(count, high - low), dim, largest, False)
        return values, builder.call("aten.add.Scalar", places, low)

    return _block_rule(call, dim, (None, blocks, blocks), (), lambda shard: _by_block(shard, blocks, dim, make))


def _topk_of(call: OpCall) -> OpShardingRule:
    """gt.topk_of(values, indices, k, dim, largest, sorted): topk of values that have indices already."""
    dim = call.arg(3, "dim")

    def lower(shard: LocalContext) -> LocalProgram:
        builder = LocalBuilder(2)
        values, places = builder.calls("aten.topk.default", 2, Input(0), *call.args[2:])
        return builder.finish(values, builder.call("aten.gather.default", Input(1), dim, places))

    return whole_along(call, dim, lowering=lower)


# --- Running totals ---------------------------------------------------------------------------------------------------


class Scan(NamedTuple):
    """`op` scans a dim, `total` gives the last of it from all elements, and `identity` that of none. A logarithm of
    complex numbers depends on the way to it, so that is not taken in blocks."""

    op: str
    total: str
    identity: float
    is_linear: bool = False
    takes_complex: bool = True
    takes_dtype: bool = True

    def giving(self, dtype: str) -> dict[str, Arg]:
        """The argument that asks for a dtype: sums and products of small integers give int64 if not told, and those
        into a tensor given as `out=` are in its dtype."""
        return {"dtype": DType(dtype)} if self.takes_dtype else {}


SCANS = {
    "sum": Scan("aten.cumsum.default", "aten.sum.dim_IntList", 0, is_linear=True),
    "prod": Scan("aten.cumprod.default", "aten.prod.dim_int", 1),
    "logsumexp": Scan(
        "aten.logcumsumexp.default", "aten.logsumexp.default", float("-inf"), takes_complex=False, takes_dtype=False
    ),
}


def _scan(kind: str) -> OpEntry:
    """Where the dim is cut, each shard goes on from the total of those before it."""

    def expand(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
        dim = _dim(call, 1)
        blocks = _blocks(call, specs[0], dim)
        if blocks is None or (is_complex(call.inputs[0].dtype) and not SCANS[kind].takes_complex):
            return None
        pieces = Decomposition(call)
        (target,) = call.outputs
        totals = meta_of((*target.shape[:dim], len(blocks), *target.shape[dim + 1 :]), wide(target.dtype))
        total = pieces.one("gt.block_totals", (Input(0), dim, kind, as_items(blocks)), totals)
        before = pieces.one("gt.before_blocks", (total, dim, kind), totals)
        return pieces.finish(pieces.one("gt.scan_blocks", (Input(0), before, dim, kind, as_items(blocks)), target))

    def rule(call: OpCall) -> OpShardingRule:
        scan, target = SCANS[kind], call.outputs[0].dtype
        linear = scan.is_linear and adds_up(call.inputs[0].dtype, target)
        passes = LINEAR if linear else ()
        return whole_along(call, _dim(call, 1), passes, lambda shard: same_op(shard, None, **scan.giving(target)))

    return OpEntry(rule, expand)


def _block_totals(call: OpCall) -> OpShardingRule:
    """gt.block_totals(x, dim, kind, blocks)."""
    dim, kind, cuts = [call.arg(place, "") for place in range(1, 4)]
    blocks, scan = one_each(as_cuts(cuts)), SCANS[kind]
    source, target = call.inputs[0].dtype, call.outputs[0].dtype

    def make(builder: LocalBuilder, piece: Input, _: Interval) -> tuple[Input, ...]:
        dims = dim if kind == "prod" else ListArg((dim,))
        values = cast(builder, piece, source, target)
        return (builder.call(scan.total, values, dims, True, **scan.giving(target)),)

    passes = LINEAR if scan.is_linear and adds_up(source, target) else ()
    return _block_rule(call, dim, (None, blocks), passes, lambda shard: _by_block(shard, blocks, dim, make))


def _before_blocks(call: OpCall) -> OpShardingRule:
    """gt.before_blocks(totals, dim, kind): for each block the total of those before it."""
    dim, scan = call.arg(1, "dim"), SCANS[call.arg(2, "kind")]
    dtype, shape = call.outputs[0].dtype, call.outputs[0].shape

    def lower(shard: LocalContext) -> LocalProgram:
        builder = LocalBuilder(1)
        local = shard.result_shape()
        first = ListArg((*local[:dim], 1, *local[dim + 1 :]))
        nothing = builder.call("aten.full.default", first, scan.identity, dtype=DType(dtype), device=WorkerDevice())
        others = builder.call("aten.slice.Tensor", Input(0), dim, 0, shape[dim] - 1)
        joined = ListArg((nothing, builder.call(scan.op, others, dim, **scan.giving(dtype))))
        return builder.finish(builder.call("aten.cat.default", joined, dim))

    return whole_along(call, dim, LINEAR if scan.is_linear else (), lower)


def _scan_blocks(call: OpCall) -> OpShardingRule:
    """gt.scan_blocks(x, before, dim, kind, blocks): a scan that goes on from what was before each block."""
    dim, scan, cuts = call.arg(2, "dim"), SCANS[call.arg(3, "kind")], call.arg(4, "blocks")
    source, between, target = call.inputs[0].dtype, call.inputs[1].dtype, call.outputs[0].dtype

    def lower(shard: LocalContext) -> LocalProgram:
        builder = LocalBuilder(2)
        before = builder.call("aten.slice.Tensor", Input(1), dim, 0, 1)
        joined = ListArg((before, cast(builder, Input(0), source, between)))
        values = builder.call("aten.cat.default", joined, dim)
        scanned = builder.call(scan.op, values, dim, **scan.giving(between))
        return builder.finish(cast(builder, builder.call("aten.slice.Tensor", scanned, dim, 1), between, target))

    linear = scan.is_linear and adds_up(source, between) and between == target
    passes = [PartialPassthrough(frozenset({0, 1}))] if linear else []
    return _block_rule(call, dim, (None, one_each(as_cuts(cuts)), None), passes, lower)


SCANNING: dict[str, OpEntry] = {
    "aten.sort": along(1),
    "aten.argsort": along(1),
    "aten.topk": along(2, expand=_expand_topk),
    "aten.cummax": along(1),
    "aten.cummin": along(1),
    "aten.cumsum": _scan("sum"),
    "aten.cumprod": _scan("prod"),
    "aten.logcumsumexp": _scan("logsumexp"),
    "gt.block_topk": OpEntry(_block_topk),
    "gt.topk_of": OpEntry(_topk_of),
    "gt.block_totals": OpEntry(_block_totals),
    "gt.before_blocks": OpEntry(_before_blocks),
    "gt.scan_blocks": OpEntry(_scan_blocks),
}
