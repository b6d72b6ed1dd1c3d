"""Convolution, pooling and resampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gt.core.signatures import Input, ListArg
from gt.sharding.factors import HALO, Dim, HaloWindow, OpShardingRule, PartialPassthrough, Ref, RuleBuilder, bind
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, Lowering, OpCall
from gt.sharding.rules.convolution import CONVOLUTION
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.dtypes import is_complex, is_floating
from gt.sharding.rules.support.local_programs import same_op, unless_empty
from gt.sharding.spec import Shape

LINEAR = (PartialPassthrough(frozenset({0})),)


def _exact(call: OpCall, passes: Sequence[PartialPassthrough]) -> tuple[PartialPassthrough, ...]:
    """Averages and interpolations of whole numbers are rounded: sums of them do not pass."""
    dtype = call.inputs[0].dtype
    return tuple([p for p in passes if p.kind != "sum" or is_floating(dtype) or is_complex(dtype)])


# --- Ops on planes: only dims before the last ones can be cut ---------------------------------------------------------


def _text(text: str, *passes: PartialPassthrough, lowering: Lowering = same_op) -> OpEntry:
    return OpEntry(
        lambda call: bind(
            text, call.shapes, call.result_shapes, passes=_exact(call, passes), lowering=unless_empty(lowering)
        )
    )


def _planes(spatial: int, *passes: PartialPassthrough, lowering: Lowering = same_op) -> OpEntry:
    """All tensors have the same dims but for the last ones, which are whole."""
    dims = " ".join(["...", *["1"] * spatial])

    def rule(call: OpCall) -> OpShardingRule:
        text = f"{', '.join([dims] * len(call.inputs))} -> {', '.join([dims] * len(call.outputs))}"
        return bind(text, call.shapes, call.result_shapes, passes=_exact(call, passes), lowering=unless_empty(lowering))

    return OpEntry(rule)


def _of_size(position: int) -> Lowering:
    """The argument at a position is the size of the result."""
    return lambda shard: same_op(shard, {position: ListArg(shard.result_shape())})


def _grid_of_batch(shard: LocalContext) -> LocalProgram:
    batch = shard.operand_shape(0)[0]
    return same_op(shard, {1: ListArg((batch, *shard.call.arg(1, "size")[1:]))})


def _pixels(text: str) -> OpEntry:
    def rule(call: OpCall) -> OpShardingRule:
        factor = call.arg(1, "upscale_factor")
        sizes = {"a": factor, "b": factor}
        return bind(text, call.shapes, call.result_shapes, sizes, LINEAR, unless_empty())

    return OpEntry(rule)


def _fractional_pool(spatial: int) -> OpEntry:
    """The samples, two or three for each plane, are the other operand."""
    dims = " ".join(["n c", *["1"] * spatial])

    def rule(call: OpCall) -> OpShardingRule | None:
        if len(call.shapes[0]) != spatial + 2:
            return None
        return bind(f"{dims}, n c 1 -> {dims}, {dims}", call.shapes, call.result_shapes, lowering=unless_empty())

    return OpEntry(rule)


def _sampler_backward(spatial: int) -> OpEntry:
    """Every point of the grid takes from the input, and every channel moves the grid."""
    plane, grid = " ".join(["1"] * spatial), " ".join("pqr"[:spatial])

    def rule(call: OpCall) -> OpShardingRule | None:
        gives = [f"n c {plane}"] * call.arg(6, "output_mask")[0]
        gives += [f"n {grid} 1"] * (len(call.outputs) - len(gives))
        text = f"n c {grid}, n c {plane}, n {grid} 1 -> {', '.join(gives)} | reduce(sum): c {grid}"
        return bind(text, call.shapes, call.result_shapes, passes=_exact(call, LINEAR), lowering=unless_empty())

    return OpEntry(rule)


# --- Pooling ----------------------------------------------------------------------------------------------------------


class _Pool(NamedTuple):
    """Per spatial dim: what a window of the result needs of the input, and how far windows are apart. The input is
    taken from a multiple of the stride on, so that the op's own padding falls where it would; windows before the first
    one that is asked for are dropped."""

    reaches: tuple[HaloWindow, ...]

    def lower(self, shard: LocalContext) -> LocalProgram:
        call = shard.call
        builder = LocalBuilder(len(call.inputs))
        first = len(call.shapes[0]) - len(self.reaches)
        box, result = shard.operand_box(0)[first:], shard.result_box()[first:]
        values = list(builder.repeat(call, *call.args, **call.kwargs))
        for dim, ((low, _), (start, stop), reach) in enumerate(zip(box, result, self.reaches, strict=True)):
            if shard.results[0].dims[first + dim]:
                skipped = low // reach.stride
                values = [
                    builder.call("aten.slice.Tensor", value, first + dim, start - skipped, stop - skipped)
                    for value in values
                ]
        if len(values) > 1 and any(shard.results[0].dims[first:]):
            values[1] = _whole_index(builder, values[1], box, call.shapes[0][first:])
        return builder.finish(*values)


def _whole_index(builder: LocalBuilder, index: Input, box: Sequence[tuple[int, int]], sizes: Shape) -> Input:
    """Flat indices of places in a box as flat indices in the whole."""
    total: Input | None = None
    inner = outer = 1
    for (start, stop), size in zip(reversed(box), reversed(sizes), strict=True):
        along = builder.call("aten.div.Tensor_mode", index, inner, rounding_mode="floor") if inner > 1 else index
        along = builder.call("aten.remainder.Scalar", along, stop - start)
        along = builder.call("aten.add.Scalar", along, start)
        along = builder.call("aten.mul.Scalar", along, outer)
        total = along if total is None else builder.call("aten.add.Tensor", total, along)
        inner, outer = inner * (stop - start), outer * size
    assert total is not None
    return total


def _per_dim(value: int | Sequence[int], spatial: int) -> Sequence[int]:
    if isinstance(value, int):
        return (value,) * spatial
    return tuple(value) * spatial if len(value) == 1 else tuple(value)


def _pool(spatial: int, *passes: PartialPassthrough, dilates: bool = False) -> OpEntry:
    """Windows along the last dims. Stride and padding follow the kernel, then dilation if the op has one."""

    def rule(call: OpCall) -> OpShardingRule:
        builder = RuleBuilder()
        first = len(call.shapes[0]) - spatial
        kernel = _per_dim(call.arg(1, "kernel_size"), spatial)
        strides = _per_dim(call.arg(2, "stride", ()), spatial) or kernel
        paddings = _per_dim(call.arg(3, "padding", 0), spatial)
        dilations = _per_dim(call.arg(4, "dilation", 1) if dilates else 1, spatial)
        reaches = []
        operand: list[Dim] = []
        for dim, size in enumerate(call.shapes[0][:first]):
            operand.append((Ref(builder.factor(f"b{dim}", size)),))
        result = list(operand)
        for dim, (width, stride, padding, dilation) in enumerate(
            zip(kernel, strides, paddings, dilations, strict=True)
        ):
            span = dilation * (width - 1)
            margin = span if spatial == 3 else 0  # torch refuses volumes smaller than the kernel, even if padded
            before = -(-(padding + margin) // stride) * stride
            reach = HaloWindow(stride, before, span - padding + min(margin, padding), call.shapes[0][first + dim])
            name = builder.factor(f"s{dim}", call.result_shapes[0][first + dim], HALO)
            reaches.append(reach)
            operand.append((Ref(name, reach),))
            result.append((Ref(name),))
        builder.operands = [tuple(operand)]
        builder.results = [tuple(result)] * len(call.outputs)
        return builder.build(_exact(call, passes), unless_empty(_Pool(tuple(reaches)).lower))

    return OpEntry(rule)


# --- The table --------------------------------------------------------------------------------------------------------


def _each(entry: OpEntry, names: str) -> dict[str, OpEntry]:
    return {f"aten.{name}": entry for name in names.split()}


SPATIAL: dict[str, OpEntry] = {
    **CONVOLUTION,
    "aten.conv_tbc": _text("1 b 1, 1 1 o, o -> 1 b o"),
    "aten.avg_pool2d": _pool(2, *LINEAR),
    "aten.avg_pool3d": _pool(3, *LINEAR),
    "aten.max_pool2d_with_indices": _pool(2, dilates=True),
    "aten.max_pool3d_with_indices": _pool(3, dilates=True),
    "aten.fractional_max_pool2d": _fractional_pool(2),
    "aten.fractional_max_pool3d": _fractional_pool(3),
    "aten.adaptive_max_pool2d": _planes(2),
    "aten.adaptive_max_pool3d": _planes(3),
    **_each(_planes(1, *LINEAR), "reflection_pad1d replication_pad1d reflection_pad1d_backward"),
    **_each(_planes(1, *LINEAR), "replication_pad1d_backward"),
    **_each(
        _planes(2, *LINEAR),
        """
        _adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_max_pool2d_backward avg_pool2d_backward
        fractional_max_pool2d_backward max_pool2d_with_indices_backward max_unpool2d
        reflection_pad2d reflection_pad2d_backward replication_pad2d replication_pad2d_backward
        """,
    ),
    **_each(
        _planes(3, *LINEAR),
        """
        _adaptive_avg_pool3d _adaptive_avg_pool3d_backward adaptive_max_pool3d_backward avg_pool3d_backward
        fractional_max_pool3d_backward max_pool3d_with_indices_backward max_unpool3d
        reflection_pad3d reflection_pad3d_backward replication_pad3d replication_pad3d_backward
        """,
    ),
    **_each(_planes(1, *LINEAR), "upsample_linear1d upsample_nearest1d _upsample_nearest_exact1d"),
    **_each(
        _planes(2, *LINEAR),
        """
        upsample_bicubic2d upsample_bilinear2d upsample_nearest2d _upsample_nearest_exact2d
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_lanczos2d_aa
        """,
    ),
    **_each(_planes(3, *LINEAR), "upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d"),
    **_each(
        _planes(1, *LINEAR, lowering=_of_size(2)),
        "upsample_linear1d_backward upsample_nearest1d_backward _upsample_nearest_exact1d_backward",
    ),
    **_each(
        _planes(2, *LINEAR, lowering=_of_size(2)),
        """
        upsample_bicubic2d_backward upsample_bilinear2d_backward upsample_nearest2d_backward
        _upsample_nearest_exact2d_backward _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa_backward
        _upsample_lanczos2d_aa_backward
        """,
    ),
    **_each(
        _planes(3, *LINEAR, lowering=_of_size(2)),
        "upsample_nearest3d_backward upsample_trilinear3d_backward _upsample_nearest_exact3d_backward",
    ),
    "aten.affine_grid_generator": OpEntry(
        lambda call: bind(
            f"n 1 1 -> n {'1 ' * (len(call.result_shapes[0]) - 1)}",
            call.shapes,
            call.result_shapes,
            passes=LINEAR,
            lowering=unless_empty(_grid_of_batch),
        )
    ),
    "aten.grid_sampler_2d": _text("n c 1 1, n p q 1 -> n c p q", *LINEAR),
    "aten._grid_sampler_2d_cpu_fallback": _text("n c 1 1, n p q 1 -> n c p q", *LINEAR),
    "aten.grid_sampler_3d": _text("n c 1 1 1, n p q r 1 -> n c p q r", *LINEAR),
    "aten.grid_sampler_2d_backward": _sampler_backward(2),
    "aten.grid_sampler_3d_backward": _sampler_backward(3),
    "aten.pixel_shuffle": _pixels("... (c a b) h w -> ... c (h a) (w b) | whole: a b"),
    "aten.pixel_unshuffle": _pixels("... c (h a) (w b) -> ... (c a b) h w | whole: a b"),
    "aten.channel_shuffle": _text("n 1 ... -> n 1 ...", *LINEAR),
    "aten.im2col": _text("... c 1 1 -> ... (c k) 1 | whole: k", *LINEAR),
    "aten.col2im": _text("... (c k) 1 -> ... c 1 1 | whole: k", *LINEAR),
}
