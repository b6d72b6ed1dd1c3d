"""Convolution and its gradients.

The channels of a convolution are (g i) and (g o): groups, and channels of each group. Of its two spatial tensors one is
coarse (the output; for a transposed convolution the input) and the other fine: element c of the coarse one depends on
the elements c * stride - padding + dilation * k of the fine one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gt.core.meta import TensorMeta
from gt.core.signatures import Arg, Input, ListArg
from gt.sharding.boxes import Box, Interval, Shape
from gt.sharding.factors import (
    HALO,
    PASS,
    REDUCE,
    Dim,
    FactorRef,
    HaloWindow,
    OpShardingRule,
    PartialPassthrough,
    RuleBuilder,
)
from gt.sharding.op_calls import Expansion, LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.matmul import linear_in
from gt.sharding.rules.support.expansion_builder import ExpansionBuilder
from gt.sharding.rules.support.local_programs import adds_once, zeros
from gt.sharding.rules.support.whole_spatial import spatial_rule
from gt.sharding.spec import ShardingSpec


class Convolution(NamedTuple):
    """The arguments of a call, which start at position `first`. `kernel` and the lists are per spatial dim."""

    first: int
    kernel: Shape
    stride: Shape
    padding: Shape
    dilation: Shape
    transposed: bool
    output_padding: Shape
    groups: int

    def span(self, dim: int) -> int:
        """The distance from the first to the last element of a window."""
        return self.dilation[dim] * (self.kernel[dim] - 1)

    def fine_from_coarse(self, dim: int, size: int) -> HaloWindow:
        """The elements of the fine dim, of the given size, that elements of the coarse dim need."""
        return HaloWindow(self.stride[dim], self.padding[dim], self.span(dim) - self.padding[dim], size)

    def coarse_from_fine(self, dim: int, size: int) -> HaloWindow | None:
        """The elements of the coarse dim, of the given size, that elements of the fine dim need; None for a stride
        other than 1."""
        if self.stride[dim] != 1:
            return None
        return HaloWindow(1, self.span(dim) - self.padding[dim], self.padding[dim], size)

    def arguments(self, groups: int, cut: Sequence[int], padding: Sequence[int]) -> dict[int, Arg]:
        """The changed arguments of a local call: its operand already has the convolution's padding along the dims
        `cut`, where the op pads by `padding` instead."""
        own = [padding[dim] if dim in cut else size for dim, size in enumerate(self.padding)]
        output = [0 if dim in cut else size for dim, size in enumerate(self.output_padding)]
        return {
            self.first + 1: ListArg(tuple(own)),
            self.first + 4: ListArg(tuple(output)),
            self.first + 5: groups,
        }


def _read(call: OpCall, first: int, weight: int) -> Convolution | None:
    kernel = call.shapes[weight][2:]
    if any(len(shape) != len(kernel) + 2 for shape in call.shapes[: weight + 1]):
        return None
    lists = [call.arg(first + position, "") for position in (0, 1, 2, 4)]
    stride, padding, dilation, output = [each * len(kernel) if len(each) == 1 else each for each in lists]
    return Convolution(
        first, kernel, stride, padding, dilation, call.arg(first + 3, ""), output, call.arg(first + 5, "")
    )


class _ChannelFactors:
    """The factors of batch and channels, which the tensors of a convolution share. Factors of size 1 are left out:
    cutting them cannot be expressed in a dim of several factors."""

    def __init__(
        self, builder: RuleBuilder, conv: Convolution, batch: int, weight: Shape, summed: Sequence[str]
    ) -> None:
        per_group = (weight[1], weight[0] // max(conv.groups, 1))
        out, into = per_group if conv.transposed else reversed(per_group)
        sizes = {"n": batch, "g": conv.groups, "o": out, "i": into}
        self._names = [name for name, size in sizes.items() if size != 1]
        for name in self._names:
            builder.factor(name, sizes[name], REDUCE if name in summed else PASS)
        self._weight = ("gi", "o") if conv.transposed else ("go", "i")
        self._kernel: tuple[Dim, ...] = ((),) * len(conv.kernel)

    def dim(self, names: str) -> Dim:
        return tuple([FactorRef(name) for name in names if name in self._names])

    def weight(self) -> tuple[Dim, ...]:
        return (*map(self.dim, self._weight), *self._kernel)

    def tensor(self, channels: str, spatial: Sequence[Dim]) -> tuple[Dim, ...]:
        return (self.dim("n"), self.dim(channels), *spatial)


def _local_groups(conv: Convolution, channels: Interval, total: int) -> int:
    """The number of groups that an interval of input channels belongs to."""
    size = total // conv.groups
    return -(-channels[1] // size) - channels[0] // size


class _Halo(NamedTuple):
    """The halo of one operand: along each of the spatial `dims`, the elements that the computed interval needs."""

    position: int
    dims: tuple[int, ...]
    windows: tuple[HaloWindow, ...]
    intervals: tuple[Interval, ...]

    def pad_tensor(self, builder: LocalBuilder, box: Box) -> Input:
        """The operand, padded with zeros for the elements of the halo that are outside the whole tensor."""
        pads = [0] * (2 * (len(box) - 2))
        for dim, window, (start, stop) in zip(self.dims, self.windows, self.intervals, strict=True):
            low, high = box[2 + dim]
            last = 2 * (len(box) - 3 - dim)  # torch lists pads from the last dim on
            pads[last] = low - (start * window.stride - window.before)
            pads[last + 1] = (stop - 1) * window.stride + window.after + 1 - high
        if not any(pads):
            return Input(self.position)
        return builder.call("aten.constant_pad_nd.default", Input(self.position), ListArg(tuple(pads)))


def _halo(
    shard: LocalContext, position: int, windows: Sequence[HaloWindow | None], computed: Box, axes: ShardingSpec
) -> _Halo:
    cut = [dim for dim, window in enumerate(windows) if window is not None and axes.dims[2 + dim]]
    known = [window for dim in cut if (window := windows[dim]) is not None]
    return _Halo(position, tuple(cut), tuple(known), tuple([computed[2 + dim] for dim in cut]))


# --- Forward ----------------------------------------------------------------------------------------------------------

_INPUT, _WEIGHT = 0, 1


def _input_windows(conv: Convolution, sizes: Shape) -> list[HaloWindow | None]:
    if not conv.transposed:
        return [conv.fine_from_coarse(dim, size) for dim, size in enumerate(sizes)]
    plain = [conv.coarse_from_fine(dim, size) for dim, size in enumerate(sizes)]
    return [None if conv.output_padding[dim] else window for dim, window in enumerate(plain)]


def _convolution(call: OpCall) -> OpShardingRule | None:
    conv = _read(call, 3, _WEIGHT)
    if conv is None or len(call.inputs) != 2 + (call.tensor(2, "bias") is not None):
        return None
    builder = RuleBuilder()
    channels = _ChannelFactors(builder, conv, call.shapes[_INPUT][0], call.shapes[_WEIGHT], "i")
    windows = _input_windows(conv, call.shapes[_INPUT][2:])
    inner, outer = _linked(builder, windows, call.result_shapes[0][2:], HALO)
    builder.operands = [channels.tensor("gi", inner), channels.weight()]
    builder.results = [channels.tensor("go", outer)]
    passthroughs: tuple[PartialPassthrough, ...] = linear_in((0,), (1,))
    if call.tensor(2, "bias") is not None:
        builder.operands.append((channels.dim("go"),))
        passthroughs = linear_in((0, 2), (1, 2))
    return builder.build(passthroughs, lambda shard: _lower_convolution(conv, windows, shard))


def _linked(
    builder: RuleBuilder, windows: Sequence[HaloWindow | None], sizes: Shape, role: str
) -> tuple[list[Dim], list[Dim]]:
    """The spatial dims of the tensor with halos, and of the tensor whose dims are the factors."""
    reached: list[Dim] = []
    own: list[Dim] = []
    for dim, (window, size) in enumerate(zip(windows, sizes, strict=True)):
        if window is None or size == 1:
            reached.append(())
            own.append(())
        else:
            name = builder.factor(f"s{dim}", size, role)
            reached.append((FactorRef(name, window),))
            own.append((FactorRef(name),))
    return reached, own


def _lower_convolution(conv: Convolution, windows: Sequence[HaloWindow | None], shard: LocalContext) -> LocalProgram:
    call = shard.call
    builder = LocalBuilder(len(call.inputs))
    bias = call.args[2] if adds_once(shard) else None
    box, result = shard.operand_box(_INPUT), shard.result_box()
    boxes = (*box, *shard.operand_box(_WEIGHT), *(result if call.outputs[0].elements else ()))
    if any(start == stop for start, stop in boxes):  # an empty whole result is left to the op, which may refuse it
        value = zeros(builder, shard.result_shape(), call.outputs[0].dtype)
        if bias is not None:
            shape = ListArg((-1, *[1] * len(conv.kernel)))
            value = builder.call("aten.add.Tensor", value, builder.call("aten.view.default", bias, shape))
        return builder.finish(value)
    halo = _halo(shard, _INPUT, windows, result, shard.results[0])
    padding = [conv.span(dim) if conv.transposed else 0 for dim in range(len(conv.kernel))]
    groups = _local_groups(conv, box[1], call.shapes[_INPUT][1])
    args = dict(enumerate(call.args)) | conv.arguments(groups, halo.dims, padding)
    args |= {0: halo.pad_tensor(builder, box), 2: bias}
    return builder.finish(builder.call(call.op, *args.values(), **call.kwargs))


# --- Backward ---------------------------------------------------------------------------------------------------------

_GRAD, _SAVED, _SAVED_WEIGHT = 0, 1, 2


class _OutputMask(NamedTuple):
    """The gradients that a call computes."""

    input: bool
    weight: bool
    bias: bool

    def halo_operand(self, conv: Convolution) -> int | None:
        """The operand that needs a halo if spatial dims are cut; None if they cannot be cut, since the gradients of
        input and weight need different halos."""
        if self.input:
            return None if self.weight or self.bias else _GRAD
        if conv.transposed:
            return None if self.bias else _GRAD
        return _SAVED


def _gradient_windows(call: OpCall, conv: Convolution, output_mask: _OutputMask) -> list[HaloWindow | None]:
    position = output_mask.halo_operand(conv)
    if position is None:
        return [None] * len(conv.kernel)
    window = conv.coarse_from_fine if output_mask.input and not conv.transposed else conv.fine_from_coarse
    return [window(dim, size) for dim, size in enumerate(call.shapes[position][2:])]


def _backward(call: OpCall) -> OpShardingRule | None:
    conv = _read(call, 4, _SAVED_WEIGHT)
    output_mask = _OutputMask(*call.arg(10, "output_mask"))
    if conv is None or len(call.inputs) != 3 or len(call.outputs) != sum(output_mask):
        return None
    builder = RuleBuilder()
    channels = _ChannelFactors(builder, conv, call.shapes[_GRAD][0], call.shapes[_SAVED_WEIGHT], "no")
    windows = _gradient_windows(call, conv, output_mask)
    position = output_mask.halo_operand(conv)
    sizes = call.shapes[_SAVED if position in (None, _GRAD) else _GRAD][2:]
    reached, own = _linked(builder, windows, sizes, HALO if output_mask.input else REDUCE)
    grad, saved = (own, reached) if position == _SAVED else (reached, own)
    builder.operands = [channels.tensor("go", grad), channels.tensor("gi", saved), channels.weight()]
    results = [channels.tensor("gi", saved), channels.weight(), (channels.dim("go"),)]
    builder.results = [dims for dims, is_wanted in zip(results, output_mask, strict=True) if is_wanted]
    return builder.build(linear_in((_GRAD,)), lambda shard: _lower_backward(conv, windows, output_mask, shard))


def _lower_backward(
    conv: Convolution, windows: Sequence[HaloWindow | None], output_mask: _OutputMask, shard: LocalContext
) -> LocalProgram:
    call = shard.call
    builder = LocalBuilder(len(call.inputs))
    boxes = [shard.operand_box(position) for position in (_GRAD, _SAVED, _SAVED_WEIGHT)]
    if any(start == stop for box in boxes for start, stop in box):
        return builder.finish(*_gradients_if_empty(builder, output_mask, shard))
    position = output_mask.halo_operand(conv) or _GRAD
    own = _GRAD if position == _SAVED else _SAVED
    halo = _halo(shard, position, windows, boxes[own], shard.operands[own])
    padding = [conv.span(dim) if output_mask.input and not conv.transposed else 0 for dim in range(len(conv.kernel))]
    groups = _local_groups(conv, boxes[_SAVED][1], call.shapes[_SAVED][1])
    args = dict(enumerate(call.args)) | conv.arguments(groups, halo.dims, padding)
    args[position] = halo.pad_tensor(builder, boxes[position])
    if output_mask.bias:
        args[3] = ListArg((boxes[_GRAD][1][1] - boxes[_GRAD][1][0],))
    return builder.finish(*builder.repeat(call, *args.values(), **call.kwargs))


def _gradients_if_empty(builder: LocalBuilder, output_mask: _OutputMask, shard: LocalContext) -> list[Input]:
    """Gradients on a worker with an empty operand: zeros, except that the gradient of the bias needs only the gradient
    of the result, which may not be empty."""
    gradients: list[Input] = []
    outputs = shard.call.outputs
    for position, meta in enumerate(outputs):
        if output_mask.bias and position == len(outputs) - 1:
            dims = [dim for dim in range(len(shard.call.shapes[_GRAD])) if dim != 1]
            gradients.append(builder.call("aten.sum.dim_IntList", Input(_GRAD), ListArg(tuple(dims))))
        else:
            gradients.append(zeros(builder, shard.result_shape(position), meta.dtype))
    return gradients


def _gradients_apart(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    """One call per gradient if spatial dims are cut: the gradients of input and weight need different halos."""
    output_mask = _OutputMask(*call.arg(10, "output_mask"))
    if sum(output_mask) < 2 or not any(axes for spec in specs[:2] for axes in spec.dims[2:]):
        return None
    expansion = ExpansionBuilder(call)
    gradients = []
    outputs = iter(call.outputs)
    for position, is_wanted in enumerate(output_mask):
        if is_wanted:
            gradients.append(_gradient(expansion, call, position, next(outputs)))
    return expansion.finish(*gradients)


def _gradient(expansion: ExpansionBuilder, call: OpCall, position: int, meta: TensorMeta) -> Input:
    if position == 2:
        dims = [dim for dim in range(len(call.shapes[_GRAD])) if dim != 1]
        return expansion.call("aten.sum.dim_IntList", (Input(_GRAD), ListArg(tuple(dims))), meta)
    mask = ListArg(tuple([position == own for own in range(3)]))
    return expansion.call_multi(call.op, (*call.args[:10], mask), (meta,), output_positions=(position,))[0]


CONVOLUTION: dict[str, OpEntry] = {
    "aten.conv_tbc": spatial_rule("1 b 1, 1 1 o, o -> 1 b o"),
    "aten.convolution": OpEntry(_convolution),
    "aten.convolution_backward": OpEntry(_backward, _gradients_apart),
}
