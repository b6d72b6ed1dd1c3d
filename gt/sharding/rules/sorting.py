"""Sorting, and topk. For topk along a cut dim, each shard is a block that gives k candidates, and topk is taken of
these. The ops of the `gt` namespace are the two steps."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.signatures import Input
from gt.sharding.boxes import Interval
from gt.sharding.factors import OpShardingRule
from gt.sharding.op_calls import Expansion, LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.blocks import (
    block_rule,
    blocks_of,
    cuts_from_arg,
    cuts_to_arg,
    lower_by_block,
    parts_per_block,
)
from gt.sharding.rules.support.dims import dim_argument, whole_dim_entry, whole_dim_rule
from gt.sharding.rules.support.expansion_builder import ExpansionBuilder, contiguous_meta
from gt.sharding.spec import ShardingSpec


def _expand_topk(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    """The k largest of each shard, and the k largest of these."""
    dim, count = dim_argument(call, 2), call.arg(1, "k")
    blocks = blocks_of(call, specs[0], dim)
    shape = call.inputs[0].shape
    kept = [min(count, high - low) for low, high in blocks or ()]
    if blocks is None or sum(kept) >= shape[dim]:
        return None
    expansion = ExpansionBuilder(call)
    candidates = (*shape[:dim], sum(kept), *shape[dim + 1 :])
    largest, ordered = call.arg(3, "largest", True), call.arg(4, "sorted", True)
    metas = contiguous_meta(candidates, call.outputs[0].dtype), contiguous_meta(candidates, "int64")
    found = expansion.call_multi("gt.block_topk", (Input(0), count, dim, largest, cuts_to_arg(blocks)), metas)
    return expansion.finish(*expansion.call_multi("gt.topk_of", (*found, count, dim, largest, ordered), call.outputs))


def _block_topk(call: OpCall) -> OpShardingRule:
    """gt.block_topk(x, k, dim, largest, blocks): the k largest of each block, or all of it, and their indices."""
    count, dim, largest, cuts = [call.arg(position, "") for position in range(1, 5)]
    blocks = parts_per_block(cuts_from_arg(cuts), [min(count, high - low) for low, high in cuts_from_arg(cuts)])

    def make(builder: LocalBuilder, piece: Input, block: Interval) -> tuple[Input, ...]:
        low, high = block
        values, positions = builder.call_multi(
            "aten.topk.default", 2, piece, min(count, high - low), dim, largest, False
        )
        return values, builder.call("aten.add.Scalar", positions, low)

    return block_rule(call, dim, (None, blocks, blocks), (), lambda shard: lower_by_block(shard, blocks, dim, make))


def _topk_of(call: OpCall) -> OpShardingRule:
    """gt.topk_of(values, indices, k, dim, largest, sorted): topk of values with given indices."""
    dim = call.arg(3, "dim")

    def lower(shard: LocalContext) -> LocalProgram:
        builder = LocalBuilder(2)
        values, positions = builder.call_multi("aten.topk.default", 2, Input(0), *call.args[2:])
        return builder.finish(values, builder.call("aten.gather.default", Input(1), dim, positions))

    return whole_dim_rule(call, dim, lowering=lower)


SORTING: dict[str, OpEntry] = {
    "aten.sort": whole_dim_entry(1),
    "aten.argsort": whole_dim_entry(1),
    "aten.topk": whole_dim_entry(2, expand=_expand_topk),
    "gt.block_topk": OpEntry(_block_topk),
    "gt.topk_of": OpEntry(_topk_of),
}
