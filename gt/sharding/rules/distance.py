"""Distances between the rows of matrices: cdist and pdist."""

from __future__ import annotations

from gt.core.signatures import DType, Input, ListArg, MemoryFormat, WorkerDevice
from gt.sharding.factors import OpShardingRule, bind
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.matmul import linear_in, product_entry
from gt.sharding.rules.support.local_programs import same_op, zeros_if_empty


def _pairs(call: OpCall) -> OpShardingRule:
    """pdist: one distance for each pair of rows, the pairs of the first row first."""
    return bind("1 1 -> p", call.shapes, call.result_shapes, lowering=_lower_pairs)


def _lower_pairs(shard: LocalContext) -> LocalProgram:
    rows = shard.call.inputs[0].shape[0]
    ((start, stop),) = shard.result_box()
    if (start, stop) == (0, shard.call.outputs[0].shape[0]):
        return same_op(shard)
    builder = LocalBuilder(1)
    pairs = builder.call("aten.triu_indices.default", rows, rows, 1, dtype=DType("int64"), device=WorkerDevice())
    pairs = builder.call("aten.slice.Tensor", pairs, 1, start, stop)
    sides = [builder.call("aten.select.int", pairs, 0, side) for side in (0, 1)]
    one, other = [builder.call("aten.index_select.default", Input(0), 0, side) for side in sides]
    difference = builder.call("aten.sub.Tensor", one, other)
    return builder.finish(
        builder.call("aten.linalg_vector_norm.default", difference, shard.call.arg(1, "p", 2.0), ListArg((1,)))
    )


def _pairs_backward(call: OpCall) -> OpShardingRule | None:
    """The gradient of each column depends on that column and the distances only."""
    return bind(
        "1, 1 m, 1 -> 1 m",
        call.shapes,
        call.result_shapes,
        passthroughs=linear_in((0,)),
        lowering=_lower_pairs_backward,
    )


def _lower_pairs_backward(shard: LocalContext) -> LocalProgram:
    """The op on a contiguous copy of the matrix, which its kernel requires."""
    builder = LocalBuilder(3)
    rows = builder.call("aten.clone.default", Input(1), memory_format=MemoryFormat("contiguous_format"))
    return builder.finish(builder.call(shard.call.op, Input(0), rows, shard.call.arg(2, "p"), Input(2)))


DISTANCE: dict[str, OpEntry] = {
    "aten._cdist_forward": product_entry("... i m, ... j m -> ... i j | whole: m"),
    "aten._euclidean_dist": product_entry("... i m, ... j m -> ... i j | whole: m"),
    "aten._cdist_backward": product_entry(
        "... i j, ... i m, ... j m, ... i j -> ... i m | reduce(sum): j", *linear_in((0,)), lowering=zeros_if_empty()
    ),
    "aten._pdist_forward": OpEntry(_pairs),
    "aten._pdist_backward": OpEntry(_pairs_backward),
}
