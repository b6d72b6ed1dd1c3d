"""Joining and splitting tensors: cat, stack, block_diag, split, unbind."""

from __future__ import annotations

import itertools

from gt.core.signatures import Input, ListArg
from gt.sharding.factors import MASK, WHOLE, FactorRef, OpShardingRule, PartialPassthrough, RuleBuilder, Window
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.slicing import window_dim
from gt.sharding.rules.support.dims import dim_factors, wrap_dim
from gt.sharding.rules.support.element_moves import absent_tensor, all_partial_kinds, merge_kind
from gt.sharding.rules.support.local_programs import single_call


def _every_operand(call: OpCall) -> list[PartialPassthrough]:
    return all_partial_kinds(call, *range(len(call.inputs)))


def _cat(call: OpCall) -> OpShardingRule:
    """Each operand is a window of the result: a worker needs the elements that are in its part of the result."""
    shape = call.result_shapes[0]
    dim = wrap_dim(call.arg(1, "dim", 0), len(shape))
    builder = RuleBuilder()
    dims = dim_factors(builder, shape)
    offset = 0
    for own in call.shapes:
        if len(own) != len(shape):  # torch accepts an empty 1-D tensor along with tensors of any rank
            builder.operands.append(((),))
            continue
        window = window_dim(dims[dim], shape[dim], Window(offset, own[dim]))
        builder.operands.append((*dims[:dim], window, *dims[dim + 1 :]))
        offset += own[dim]
    builder.results.append(tuple(dims))
    return builder.build(_every_operand(call))


def _stack(call: OpCall) -> OpShardingRule:
    """If the new dim is cut, each worker stacks the operands of its part."""
    shape = call.result_shapes[0]
    dim = wrap_dim(call.arg(1, "dim", 0), len(shape))
    builder = RuleBuilder()
    dims = dim_factors(builder, shape)
    if len({meta.dtype for meta in call.inputs}) > 1:  # some of the operands may promote to another dtype than all
        builder.factor(f"d{dim}", shape[dim], WHOLE)
    builder.operands.extend([(*dims[:dim], *dims[dim + 1 :])] * len(call.inputs))
    builder.results.append(tuple(dims))

    def lower(shard: LocalContext) -> LocalProgram:
        start, stop = shard.result_box()[dim]
        if start == stop:
            return single_call(shard, "aten.new_zeros.default", Input(0), ListArg(shard.result_shape()))
        return single_call(shard, shard.call.op, ListArg(shard.call.arg(0, "tensors")[start:stop]), dim)

    return builder.build(_every_operand(call), lower)


def _block_diag(call: OpCall) -> OpShardingRule | None:
    """A part of the result is the block_diag of parts of the blocks."""
    if any(len(shape) != 2 for shape in call.shapes):
        return None
    builder = RuleBuilder()
    rows, columns = dim_factors(builder, call.result_shapes[0])
    corner = (0, 0)
    for shape in call.shapes:
        windows = [
            (FactorRef(dim[0].factor, Window(*at)),)
            for dim, at in zip((rows, columns), zip(corner, shape, strict=True), strict=True)
        ]
        builder.operands.append(tuple(windows))
        corner = corner[0] + shape[0], corner[1] + shape[1]
    builder.results.append((rows, columns))
    return builder.build(_every_operand(call))


def _split(local: str) -> OpEntry:
    """A split into windows of the operand; `local` is the op that takes a list of sizes."""

    def rule(call: OpCall) -> OpShardingRule:
        shape = call.shapes[0]
        dim = wrap_dim(call.arg(2, "dim", 0), len(shape))
        builder = RuleBuilder()
        dims = dim_factors(builder, shape)
        sizes = [given[dim] for given in call.result_shapes]
        builder.operands.append(tuple(dims))
        for offset, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
            window = window_dim(dims[dim], shape[dim], Window(offset, size))
            builder.results.append((*dims[:dim], window, *dims[dim + 1 :]))

        def lower(shard: LocalContext) -> LocalProgram:
            parts = tuple([shard.result_shape(position)[dim] for position in range(len(sizes))])
            return single_call(shard, local, Input(0), ListArg(parts), dim)

        return builder.build(all_partial_kinds(call, 0), lower)

    return OpEntry(rule)


def _unbind(row: str) -> OpEntry:
    """If the dim is cut, each worker gives its own rows, by the op `row`, and zeros for the others."""

    def rule(call: OpCall) -> OpShardingRule:
        shape = call.shapes[0]
        dim = wrap_dim(call.arg(1, "dim", 0), len(shape))
        builder = RuleBuilder()
        dims = dim_factors(builder, shape)
        builder.factor(f"d{dim}", shape[dim], MASK, merge_kind(call.inputs[0].dtype))
        builder.operands.append(tuple(dims))
        builder.results.extend([(*dims[:dim], *dims[dim + 1 :])] * shape[dim])

        def lower(shard: LocalContext) -> LocalProgram:
            start, stop = shard.operand_box(0)[dim]
            if stop - start == shape[dim]:
                return single_call(shard, shard.call.op, Input(0), dim)
            program = LocalBuilder(1)
            rows = [
                program.call(row, Input(0), dim, position - start)
                if start <= position < stop
                else absent_tensor(program, shard.result_shape(position), shard.call.inputs[0].dtype)
                for position in range(shape[dim])
            ]
            return program.finish(*rows)

        return builder.build(all_partial_kinds(call, 0), lower)

    return OpEntry(rule)


CAT_SPLIT: dict[str, OpEntry] = {
    "aten.cat": OpEntry(_cat),
    "aten.stack": OpEntry(_stack),
    "aten.block_diag": OpEntry(_block_diag),
    "aten.split": _split("aten.split_with_sizes.default"),
    "aten.split_with_sizes": _split("aten.split_with_sizes.default"),
    "aten.split_copy": _split("aten.split_with_sizes_copy.default"),
    "aten.split_with_sizes_copy": _split("aten.split_with_sizes_copy.default"),
    "aten.unsafe_split": _split("aten.unsafe_split_with_sizes.default"),
    "aten.unsafe_split_with_sizes": _split("aten.unsafe_split_with_sizes.default"),
    "aten.unbind": _unbind("aten.select.int"),
    "aten.unbind_copy": _unbind("aten.select_copy.int"),
}
