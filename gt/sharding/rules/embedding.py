"""Embeddings and embedding bags."""

from __future__ import annotations

from gt.core.signatures import Input
from gt.sharding.boxes import Shape
from gt.sharding.factors import (
    PASS,
    REDUCE,
    WHOLE,
    Dim,
    FactorRef,
    OpShardingRule,
    PartialPassthrough,
    RuleBuilder,
    bind,
)
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, OpCall, with_inputs
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.element_moves import all_partial_kinds
from gt.sharding.rules.support.indices import IndexedDim, lower_gather
from gt.sharding.rules.support.local_programs import pad_tensor

_SUM = PartialPassthrough(frozenset({0}))


def _embedding(call: OpCall) -> OpShardingRule:
    def lower(shard: LocalContext) -> LocalProgram:
        return lower_gather(shard, [IndexedDim(0, 1)], trailing=1)

    rule = "v d, ... -> ... d | mask(sum): v"
    return bind(rule, call.shapes, call.result_shapes, passthroughs=all_partial_kinds(call, 0), lowering=lower)


def _embedding_dense_backward(call: OpCall) -> OpShardingRule:
    """Indices of other workers' rows are replaced by the padding index, which the op skips. If gradients are scaled by
    the frequency of their index, only the features can be cut, since the op counts skipped indices too."""
    vocabulary, features = call.result_shapes[0]
    padding, scales = call.arg(3, "padding_idx"), call.arg(4, "scale_grad_by_freq")
    builder = RuleBuilder()
    sizes = enumerate(call.shapes[1])
    index: list[Dim] = [
        (FactorRef(builder.factor(f"i{dim}", size, WHOLE if scales else REDUCE)),) for dim, size in sizes
    ]
    row = (FactorRef(builder.factor("v", vocabulary, WHOLE if scales else PASS)),)
    column = (FactorRef(builder.factor("d", features)),)
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


def _embedding_bag(*passthroughs: PartialPassthrough) -> OpEntry:
    """Only the features can be cut: the second dim of all 2-D tensors (weights, sums, and indices of maxima)."""

    def rule(call: OpCall) -> OpShardingRule:
        builder = RuleBuilder()
        column = (FactorRef(builder.factor("d", call.result_shapes[0][1])),)

        def dims(shape: Shape) -> tuple[Dim, ...]:
            return ((), column) if len(shape) == 2 else ((),) * len(shape)

        builder.operands.extend(map(dims, call.shapes))
        builder.results.extend(map(dims, call.result_shapes))
        return builder.build(passthroughs, _lower_embedding_bag)

    return OpEntry(rule)


def _lower_embedding_bag(shard: LocalContext) -> LocalProgram:
    """The op requires a feature, so a worker without features adds one and drops it from the results."""
    call = shard.call
    program, none = LocalBuilder(len(call.inputs)), shard.result_shape()[1] == 0
    wider = {
        position: pad_tensor(program, Input(position), 2, {1: (0, 1)})
        for position, shape in enumerate(call.shapes)
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
    """The gradient of the per-sample weights: a sum over the features."""
    rule = "b d, v d, n, o, m -> n | reduce(sum): d; whole: b v n o m"
    return bind(rule, call.shapes, call.result_shapes, passthroughs=[_SUM])


EMBEDDING: dict[str, OpEntry] = {
    "aten.embedding": OpEntry(_embedding),
    "aten.embedding_dense_backward": OpEntry(_embedding_dense_backward),
    "aten._embedding_bag": _embedding_bag(),
    "aten._embedding_bag_forward_only": _embedding_bag(),
    "aten._embedding_bag_backward": _embedding_bag(_SUM),
    "aten._embedding_bag_dense_backward": _embedding_bag(_SUM),
    "aten._embedding_bag_per_sample_weights_backward": OpEntry(_embedding_bag_weights),
}
