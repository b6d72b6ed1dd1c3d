"""Ops that pick elements by index. Where the indexed dim is cut, every worker picks its own and the results add up."""

from __future__ import annotations

import math

from gt.core.signatures import Input
from gt.sharding.factors import (
    MASK,
    PASS,
    REDUCE,
    WHOLE,
    Dim,
    OpShardingRule,
    PartialPassthrough,
    Ref,
    RuleBuilder,
    Window,
    bind,
)
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, OpCall, with_inputs
from gt.sharding.rules.advanced import index, index_put
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.scattering import SCATTERING
from gt.sharding.rules.support.dims import wrap
from gt.sharding.rules.support.element_moves import every_kind, own_dims, padded, sum_kind
from gt.sharding.rules.support.indices import Indexed, pick
from gt.sharding.spec import Shape

_SUM = PartialPassthrough(frozenset({0}))


def _index_select(call: OpCall) -> OpShardingRule | None:
    shape, own = call.shapes
    if not shape:
        return None
    dim = wrap(call.arg(1, "dim"), len(shape))
    builder = RuleBuilder()
    dims = own_dims(builder, shape)
    builder.factor(f"d{dim}", shape[dim], MASK, sum_kind(call.inputs[0].dtype))
    index: tuple[Dim, ...] = ((Ref(builder.factor("i", own[0])),),) if own else ()
    builder.operands.extend([tuple(dims), index])
    builder.results.append((*dims[:dim], *(index or ((),)), *dims[dim + 1 :]))
    trailing = len(shape) - dim - len(index)
    return builder.build(every_kind(call, 0), lambda shard: pick(shard, [Indexed(dim, 1)], trailing))


def _gather(call: OpCall) -> OpShardingRule | None:
    """Along the other dims the first elements of the tensor are used, as many as there are indices."""
    shape, own = call.shapes
    if not shape or len(own) != len(shape):
        return None
    dim = wrap(call.arg(1, "dim"), len(shape))
    builder = RuleBuilder()
    index = own_dims(builder, own)
    table = [
        refs if size == used else (Ref(refs[0].factor, Window(0, used)),)
        for refs, size, used in zip(index, shape, own, strict=True)
    ]
    table[dim] = (Ref(builder.factor("v", shape[dim], MASK, sum_kind(call.inputs[0].dtype))),)
    builder.operands.extend([tuple(table), tuple(index)])
    builder.results.append(tuple(index))
    return builder.build(every_kind(call, 0), lambda shard: pick(shard, [Indexed(dim, 1)]))


def _take(call: OpCall) -> OpShardingRule:
    """Indices of the flat tensor: a part of its first dim is a range of them."""
    shape, own = call.shapes
    builder = RuleBuilder()
    index = tuple(own_dims(builder, own))
    unit = math.prod(shape[1:])
    table: list[Dim] = [()] * len(shape)
    if shape and unit:
        table[0] = (Ref(builder.factor("v", shape[0], MASK, sum_kind(call.inputs[0].dtype))),)
    builder.operands.extend([tuple(table), index])
    builder.results.append(index)
    indexed = [Indexed(0, 1, wraps=True, unit=unit)] if table and table[0] else []
    return builder.build(every_kind(call, 0), lambda shard: pick(shard, indexed))


# --- Embeddings -------------------------------------------------------------------------------------------------------


def _embedding(call: OpCall) -> OpShardingRule:
    def lower(shard: LocalContext) -> LocalProgram:
        return pick(shard, [Indexed(0, 1)], trailing=1)

    rule = "v d, ... -> ... d | mask(sum): v"
    return bind(rule, call.shapes, call.result_shapes, passes=every_kind(call, 0), lowering=lower)


def _embedding_dense_backward(call: OpCall) -> OpShardingRule:
    """Rows of other workers get the index that the op leaves out. Where gradients are scaled by how often an index
    occurs, only the features can be cut: the op counts all indices, those that it leaves out too."""
    vocabulary, features = call.result_shapes[0]
    padding, scales = call.arg(3, "padding_idx"), call.arg(4, "scale_grad_by_freq")
    builder = RuleBuilder()
    sizes = enumerate(call.shapes[1])
    index: list[Dim] = [(Ref(builder.factor(f"i{dim}", size, WHOLE if scales else REDUCE)),) for dim, size in sizes]
    row = (Ref(builder.factor("v", vocabulary, WHOLE if scales else PASS)),)
    column = (Ref(builder.factor("d", features)),)
    builder.operands.extend([(*index, column), tuple(index)])
    builder.results.append((row, column))

    def lower(shard: LocalContext) -> LocalProgram:
        program, (start, stop) = LocalBuilder(2), shard.result_box()[0]
        own_padding = padding - start if start <= padding < stop else -1
        index = Input(1)
        if (start, stop) != (0, vocabulary):
            below, above = program.call("aten.lt.Scalar", index, start), program.call("aten.ge.Scalar", index, stop)
            mark = program.call("aten.logical_or.default", below, above)
            index = program.call("aten.sub.Scalar", index, start)
            index = program.call("aten.masked_fill.Scalar", index, mark, own_padding)
        return program.finish(program.call(shard.call.op, Input(0), index, stop - start, own_padding, scales))

    return builder.build([_SUM], lower)


def _embedding_bag(*passes: PartialPassthrough) -> OpEntry:
    """Only the features can be cut. What has two dims has them: weights, sums, and for max the rows that were taken."""

    def rule(call: OpCall) -> OpShardingRule:
        builder = RuleBuilder()
        column = (Ref(builder.factor("d", call.result_shapes[0][1])),)

        def dims(shape: Shape) -> tuple[Dim, ...]:
            return ((), column) if len(shape) == 2 else ((),) * len(shape)

        builder.operands.extend(map(dims, call.shapes))
        builder.results.extend(map(dims, call.result_shapes))
        return builder.build(passes, _lower_embedding_bag)

    return OpEntry(rule)


def _lower_embedding_bag(shard: LocalContext) -> LocalProgram:
    """The op wants a feature, so a worker that has none adds one and takes it away again."""
    call = shard.call
    program, none = LocalBuilder(len(call.inputs)), shard.result_shape()[1] == 0
    wider = {
        place: padded(program, Input(place), 2, {1: (0, 1)})
        for place, shape in enumerate(call.shapes)
        if none and len(shape) == 2
    }
    args = [with_inputs(arg, lambda value: wider.get(value.index, value)) for arg in call.args]
    results = program.repeat(call, *args, **call.kwargs)
    return program.finish(
        *[
            program.call("aten.slice_copy.Tensor", result, 1, 0, 0) if none and len(shape) == 2 else result
            for result, shape in zip(results, call.result_shapes, strict=True)
        ]
    )


def _embedding_bag_weights(call: OpCall) -> OpShardingRule:
    """The gradient of the weights of samples: a sum over the features."""
    rule = "b d, v d, n, o, m -> n | reduce(sum): d; whole: b v n o m"
    return bind(rule, call.shapes, call.result_shapes, passes=[_SUM])


# --- Places in sorted sequences, and membership -----------------------------------------------------------------------


def _searchsorted(call: OpCall) -> OpShardingRule:
    """The place of a value is the number of smaller elements, so those of shards add up."""
    values, sorter = call.tensor(1, "self"), call.tensor(5, "sorter")
    batched = "..." if len(call.shapes[0]) > 1 else ""
    operands = {0: f"{batched} n", values: f"{batched} m" if batched else "...", sorter: f"{batched} n"}
    result = operands[values] if values is not None else "..."
    text = ", ".join([operands[place] for place in range(len(call.inputs))])
    how = "reduce(sum): n" if sorter is None else "whole: n"
    return bind(f"{text} -> {result} | {how}", call.shapes, call.result_shapes)


def _bucketize(call: OpCall) -> OpShardingRule:
    text = "..., n -> ..." if len(call.inputs) == 2 else "n -> ..."
    return bind(f"{text} | reduce(sum): n", call.shapes, call.result_shapes)


def _isin(call: OpCall) -> OpShardingRule:
    """An element is in a set if it is in any part of it, and not in it if it is in no part."""
    kind = "and" if call.kwargs.get("invert") else "or"
    elements, tests = call.tensor(0, "elements"), call.tensor(1, "test_elements")
    builder = RuleBuilder()
    own = tuple(own_dims(builder, call.result_shapes[0]))
    if elements is not None:
        builder.operands.append(own)
    if tests is not None:
        sizes = enumerate(call.shapes[tests])
        builder.operands.append(tuple([(Ref(builder.factor(f"t{dim}", n, REDUCE, kind)),) for dim, n in sizes]))
    builder.results.append(own)
    return builder.build()


INDEXING: dict[str, OpEntry] = {
    **SCATTERING,
    "aten.index": OpEntry(index),
    "aten._unsafe_index": OpEntry(index),
    "aten.index_put": OpEntry(index_put),
    "aten._index_put_impl": OpEntry(index_put),
    "aten._unsafe_index_put": OpEntry(index_put),
    "aten.index_select": OpEntry(_index_select),
    "aten.gather": OpEntry(_gather),
    "aten.take": OpEntry(_take),
    "aten.embedding": OpEntry(_embedding),
    "aten.embedding_dense_backward": OpEntry(_embedding_dense_backward),
    "aten._embedding_bag": _embedding_bag(),
    "aten._embedding_bag_forward_only": _embedding_bag(),
    "aten._embedding_bag_backward": _embedding_bag(_SUM),
    "aten._embedding_bag_dense_backward": _embedding_bag(_SUM),
    "aten._embedding_bag_per_sample_weights_backward": OpEntry(_embedding_bag_weights),
    "aten.searchsorted": OpEntry(_searchsorted),
    "aten.bucketize": OpEntry(_bucketize),
    "aten.isin": OpEntry(_isin),
}
