"""Ops that work block by block along a cut dim, such as a sum of each shard.

The op takes the blocks as an argument: they are the shards of the dim at the time of the expansion. So its result does
not depend on the layout with which it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

from gt.core.signatures import Input, ListArg
from gt.sharding.boxes import Cuts, Interval
from gt.sharding.factors import BlockWindow, Dim, FactorRef, OpShardingRule, PartialPassthrough, RuleBuilder
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, Lowering, OpCall
from gt.sharding.rules.support.dims import dim_names
from gt.sharding.spec import ShardingSpec


def cuts_to_arg(cuts: Cuts) -> ListArg:
    return ListArg(tuple([ListArg(interval) for interval in cuts]))


def cuts_from_arg(items: Sequence[ListArg]) -> Cuts:
    return tuple([(item.values[0], item.values[1]) for item in items])  # type: ignore[misc]


def blocks_of(call: OpCall, spec: ShardingSpec, dim: int) -> Cuts | None:
    """The shards of a dim of the first input as blocks; None if the dim is not cut, or blocks would not help because
    there are as many shards as elements."""
    shape = call.inputs[0].shape
    if not shape or not spec.dims[dim] or spec.shards(dim) >= shape[dim] or not call.inputs[0].elements:
        return None
    return spec.intervals(shape, dim)


def parts_per_block(blocks: Cuts, sizes: Sequence[int]) -> BlockWindow:
    """A dim with the given number of elements for each block."""
    return BlockWindow(blocks, tuple(pairwise([0, *accumulate(sizes)])))


def one_per_block(blocks: Cuts) -> BlockWindow:
    return parts_per_block(blocks, [1] * len(blocks))


def block_rule(
    call: OpCall,
    dim: int,
    windows: Sequence[BlockWindow | None],
    passthroughs: Sequence[PartialPassthrough],
    lowering: Lowering,
) -> OpShardingRule:
    """A rule for tensors that have the same dims, apart from `dim`. `windows` has, for each operand and then each
    result, its elements per block along `dim`, or None for all elements."""
    builder = RuleBuilder()
    shape = call.inputs[0].shape
    names = [builder.factor(name, size) for name, size in zip(dim_names(len(shape)), shape, strict=True)]
    tensors: list[tuple[Dim, ...]] = [
        tuple([(FactorRef(name, window if position == dim else None),) for position, name in enumerate(names)])
        for window in windows
    ]
    builder.operands = tensors[: len(call.inputs)]
    builder.results = tensors[len(call.inputs) :]
    return builder.build(passthroughs, lowering)


def local_blocks(shard: LocalContext, window: BlockWindow, dim: int) -> list[Interval]:
    """The blocks whose parts, along dim `dim` of the results, belong to a worker."""
    first, last = shard.result_box()[dim]
    return [block for block, (start, stop) in zip(*window, strict=True) if first <= start < stop <= last]


ComputeBlock: TypeAlias = Callable[[LocalBuilder, Input, Interval], tuple[Input, ...]]
"""Computes the results for one block, from the slice of the tensor and its interval."""


def lower_by_block(shard: LocalContext, window: BlockWindow, dim: int, compute: ComputeBlock) -> LocalProgram:
    """A worker's results: those of its blocks, concatenated."""
    builder = LocalBuilder(len(shard.call.inputs))
    start = shard.operand_box(0)[dim][0]
    made = []
    for low, high in local_blocks(shard, window, dim) or [(start, start)]:
        block = builder.call("aten.slice.Tensor", Input(0), dim, low - start, high - start)
        made.append(compute(builder, block, (low, high)))
    results = [
        parts[0] if len(parts) == 1 else builder.call("aten.cat.default", ListArg(parts), dim)
        for parts in zip(*made, strict=True)
    ]
    return builder.finish(*results)
