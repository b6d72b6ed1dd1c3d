"""Matrix and vector products, linear layers, and grouped products, as in a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gt.core.meta import ITEM_BYTES
from gt.core.signatures import DType, Input, ListArg, MemoryFormat, WorkerDevice
from gt.sharding.boxes import Interval, Shape
from gt.sharding.factors import PASS, REDUCE, FactorRef, OpShardingRule, PartialPassthrough, RuleBuilder, bind
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, Lowering, OpCall
from gt.sharding.rules.entry import NO_ALGORITHMS, OpEntry
from gt.sharding.rules.support.local_programs import adds_once, pad_tensor, same_op, zeros_if_empty
from gt.sharding.rules.support.product_algorithms import PRODUCT_ALGORITHMS
from gt.sharding.schedules import Algorithm


def linear_in(*groups: Sequence[int]) -> tuple[PartialPassthrough, ...]:
    """The passthroughs of an op that is linear in each of these groups of operands while the others are fixed."""
    return tuple([PartialPassthrough(frozenset(group), may_grow=True) for group in groups])


def product_entry(
    text: str,
    *passthroughs: PartialPassthrough,
    lowering: Lowering | None = None,
    algorithms: Mapping[str, Algorithm] = NO_ALGORITHMS,
) -> OpEntry:
    def rule(call: OpCall) -> OpShardingRule | None:
        if len(call.inputs) != text.partition("->")[0].count(",") + 1:
            return None  # the same tensor is passed twice
        return bind(text, call.shapes, call.result_shapes, passthroughs=passthroughs, lowering=lowering)

    return OpEntry(rule, algorithms=algorithms)


def _product_added(factors: str, result: str, summed: str) -> OpEntry:
    """beta * bias + alpha * product, with the bias broadcast to the result. If the sum is cut, one worker adds the
    bias; the others pass beta = 0, with which the op does not read it."""

    def rule(call: OpCall) -> OpShardingRule | None:
        if len(call.inputs) != 3:
            return None
        names = result.split()
        bias = " ".join(names[len(names) - len(call.shapes[0]) :])
        text = f"{bias}, {factors} -> {result}" + (f" | reduce(sum): {summed}" if summed else "")
        return bind(text, call.shapes, call.result_shapes, passthroughs=linear_in((0, 1), (0, 2)), lowering=lower)

    def lower(shard: LocalContext) -> LocalProgram:
        return same_op(shard) if adds_once(shard) else same_op(shard, beta=0)

    return OpEntry(rule)


def _linear(call: OpCall) -> OpShardingRule | None:
    has_bias = call.tensor(2, "bias") is not None
    passthroughs = linear_in((0, 2), (1, 2)) if has_bias else linear_in((0,), (1,))
    text = f"... k, o k{', o' if has_bias else ''} -> ... o | reduce(sum): k"
    return bind(
        text, call.shapes, call.result_shapes, passthroughs=passthroughs, lowering=_lower_linear if has_bias else None
    )


def _lower_linear(shard: LocalContext) -> LocalProgram:
    return same_op(shard) if adds_once(shard) else same_op(shard, {2: None})


def _matmul(call: OpCall) -> OpShardingRule | None:
    """A product of tensors of any rank, whose leading dims are broadcast, as torch.matmul."""
    if len(call.inputs) != 2:
        return None
    first, second = call.shapes
    left = ["i", "k"][-len(first) :] if len(first) > 1 else ["k"]
    right = ["k", "j"] if len(second) > 1 else ["k"]
    ranks = len(first) - len(left), len(second) - len(right)
    batch = [f"b{number}" for number in range(max(ranks))]
    own = [_broadcast_dims(batch, shape[:rank], call) for shape, rank in zip(call.shapes, ranks, strict=True)]
    given = [*batch, *[name for name in (*left, *right) if name != "k"]]
    text = f"{' '.join([*own[0], *left])}, {' '.join([*own[1], *right])} -> {' '.join(given) or '...'} | reduce(sum): k"
    return bind(text, call.shapes, call.result_shapes, passthroughs=_BILINEAR)


def _broadcast_dims(batch: Sequence[str], sizes: Sequence[int], call: OpCall) -> list[str]:
    """The names of an operand's leading dims; `1` for one that is broadcast."""
    names = batch[len(batch) - len(sizes) :]
    wanted = call.result_shapes[0][: len(batch)][len(batch) - len(sizes) :]
    pairs = zip(names, sizes, wanted, strict=True)
    return [name if size == full else "1" for name, size, full in pairs]


def _trilinear(call: OpCall) -> OpShardingRule | None:
    """The product of three tensors, each broadcast along some dims, summed over some dims."""
    if len(call.inputs) != 3:
        return None
    summed: Sequence[int] = call.arg(6, "sumdim")
    rank = len(call.shapes[0]) + len(call.arg(3, "expand1"))
    builder = RuleBuilder()
    sizes: dict[int, int] = {}
    present = []
    for position, shape in enumerate(call.shapes):
        absent: Sequence[int] = call.arg(3 + position, f"expand{position + 1}")
        present.append([dim for dim in range(rank) if dim not in absent])
        sizes |= _larger(sizes, dict(zip(present[-1], shape, strict=True)))
    names = [builder.factor(f"d{dim}", sizes[dim], REDUCE if dim in summed else PASS) for dim in range(rank)]
    for dims, shape in zip(present, call.shapes, strict=True):
        pairs = zip(dims, shape, strict=True)
        builder.operands.append(tuple([(FactorRef(names[dim]),) if size == sizes[dim] else () for dim, size in pairs]))
    builder.results.append(tuple([(FactorRef(names[dim]),) for dim in range(rank) if dim not in summed]))
    return builder.build(linear_in((0,), (1,), (2,)))


def _larger(sizes: dict[int, int], own: dict[int, int]) -> dict[int, int]:
    return {dim: size for dim, size in own.items() if sizes.get(dim, 1) == 1}


_BILINEAR = linear_in((0,), (1,))

MATMUL: dict[str, OpEntry] = {
    "aten.mm": product_entry("i k, k j -> i j | reduce(sum): k", *_BILINEAR, algorithms=PRODUCT_ALGORITHMS),
    "aten._int_mm": product_entry("i k, k j -> i j | reduce(sum): k"),
    "aten.bmm": product_entry("b i k, b k j -> b i j | reduce(sum): k", *_BILINEAR, algorithms=PRODUCT_ALGORITHMS),
    "aten.matmul": OpEntry(_matmul, algorithms=PRODUCT_ALGORITHMS),
    "aten.mv": product_entry("i k, k -> i | reduce(sum): k", *_BILINEAR),
    "aten.dot": product_entry("k, k -> ... | reduce(sum): k", *_BILINEAR),
    "aten.vdot": product_entry("k, k -> ... | reduce(sum): k", *_BILINEAR),
    "aten.ger": product_entry("i, j -> i j", *_BILINEAR),
    "aten.outer": product_entry("i, j -> i j", *_BILINEAR),
    "aten.addmm": _product_added("i k, k j", "i j", "k"),
    "aten.baddbmm": _product_added("b i k, b k j", "b i j", "k"),
    "aten.addbmm": _product_added("b i k, b k j", "i j", "b k"),
    "aten.addmv": _product_added("i k, k", "i", "k"),
    "aten.addr": _product_added("i, j", "i j", ""),
    "aten.linear": OpEntry(_linear),
    "aten._trilinear": OpEntry(_trilinear),
}


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
