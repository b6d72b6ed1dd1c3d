"""Convolution and its gradients.

The channels of a convolution are (g i) and (g o): groups, and channels of each group. Along its spatial dims a coarse
tensor (the output; for a transposed convolution the input) and a fine one (the other) are linked: element c of the
coarse one meets the elements c * stride - padding + dilation * k of the fine one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gt.core.meta import TensorMeta
from gt.core.signatures import Arg, Input, ListArg
from gt.sharding.factors import (
    HALO,
    PASS,
    REDUCE,
    Dim,
    HaloWindow,
    OpShardingRule,
    PartialPassthrough,
    Ref,
    RuleBuilder,
)
from gt.sharding.op_calls import Expander, Expansion, LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.contraction import each_of
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.local_programs import adds_once, zeros
from gt.sharding.spec import Box, Interval, Shape, ShardingSpec


class Convolution(NamedTuple):
    """The arguments of a call, from the position `first` on. `kernel` and the lists are per spatial dim."""

    first: int
    kernel: Shape
    stride: Shape
    padding: Shape
    dilation: Shape
    transposed: bool
    output_padding: Shape
    groups: int

    def span(self, dim: int) -> int:
        """How far the last element of a window is from its first."""
        return self.dilation[dim] * (self.kernel[dim] - 1)

    def fine_from_coarse(self, dim: int, size: int) -> HaloWindow:
        """What an interval of the coarse dim needs of the fine one, which has the given size."""
        return HaloWindow(self.stride[dim], self.padding[dim], self.span(dim) - self.padding[dim], size)

    def coarse_from_fine(self, dim: int, size: int) -> HaloWindow | None:
        """The other way round; only where an element follows another one by one."""
        if self.stride[dim] != 1:
            return None
        return HaloWindow(1, self.span(dim) - self.padding[dim], self.padding[dim], size)

    def arguments(self, groups: int, cut: Sequence[int], padding: Sequence[int]) -> dict[int, Arg]:
        """What changes where the dims `cut` have the padding in the tensor, and the op pads them by `padding`."""
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
    lists = [call.arg(first + place, "") for place in (0, 1, 2, 4)]
    stride, padding, dilation, output = [each * len(kernel) if len(each) == 1 else each for each in lists]
    return Convolution(
        first, kernel, stride, padding, dilation, call.arg(first + 3, ""), output, call.arg(first + 5, "")
    )


class _Channels:
    """The factors that all tensors of a convolution share. Those of size 1 are left out: a dim of several factors
    cannot show how they are cut."""

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
        return tuple([Ref(name) for name in names if name in self._names])

    def weight(self) -> tuple[Dim, ...]:
        return (*map(self.dim, self._weight), *self._kernel)

    def tensor(self, channels: str, spatial: Sequence[Dim]) -> tuple[Dim, ...]:
        return (self.dim("n"), self.dim(channels), *spatial)


def _local_groups(conv: Convolution, channels: Interval, total: int) -> int:
    """How many groups the given channels of the input are of."""
    size = total // conv.groups
    return -(-channels[1] // size) - channels[0] // size


class _Halo(NamedTuple):
    """The operand `place` needs, along the spatial dims `dims`, what `reaches` say of the intervals computed."""

    place: int
    dims: tuple[int, ...]
    reaches: tuple[HaloWindow, ...]
    intervals: tuple[Interval, ...]

    def padded(self, builder: LocalBuilder, box: Box) -> Input:
        """The tensor with zeros for what is outside of the whole one."""
        pads = [0] * (2 * (len(box) - 2))
        for dim, reach, (start, stop) in zip(self.dims, self.reaches, self.intervals, strict=True):
            low, high = box[2 + dim]
            last = 2 * (len(box) - 3 - dim)  # pads are listed from the last dim on
            pads[last] = low - (start * reach.stride - reach.before)
            pads[last + 1] = (stop - 1) * reach.stride + reach.after + 1 - high
        if not any(pads):
            return Input(self.place)
        return builder.call("aten.constant_pad_nd.default", Input(self.place), ListArg(tuple(pads)))


def _halo(
    shard: LocalContext, place: int, reaches: Sequence[HaloWindow | None], computed: Box, axes: ShardingSpec
) -> _Halo:
    cut = [dim for dim, reach in enumerate(reaches) if reach is not None and axes.dims[2 + dim]]
    known = [reach for dim in cut if (reach := reaches[dim]) is not None]
    return _Halo(place, tuple(cut), tuple(known), tuple([computed[2 + dim] for dim in cut]))


# --- Forward ----------------------------------------------------------------------------------------------------------

_INPUT, _WEIGHT = 0, 1


def _input_reaches(conv: Convolution, sizes: Shape) -> list[HaloWindow | None]:
    if not conv.transposed:
        return [conv.fine_from_coarse(dim, size) for dim, size in enumerate(sizes)]
    plain = [conv.coarse_from_fine(dim, size) for dim, size in enumerate(sizes)]
    return [None if conv.output_padding[dim] else reach for dim, reach in enumerate(plain)]


def _convolution(call: OpCall) -> OpShardingRule | None:
    conv = _read(call, 3, _WEIGHT)
    if conv is None or len(call.inputs) != 2 + (call.tensor(2, "bias") is not None):
        return None
    builder = RuleBuilder()
    channels = _Channels(builder, conv, call.shapes[_INPUT][0], call.shapes[_WEIGHT], "i")
    reaches = _input_reaches(conv, call.shapes[_INPUT][2:])
    inner, outer = _linked(builder, reaches, call.result_shapes[0][2:], HALO)
    builder.operands = [channels.tensor("gi", inner), channels.weight()]
    builder.results = [channels.tensor("go", outer)]
    passes: tuple[PartialPassthrough, ...] = each_of((0,), (1,))
    if call.tensor(2, "bias") is not None:
        builder.operands.append((channels.dim("go"),))
        passes = each_of((0, 2), (1, 2))
    return builder.build(passes, lambda shard: _lower_convolution(conv, reaches, shard))


def _linked(
    builder: RuleBuilder, reaches: Sequence[HaloWindow | None], sizes: Shape, kind: str
) -> tuple[list[Dim], list[Dim]]:
    """The spatial dims of a tensor that is reached into, and of the one that has the factors themselves."""
    reached: list[Dim] = []
    own: list[Dim] = []
    for dim, (reach, size) in enumerate(zip(reaches, sizes, strict=True)):
        if reach is None or size == 1:
            reached.append(())
            own.append(())
        else:
            name = builder.factor(f"s{dim}", size, kind)
            reached.append((Ref(name, reach),))
            own.append((Ref(name),))
    return reached, own


def _lower_convolution(conv: Convolution, reaches: Sequence[HaloWindow | None], shard: LocalContext) -> LocalProgram:
    call = shard.call
    builder = LocalBuilder(len(call.inputs))
    bias = call.args[2] if adds_once(shard) else None
    box, result = shard.operand_box(_INPUT), shard.result_box()
    boxes = (*box, *shard.operand_box(_WEIGHT), *(result if call.outputs[0].elements else ()))
    if any(start == stop for start, stop in boxes):  # of a result that is empty as a whole, the op is asked
        value = zeros(builder, shard.result_shape(), call.outputs[0].dtype)
        if bias is not None:
            shape = ListArg((-1, *[1] * len(conv.kernel)))
            value = builder.call("aten.add.Tensor", value, builder.call("aten.view.default", bias, shape))
        return builder.finish(value)
    halo = _halo(shard, _INPUT, reaches, result, shard.results[0])
    padding = [conv.span(dim) if conv.transposed else 0 for dim in range(len(conv.kernel))]
    groups = _local_groups(conv, box[1], call.shapes[_INPUT][1])
    args = dict(enumerate(call.args)) | conv.arguments(groups, halo.dims, padding)
    args |= {0: halo.padded(builder, box), 2: bias}
    return builder.finish(builder.call(call.op, *args.values(), **call.kwargs))


# --- Backward ---------------------------------------------------------------------------------------------------------

_GRAD, _SAVED, _SAVED_WEIGHT = 0, 1, 2


class _Wanted(NamedTuple):
    """Which gradients are computed. Where only one of the input's and the weight's is, spatial dims may be cut:
    `place` is then the operand that is reached into."""

    input: bool
    weight: bool
    bias: bool

    def place(self, conv: Convolution) -> int | None:
        if self.input:
            return None if self.weight or self.bias else _GRAD
        if conv.transposed:
            return None if self.bias else _GRAD
        return _SAVED


def _gradient_reaches(call: OpCall, conv: Convolution, wanted: _Wanted) -> list[HaloWindow | None]:
    place = wanted.place(conv)
    if place is None:
        return [None] * len(conv.kernel)
    reach = conv.coarse_from_fine if wanted.input and not conv.transposed else conv.fine_from_coarse
    return [reach(dim, size) for dim, size in enumerate(call.shapes[place][2:])]


def _backward(call: OpCall) -> OpShardingRule | None:
    conv = _read(call, 4, _SAVED_WEIGHT)
    wanted = _Wanted(*call.arg(10, "output_mask"))
    if conv is None or len(call.inputs) != 3 or len(call.outputs) != sum(wanted):
        return None
    builder = RuleBuilder()
    channels = _Channels(builder, conv, call.shapes[_GRAD][0], call.shapes[_SAVED_WEIGHT], "no")
    reaches = _gradient_reaches(call, conv, wanted)
    place = wanted.place(conv)
    sizes = call.shapes[_SAVED if place in (None, _GRAD) else _GRAD][2:]
    reached, own = _linked(builder, reaches, sizes, HALO if wanted.input else REDUCE)
    grad, saved = (own, reached) if place == _SAVED else (reached, own)
    builder.operands = [channels.tensor("go", grad), channels.tensor("gi", saved), channels.weight()]
    results = [channels.tensor("gi", saved), channels.weight(), (channels.dim("go"),)]
    builder.results = [dims for dims, is_wanted in zip(results, wanted, strict=True) if is_wanted]
    return builder.build(each_of((_GRAD,)), lambda shard: _lower_backward(conv, reaches, wanted, shard))


def _lower_backward(
    conv: Convolution, reaches: Sequence[HaloWindow | None], wanted: _Wanted, shard: LocalContext
) -> LocalProgram:
    call = shard.call
    builder = LocalBuilder(len(call.inputs))
    boxes = [shard.operand_box(place) for place in (_GRAD, _SAVED, _SAVED_WEIGHT)]
    if any(start == stop for box in boxes for start, stop in box):
        return builder.finish(*_gradients_of_nothing(builder, wanted, shard))
    place = wanted.place(conv) or _GRAD
    own = _GRAD if place == _SAVED else _SAVED
    halo = _halo(shard, place, reaches, boxes[own], shard.operands[own])
    padding = [conv.span(dim) if wanted.input and not conv.transposed else 0 for dim in range(len(conv.kernel))]
    groups = _local_groups(conv, boxes[_SAVED][1], call.shapes[_SAVED][1])
    args = dict(enumerate(call.args)) | conv.arguments(groups, halo.dims, padding)
    args[place] = halo.padded(builder, boxes[place])
    if wanted.bias:
        args[3] = ListArg((boxes[_GRAD][1][1] - boxes[_GRAD][1][0],))
    return builder.finish(*builder.repeat(call, *args.values(), **call.kwargs))


def _gradients_of_nothing(builder: LocalBuilder, wanted: _Wanted, shard: LocalContext) -> list[Input]:
    """Zeros; but the gradient of the bias needs the gradient of the result only, which may be there."""
    made: list[Input] = []
    outputs = shard.call.outputs
    for place, meta in enumerate(outputs):
        if wanted.bias and place == len(outputs) - 1:
            dims = [dim for dim in range(len(shard.call.shapes[_GRAD])) if dim != 1]
            made.append(builder.call("aten.sum.dim_IntList", Input(_GRAD), ListArg(tuple(dims))))
        else:
            made.append(zeros(builder, shard.result_shape(place), meta.dtype))
    return made


def _gradients_apart(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    """One gradient at a time, where spatial dims are cut: the gradients of the input and of the weight need other
    neighbours."""
    wanted = _Wanted(*call.arg(10, "output_mask"))
    if sum(wanted) < 2 or not any(axes for spec in specs[:2] for axes in spec.dims[2:]):
        return None
    expander = Expander(len(call.inputs))
    made = []
    outputs = iter(call.outputs)
    for place, is_wanted in enumerate(wanted):
        if is_wanted:
            made.append(_gradient(expander, call, place, next(outputs)))
    return expander.finish(*made)


def _gradient(expander: Expander, call: OpCall, place: int, meta: TensorMeta) -> Input:
    if place == 2:
        dims = [dim for dim in range(len(call.shapes[_GRAD])) if dim != 1]
        return expander.one("aten.sum.dim_IntList", (Input(_GRAD), ListArg(tuple(dims))), meta)
    mask = ListArg(tuple([place == own for own in range(3)]))
    return expander.call(call.op, (*call.args[:10], mask), (meta,), places=(place,))[0]


CONVOLUTION: dict[str, OpEntry] = {
    "aten.convolution": OpEntry(_convolution),
    "aten.convolution_backward": OpEntry(_backward, _gradients_apart),
}
