"""Sorting, and topk. For topk along a cut dim, each shard is a block that gives k candidates, and topk is taken of
these. The ops of the `gt` namespace are the two steps. Positions in sorted sequences, and membership."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.signatures import Input
from gt.sharding.boxes import Interval
from gt.sharding.factors import REDUCE, FactorRef, OpShardingRule, RuleBuilder, bind
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
from gt.sharding.rules.support.dims import dim_argument, dim_factors, whole_dim_entry, whole_dim_rule
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


def _searchsorted(call: OpCall) -> OpShardingRule:
    """The position of a value is the number of smaller elements, so the positions in shards add up."""
    values, sorter = call.tensor(1, "self"), call.tensor(5, "sorter")
    batched = "..." if len(call.shapes[0]) > 1 else ""
    operands = {0: f"{batched} n", values: f"{batched} m" if batched else "...", sorter: f"{batched} n"}
    result = operands[values] if values is not None else "..."
    text = ", ".join([operands[position] for position in range(len(call.inputs))])
    how = "reduce(sum): n" if sorter is None else "whole: n"
    return bind(f"{text} -> {result} | {how}", call.shapes, call.result_shapes)


def _bucketize(call: OpCall) -> OpShardingRule:
    text = "..., n -> ..." if len(call.inputs) == 2 else "n -> ..."
    return bind(f"{text} | reduce(sum): n", call.shapes, call.result_shapes)


def _isin(call: OpCall) -> OpShardingRule:
    """Membership is the OR over the shards of the set, or with `invert` the AND."""
    kind = "and" if call.kwargs.get("invert") else "or"
    elements, tests = call.tensor(0, "elements"), call.tensor(1, "test_elements")
    builder = RuleBuilder()
    own = tuple(dim_factors(builder, call.result_shapes[0]))
    if elements is not None:
        builder.operands.append(own)
    if tests is not None:
        sizes = enumerate(call.shapes[tests])
        builder.operands.append(tuple([(FactorRef(builder.factor(f"t{dim}", n, REDUCE, kind)),) for dim, n in sizes]))
    builder.results.append(own)
    return builder.build()


SEARCHSORTED: dict[str, OpEntry] = {
    "aten.searchsorted": OpEntry(_searchsorted),
    "aten.bucketize": OpEntry(_bucketize),
    "aten.isin": OpEntry(_isin),
}
