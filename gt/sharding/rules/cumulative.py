"""Cumulative ops: cumsum, cumprod, logcumsumexp, cummax, cummin.

If the dim is cut, each shard is a block: its total is computed, the totals of the blocks before it are accumulated, and
each block is scanned from there on. The ops of the `gt` namespace are these steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gt.core.signatures import Arg, DType, Input, ListArg, WorkerDevice
from gt.sharding.boxes import Interval
from gt.sharding.dtypes import accumulation_dtype, cast_keeps_sums, is_complex
from gt.sharding.factors import LINEAR, OpShardingRule, PartialPassthrough
from gt.sharding.op_calls import Expansion, LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.blocks import (
    block_rule,
    blocks_of,
    cuts_from_arg,
    cuts_to_arg,
    lower_by_block,
    one_per_block,
)
from gt.sharding.rules.support.dims import dim_argument, whole_dim_entry, whole_dim_rule
from gt.sharding.rules.support.expansion_builder import ExpansionBuilder, contiguous_meta
from gt.sharding.rules.support.local_programs import cast, same_op
from gt.sharding.spec import ShardingSpec


class Scan(NamedTuple):
    """A scan of a dim.

    - `total`: the op that gives the last element of the scan
    - `identity`: the total of no elements
    - `takes_complex`: False for the logarithm, whose branch depends on the order of summation
    - `takes_dtype`: whether the op has the argument dtype
    """

    op: str
    total: str
    identity: float
    is_linear: bool = False
    takes_complex: bool = True
    takes_dtype: bool = True

    def giving(self, dtype: str) -> dict[str, Arg]:
        """The argument for the dtype of the result. By default, sums and products of small integers are int64; those
        into an `out=` tensor have its dtype."""
        return {"dtype": DType(dtype)} if self.takes_dtype else {}


SCANS = {
    "sum": Scan("aten.cumsum.default", "aten.sum.dim_IntList", 0, is_linear=True),
    "prod": Scan("aten.cumprod.default", "aten.prod.dim_int", 1),
    "logsumexp": Scan(
        "aten.logcumsumexp.default", "aten.logsumexp.default", float("-inf"), takes_complex=False, takes_dtype=False
    ),
}


def _scan(kind: str) -> OpEntry:
    """A scan. If the dim is cut, each shard continues from the total of the shards before it."""

    def expand(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
        dim = dim_argument(call, 1)
        blocks = blocks_of(call, specs[0], dim)
        if blocks is None or (is_complex(call.inputs[0].dtype) and not SCANS[kind].takes_complex):
            return None
        expansion = ExpansionBuilder(call)
        (target,) = call.outputs
        totals = contiguous_meta(
            (*target.shape[:dim], len(blocks), *target.shape[dim + 1 :]), accumulation_dtype(target.dtype)
        )
        total = expansion.call("gt.block_totals", (Input(0), dim, kind, cuts_to_arg(blocks)), totals)
        before = expansion.call("gt.before_blocks", (total, dim, kind), totals)
        return expansion.finish(
            expansion.call("gt.scan_blocks", (Input(0), before, dim, kind, cuts_to_arg(blocks)), target)
        )

    def rule(call: OpCall) -> OpShardingRule:
        scan, target = SCANS[kind], call.outputs[0].dtype
        linear = scan.is_linear and cast_keeps_sums(call.inputs[0].dtype, target)
        passthroughs = LINEAR if linear else ()
        return whole_dim_rule(
            call, dim_argument(call, 1), passthroughs, lambda shard: same_op(shard, None, **scan.giving(target))
        )

    return OpEntry(rule, expand)


def _block_totals(call: OpCall) -> OpShardingRule:
    """gt.block_totals(x, dim, kind, blocks): the total of each block."""
    dim, kind, cuts = [call.arg(position, "") for position in range(1, 4)]
    blocks, scan = one_per_block(cuts_from_arg(cuts)), SCANS[kind]
    source, target = call.inputs[0].dtype, call.outputs[0].dtype

    def make(builder: LocalBuilder, piece: Input, _: Interval) -> tuple[Input, ...]:
        dims = dim if kind == "prod" else ListArg((dim,))
        values = cast(builder, piece, source, target)
        return (builder.call(scan.total, values, dims, True, **scan.giving(target)),)

    passthroughs = LINEAR if scan.is_linear and cast_keeps_sums(source, target) else ()
    return block_rule(call, dim, (None, blocks), passthroughs, lambda shard: lower_by_block(shard, blocks, dim, make))


def _before_blocks(call: OpCall) -> OpShardingRule:
    """gt.before_blocks(totals, dim, kind): for each block, the total of the blocks before it."""
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

    return whole_dim_rule(call, dim, LINEAR if scan.is_linear else (), lower)


def _scan_blocks(call: OpCall) -> OpShardingRule:
    """gt.scan_blocks(x, before, dim, kind, blocks): a scan of each block that continues from the total before it."""
    dim, scan, cuts = call.arg(2, "dim"), SCANS[call.arg(3, "kind")], call.arg(4, "blocks")
    source, between, target = call.inputs[0].dtype, call.inputs[1].dtype, call.outputs[0].dtype

    def lower(shard: LocalContext) -> LocalProgram:
        builder = LocalBuilder(2)
        before = builder.call("aten.slice.Tensor", Input(1), dim, 0, 1)
        joined = ListArg((before, cast(builder, Input(0), source, between)))
        values = builder.call("aten.cat.default", joined, dim)
        scanned = builder.call(scan.op, values, dim, **scan.giving(between))
        return builder.finish(cast(builder, builder.call("aten.slice.Tensor", scanned, dim, 1), between, target))

    linear = scan.is_linear and cast_keeps_sums(source, between) and between == target
    passthroughs = [PartialPassthrough(frozenset({0, 1}))] if linear else []
    return block_rule(call, dim, (None, one_per_block(cuts_from_arg(cuts)), None), passthroughs, lower)


CUMULATIVE: dict[str, OpEntry] = {
    "aten.cummax": whole_dim_entry(1),
    "aten.cummin": whole_dim_entry(1),
    "aten.cumsum": _scan("sum"),
    "aten.cumprod": _scan("prod"),
    "aten.logcumsumexp": _scan("logsumexp"),
    "gt.block_totals": OpEntry(_block_totals),
    "gt.before_blocks": OpEntry(_before_blocks),
    "gt.scan_blocks": OpEntry(_scan_blocks),
}
