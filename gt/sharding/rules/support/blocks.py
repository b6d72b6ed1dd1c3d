"""Blocks of a dim among the arguments of an op: what the shards of a dim were when the op was written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from gt.core.signatures import ListArg
from gt.sharding.factors import Blocks
from gt.sharding.op_calls import LocalContext
from gt.sharding.spec import Cuts, Interval


def as_items(cuts: Cuts) -> ListArg:
    return ListArg(tuple([ListArg(interval) for interval in cuts]))


def as_cuts(items: Sequence[ListArg]) -> Cuts:
    return tuple([(item.values[0], item.values[1]) for item in items])  # type: ignore[misc]


def parts_of(blocks: Cuts, sizes: Sequence[int]) -> Blocks:
    """A dim with so many elements for each block."""
    return Blocks(blocks, tuple(pairwise([0, *accumulate(sizes)])))


def one_each(blocks: Cuts) -> Blocks:
    return parts_of(blocks, [1] * len(blocks))


def own_blocks(shard: LocalContext, blocks: Blocks, dim: int) -> list[Interval]:
    """The blocks of which a worker gives elements of dim `dim` of the results."""
    first, last = shard.result_box()[dim]
    return [block for block, (start, stop) in zip(*blocks, strict=True) if first <= start < stop <= last]
