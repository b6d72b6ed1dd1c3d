"""Pooling. Windows of a cut spatial dim reach into the neighbouring shards: halos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gt.core.signatures import Input
from gt.sharding.boxes import Shape
from gt.sharding.factors import (
    HALO,
    LINEAR,
    Dim,
    FactorRef,
    HaloWindow,
    OpShardingRule,
    PartialPassthrough,
    RuleBuilder,
    bind,
)
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.entry import OpEntry, for_ops
from gt.sharding.rules.support.local_programs import zeros_if_empty
from gt.sharding.rules.support.whole_spatial import exact_passthroughs, whole_spatial_dims


class _PoolingWindows(NamedTuple):
    """Per spatial dim, the input elements that an element of the result needs. A worker's part of the input starts at a
    multiple of the stride, so that the op's own padding falls on the same elements as in the whole tensor; results that
    belong to other workers are dropped."""

    windows: tuple[HaloWindow, ...]

    def lower(self, shard: LocalContext) -> LocalProgram:
        call = shard.call
        builder = LocalBuilder(len(call.inputs))
        first = len(call.shapes[0]) - len(self.windows)
        box, result = shard.operand_box(0)[first:], shard.result_box()[first:]
        values = list(builder.repeat(call, *call.args, **call.kwargs))
        for dim, ((low, _), (start, stop), window) in enumerate(zip(box, result, self.windows, strict=True)):
            if shard.results[0].dims[first + dim]:
                skipped = low // window.stride
                values = [
                    builder.call("aten.slice.Tensor", value, first + dim, start - skipped, stop - skipped)
                    for value in values
                ]
        if len(values) > 1 and any(shard.results[0].dims[first:]):
            values[1] = _to_whole_index(builder, values[1], box, call.shapes[0][first:])
        return builder.finish(*values)


def _to_whole_index(builder: LocalBuilder, index: Input, box: Sequence[tuple[int, int]], sizes: Shape) -> Input:
    """Flat indices in a box as flat indices in the whole tensor."""
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


def _pool(spatial: int, *passthroughs: PartialPassthrough, dilates: bool = False) -> OpEntry:
    """A pooling along the last `spatial` dims. The arguments are kernel, stride, padding, and dilation if `dilates`."""

    def rule(call: OpCall) -> OpShardingRule:
        builder = RuleBuilder()
        first = len(call.shapes[0]) - spatial
        kernel = _per_dim(call.arg(1, "kernel_size"), spatial)
        strides = _per_dim(call.arg(2, "stride", ()), spatial) or kernel
        paddings = _per_dim(call.arg(3, "padding", 0), spatial)
        dilations = _per_dim(call.arg(4, "dilation", 1) if dilates else 1, spatial)
        windows = []
        operand: list[Dim] = []
        for dim, size in enumerate(call.shapes[0][:first]):
            operand.append((FactorRef(builder.factor(f"b{dim}", size)),))
        result = list(operand)
        for dim, (width, stride, padding, dilation) in enumerate(
            zip(kernel, strides, paddings, dilations, strict=True)
        ):
            span = dilation * (width - 1)
            margin = span if spatial == 3 else 0  # torch refuses volumes smaller than the kernel, even if padded
            before = -(-(padding + margin) // stride) * stride
            window = HaloWindow(stride, before, span - padding + min(margin, padding), call.shapes[0][first + dim])
            name = builder.factor(f"s{dim}", call.result_shapes[0][first + dim], HALO)
            windows.append(window)
            operand.append((FactorRef(name, window),))
            result.append((FactorRef(name),))
        builder.operands = [tuple(operand)]
        builder.results = [tuple(result)] * len(call.outputs)
        return builder.build(
            exact_passthroughs(call, passthroughs), zeros_if_empty(_PoolingWindows(tuple(windows)).lower)
        )

    return OpEntry(rule)


def _fractional_pool(spatial: int) -> OpEntry:
    """A fractional max pooling; its second operand has two or three random samples for each plane."""
    dims = " ".join(["n c", *["1"] * spatial])

    def rule(call: OpCall) -> OpShardingRule | None:
        if len(call.shapes[0]) != spatial + 2:
            return None
        return bind(f"{dims}, n c 1 -> {dims}, {dims}", call.shapes, call.result_shapes, lowering=zeros_if_empty())

    return OpEntry(rule)


POOLING: dict[str, OpEntry] = {
    "aten.avg_pool2d": _pool(2, *LINEAR),
    "aten.avg_pool3d": _pool(3, *LINEAR),
    "aten.max_pool2d_with_indices": _pool(2, dilates=True),
    "aten.max_pool3d_with_indices": _pool(3, dilates=True),
    "aten.fractional_max_pool2d": _fractional_pool(2),
    "aten.fractional_max_pool3d": _fractional_pool(3),
    "aten.adaptive_max_pool2d": whole_spatial_dims(2),
    "aten.adaptive_max_pool3d": whole_spatial_dims(3),
    **for_ops(
        whole_spatial_dims(2, *LINEAR),
        """
        _adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_max_pool2d_backward avg_pool2d_backward
        fractional_max_pool2d_backward max_pool2d_with_indices_backward max_unpool2d
        """,
    ),
    **for_ops(
        whole_spatial_dims(3, *LINEAR),
        """
        _adaptive_avg_pool3d _adaptive_avg_pool3d_backward adaptive_max_pool3d_backward avg_pool3d_backward
        fractional_max_pool3d_backward max_pool3d_with_indices_backward max_unpool3d
        """,
    ),
}
