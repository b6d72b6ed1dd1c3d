"""masked_scatter: the n-th true element of a mask takes the n-th element of the source. The n of an element depends on
all of the mask before it, so every worker has the whole mask."""

from __future__ import annotations

import math

from gt.core.signatures import DType, Input, ListArg, MemoryFormat
from gt.sharding.boxes import Box, Shape, box_elements
from gt.sharding.factors import OpShardingRule, PartialPassthrough, bind
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.dims import dim_names, rule_text
from gt.sharding.rules.support.local_programs import zeros


def _part(builder: LocalBuilder, value: Input, whole: Shape, box: Box) -> Input:
    for dim, (start, stop) in enumerate(box):
        if (start, stop) != (0, whole[dim]):
            value = builder.call("aten.slice.Tensor", value, dim, start, stop)
    return value


def _marked(builder: LocalBuilder, mask: Input, shape: Shape, box: Box) -> tuple[Input, Input]:
    """The box of a mask expanded to a shape, and for each of its elements the number of true elements before it in the
    flat mask."""
    mask = builder.call("aten.expand.default", mask, ListArg(shape))
    dense = builder.call("aten.clone.default", mask, memory_format=MemoryFormat("contiguous_format"))
    flat = builder.call("aten.view.default", dense, ListArg((math.prod(shape),)))
    count = builder.call("aten.cumsum.default", flat, 0, dtype=DType("int64"))
    before = builder.call("aten.clamp_min.default", builder.call("aten.sub.Scalar", count, 1), 0)
    before = builder.call("aten.view.default", before, ListArg(shape))
    return _part(builder, mask, shape, box), _part(builder, before, shape, box)


def _masked_scatter(call: OpCall) -> OpShardingRule | None:
    """Each element of the result takes its element of the source, which is whole."""
    if len(call.inputs) != 3 or call.inputs[2].elements == 0:
        return None
    names = dim_names(len(call.result_shapes[0]))
    own = names[len(names) - len(call.shapes[0]) :]
    operands = [own, ["1"] * len(call.shapes[1]), ["1"] * len(call.shapes[2])]
    return bind(rule_text(operands, [names], {}), call.shapes, call.result_shapes, lowering=_lower_scatter)


def _lower_scatter(shard: LocalContext) -> LocalProgram:
    builder = LocalBuilder(3)
    mask, before = _marked(builder, Input(1), shard.call.outputs[0].shape, shard.result_box())
    taken = builder.call("aten.take.default", Input(2), before)
    return builder.finish(builder.call("aten.where.self", mask, taken, Input(0)))


def _masked_scatter_backward(call: OpCall) -> OpShardingRule | None:
    """Gradients are added to the elements of the source that were taken."""
    if len(call.inputs) != 2:
        return None
    names = dim_names(len(call.shapes[0]))
    operands, results = [names, ["1"] * len(call.shapes[1])], [["1"] * len(call.result_shapes[0])]
    text = rule_text(operands, results, {"reduce(sum)": names})
    passthroughs = [PartialPassthrough(frozenset({0}))]
    return bind(text, call.shapes, call.result_shapes, passthroughs=passthroughs, lowering=_lower_backward)


def _lower_backward(shard: LocalContext) -> LocalProgram:
    builder, box = LocalBuilder(2), shard.operand_box(0)
    (result,) = shard.call.outputs
    none = zeros(builder, result.shape, result.dtype)
    if not result.elements or not box_elements(box):
        return builder.finish(none)
    mask, before = _marked(builder, Input(1), shard.call.inputs[0].shape, box)
    unmasked = builder.call("aten.logical_not.default", mask)
    given = builder.call("aten.masked_fill.Scalar", Input(0), unmasked, 0)
    return builder.finish(builder.call("aten.put.default", none, before, given, True))


MASKED_SCATTER: dict[str, OpEntry] = {
    "aten.masked_scatter": OpEntry(_masked_scatter),
    "aten.masked_scatter_backward": OpEntry(_masked_scatter_backward),
}
