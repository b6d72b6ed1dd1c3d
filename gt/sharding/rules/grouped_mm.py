"""Grouped matrix products, as in a mixture of experts. The rows, columns or inner dim of an operand are split into
consecutive groups, each with its own matrix; `offs` has the end of each group."""

from __future__ import annotations

from collections.abc import Mapping

from gt.core.meta import ITEM_BYTES
from gt.core.signatures import DType, Input, ListArg, MemoryFormat, WorkerDevice
from gt.sharding.boxes import Interval, Shape
from gt.sharding.factors import OpShardingRule, bind
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.local_programs import pad_tensor, same_op, zeros_if_empty

# By the ranks of the operands; the groups split m, n or k, or are a batch dim.
_TEXTS = {
    (2, 3): "m k, g k n, 1 -> m n | reduce(sum): k; mask(sum): g",
    (3, 2): "g m k, k n, 1 -> m n | reduce(sum): k; mask(sum): g",
    (2, 2): "m k, k n, 1 -> g m n | reduce(sum): k",
    (3, 3): "g m k, g k n -> g m n | reduce(sum): k",
}
_ALIGNMENT = 16  # bytes: kernels require strides of matrices that are a multiple


def _grouped_product(call: OpCall) -> OpShardingRule | None:
    text = _TEXTS[len(call.shapes[0]), len(call.shapes[1])]
    if call.tensor(3, "bias") is not None or text.partition("->")[0].count(",") + 1 != len(call.inputs):
        return None
    return bind(text, call.shapes, call.result_shapes, lowering=zeros_if_empty(_lower))


def _lower(shard: LocalContext) -> LocalProgram:
    call, shape = shard.call, shard.result_shape()
    held = [*[shard.operand_shape(position) for position in range(len(call.inputs))], shape]
    if held == [*call.shapes, *call.result_shapes]:
        return same_op(shard)
    builder = LocalBuilder(len(call.inputs))
    lacks_groups = len(call.inputs) == 3 and _groups(shard) != (0, call.shapes[2][0])
    left, right = _aligned(builder, shard, lacks_groups)
    offs = _offsets(builder, shard, lacks_groups) if len(call.inputs) == 3 else None
    made = builder.call(call.op, left, right, offs, None, call.arg(4, "out_dtype"))
    made = builder.call("aten.slice.Tensor", made, -1, 0, shape[-1])
    if lacks_groups and len(shape) == 3:
        made = builder.call("aten.slice.Tensor", made, 0, 1, 1 + shape[0])
    return builder.finish(made)


def _groups(shard: LocalContext) -> Interval:
    """The groups whose matrices a worker holds or computes."""
    boxes = [shard.operand_box(0), shard.operand_box(1), shard.result_box()]
    return next(box[0] for box in boxes if len(box) == 3)


def _ragged(shard: LocalContext) -> Interval:
    """The interval that a worker holds of the dim that is split into groups."""
    left, right = shard.operand_box(0), shard.operand_box(1)
    if len(left) == 3:
        return right[1]
    return left[0] if len(right) == 3 else left[1]


def _offsets(builder: LocalBuilder, shard: LocalContext, lacks_groups: bool) -> Input:
    """The ends of the groups in a worker's interval. If it lacks groups, one group is added for all elements before its
    first group and one for all after its last."""
    start, stop = _ragged(shard)
    ends = builder.call("aten.clamp.default", builder.call("aten.sub.Scalar", Input(2), start), 0, stop - start)
    if not lacks_groups:
        return ends
    first, last = _groups(shard)
    before = builder.call("aten.slice.Tensor", ends, 0, first - 1, first) if first else _int(builder, 0)
    own = builder.call("aten.slice.Tensor", ends, 0, first, last)
    return builder.call("aten.cat.default", ListArg((before, own, _int(builder, stop - start))))


def _int(builder: LocalBuilder, value: int) -> Input:
    return builder.call("aten.full.default", ListArg((1,)), value, dtype=DType("int32"), device=WorkerDevice())


def _aligned(builder: LocalBuilder, shard: LocalContext, lacks_groups: bool) -> tuple[Input, Input]:
    """Both operands, padded with zeros for alignment and, if the worker lacks groups, with a matrix of zeros for the
    groups before its first and one for those after its last."""
    left, right = shard.operand_shape(0), shard.operand_shape(1)
    unit = _ALIGNMENT // ITEM_BYTES[shard.call.inputs[0].dtype]
    inner, columns = -left[-1] % unit, -right[-1] % unit
    more = {0: (1, 1)} if lacks_groups else {}
    left_pads = (more if len(left) == 3 else {}) | {len(left) - 1: (0, inner)}
    right_pads = (more if len(right) == 3 else {}) | {len(right) - 2: (0, inner), len(right) - 1: (0, columns)}
    return _dense(builder, Input(0), left, left_pads, unit), _dense(builder, Input(1), right, right_pads, unit)


def _dense(builder: LocalBuilder, tensor: Input, shape: Shape, pads: Mapping[int, Interval], unit: int) -> Input:
    if any(before or after for before, after in pads.values()):
        return pad_tensor(builder, tensor, len(shape), pads)
    if shape[-2] % unit == 0:
        return tensor  # aligned in either order of its dims
    return builder.call("aten.clone.default", tensor, memory_format=MemoryFormat("contiguous_format"))


GROUPED_MM: dict[str, OpEntry] = {"aten._grouped_mm": OpEntry(_grouped_product)}
