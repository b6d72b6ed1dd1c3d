"""Slices and rows of tensors, their backward and scatter ops, and constant padding.

A slice of a cut dim stays where its elements are: its shards are uneven, and some may be empty.
"""

from __future__ import annotations

from gt.core.signatures import Arg, Input, ListArg
from gt.sharding.boxes import Box, Shape
from gt.sharding.factors import MASK, Dim, FactorRef, OpShardingRule, RuleBuilder, Window
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.dims import dim_factors, wrap_dim
from gt.sharding.rules.support.element_moves import absent_tensor, all_partial_kinds, merge_kind
from gt.sharding.rules.support.local_programs import pad_tensor, single_call


def window_dim(dim: Dim, size: int, window: Window) -> Dim:
    """A dim that shows some elements of another dim, which has the given size."""
    (ref,) = dim
    return dim if window == Window(0, size) else (FactorRef(ref.factor, window),)


# --- Slices -----------------------------------------------------------------------------------------------------------


class _Slice:
    """A slice of a tensor of a given shape, with normalized bounds."""

    def __init__(self, shape: Shape, dim: int, start: int | None, stop: int | None, step: int) -> None:
        self.dim = wrap_dim(dim, len(shape))
        positions = range(*slice(start, stop, step).indices(shape[self.dim]))
        self.size = shape[self.dim]
        self.window = Window(positions.start, len(positions), step)

    @classmethod
    def of(cls, call: OpCall, shape: Shape, first: int) -> _Slice:
        """The slice named by the arguments that start at position `first`."""
        bounds = call.arg(first + 1, "start"), call.arg(first + 2, "end")
        return cls(shape, call.arg(first, "dim", 0), *bounds, call.arg(first + 3, "step", 1))

    def dims(self, dims: list[Dim]) -> tuple[Dim, ...]:
        return (*dims[: self.dim], window_dim(dims[self.dim], self.size, self.window), *dims[self.dim + 1 :])

    def local(self, whole: Box, part: Box) -> tuple[int, int, int, int]:
        """The arguments dim, start, stop and step of the slice on one worker, from its boxes of tensor and slice."""
        (first, stop), (corner, _) = part[self.dim], whole[self.dim]
        if first == stop:
            return self.dim, 0, 0, self.window.step
        start = self.window.offset + first * self.window.step - corner
        return self.dim, start, start + (stop - first - 1) * self.window.step + 1, self.window.step


def _slice(call: OpCall) -> OpShardingRule:
    return _sliced(call, _Slice.of(call, call.shapes[0], 1), call.op)


def _narrow_copy(op: str) -> OpEntry:
    def rule(call: OpCall) -> OpShardingRule:
        shape, dim = call.shapes[0], call.arg(1, "dim")
        start = call.arg(2, "start") % max(shape[dim], 1) if call.arg(2, "start") < 0 else call.arg(2, "start")
        return _sliced(call, _Slice(shape, dim, start, start + call.arg(3, "length"), 1), op)

    return OpEntry(rule)


def _sliced(call: OpCall, part: _Slice, op: str) -> OpShardingRule:
    builder = RuleBuilder()
    dims = dim_factors(builder, call.shapes[0])
    builder.operands.append(tuple(dims))
    builder.results.append(part.dims(dims))

    def lower(shard: LocalContext) -> LocalProgram:
        return single_call(shard, op, Input(0), *part.local(shard.operand_box(0), shard.result_box()))

    return builder.build(all_partial_kinds(call, 0), lower)


def _slice_backward(call: OpCall) -> OpShardingRule:
    part = _Slice.of(call, call.result_shapes[0], 2)
    builder = RuleBuilder()
    dims = dim_factors(builder, call.result_shapes[0])
    builder.operands.append(part.dims(dims))
    builder.results.append(tuple(dims))

    def lower(shard: LocalContext) -> LocalProgram:
        bounds = part.local(shard.result_box(), shard.operand_box(0))
        return single_call(shard, shard.call.op, Input(0), ListArg(shard.result_shape()), *bounds)

    return builder.build(all_partial_kinds(call, 0), lower)


def _slice_scatter(call: OpCall) -> OpShardingRule:
    part = _Slice.of(call, call.shapes[0], 2)
    builder = RuleBuilder()
    dims = dim_factors(builder, call.shapes[0])
    builder.operands.extend([tuple(dims), part.dims(dims)])
    builder.results.append(tuple(dims))

    def lower(shard: LocalContext) -> LocalProgram:
        bounds = part.local(shard.result_box(), shard.operand_box(1))
        return single_call(shard, shard.call.op, Input(0), Input(1), *bounds)

    return builder.build(all_partial_kinds(call, 0, 1), lower)


# --- Rows -------------------------------------------------------------------------------------------------------------


def _row(call: OpCall, shape: Shape, first: int) -> tuple[int, int]:
    """The dim and index named by the arguments that start at position `first`."""
    dim = wrap_dim(call.arg(first, "dim"), len(shape))
    return dim, wrap_dim(call.arg(first + 1, "index"), shape[dim])


def _select(call: OpCall) -> OpShardingRule:
    """A view if the dim is whole. If it is cut, the worker that holds the row gives it, and the others give zeros."""
    shape = call.shapes[0]
    dim, index = _row(call, shape, 1)
    builder = RuleBuilder()
    dims = dim_factors(builder, shape)
    builder.factor(f"d{dim}", shape[dim], MASK, merge_kind(call.inputs[0].dtype))
    builder.operands.append(tuple(dims))
    builder.results.append((*dims[:dim], *dims[dim + 1 :]))

    def lower(shard: LocalContext) -> LocalProgram:
        start, stop = shard.operand_box(0)[dim]
        if start <= index < stop:
            return single_call(shard, shard.call.op, Input(0), dim, index - start)
        program = LocalBuilder(1)
        return program.finish(absent_tensor(program, shard.result_shape(), call.inputs[0].dtype))

    return builder.build(all_partial_kinds(call, 0), lower)


def _select_backward(call: OpCall) -> OpShardingRule:
    dim, index = _row(call, call.result_shapes[0], 2)
    builder = RuleBuilder()
    dims = dim_factors(builder, call.result_shapes[0])
    builder.operands.append((*dims[:dim], *dims[dim + 1 :]))
    builder.results.append(tuple(dims))

    def lower(shard: LocalContext) -> LocalProgram:
        (start, stop), shape = shard.result_box()[dim], ListArg(shard.result_shape())
        if start <= index < stop:
            return single_call(shard, shard.call.op, Input(0), shape, dim, index - start)
        return single_call(shard, "aten.new_zeros.default", Input(0), shape)

    return builder.build(all_partial_kinds(call, 0), lower)


def _select_scatter(call: OpCall) -> OpShardingRule:
    dim, index = _row(call, call.shapes[0], 2)
    builder = RuleBuilder()
    dims = dim_factors(builder, call.shapes[0])
    builder.operands.extend([tuple(dims), (*dims[:dim], *dims[dim + 1 :])])
    builder.results.append(tuple(dims))

    def lower(shard: LocalContext) -> LocalProgram:
        start, stop = shard.operand_box(0)[dim]
        if start <= index < stop:
            return single_call(shard, shard.call.op, Input(0), Input(1), dim, index - start)
        return single_call(shard, "aten.clone.default", Input(0))

    return builder.build(all_partial_kinds(call, 0, 1), lower)


# --- Padding ----------------------------------------------------------------------------------------------------------


def _pad(call: OpCall) -> OpShardingRule:
    """The operand is a window of the result; with negative pads the window is larger than the result."""
    shape, flat = call.shapes[0], call.arg(1, "pad")
    before = [0] * (len(shape) - len(flat) // 2) + [*reversed(flat[::2])]
    builder = RuleBuilder()
    dims = dim_factors(builder, call.result_shapes[0])
    builder.operands.append(
        tuple(
            [
                window_dim(dim, given, Window(pad, size)) if pad or size != given else dim
                for dim, pad, size, given in zip(dims, before, shape, call.result_shapes[0], strict=True)
            ]
        )
    )
    builder.results.append(tuple(dims))

    def lower(shard: LocalContext) -> LocalProgram:
        program, rank = LocalBuilder(1), len(shape)
        pads = {
            dim: (start + pad - first, stop - end - pad) if start < end else (stop - first, 0)
            for dim, ((start, end), (first, stop), pad) in enumerate(
                zip(shard.operand_box(0), shard.result_box(), before, strict=True)
            )
        }
        result = pad_tensor(program, Input(0), rank, pads, _pad_value(shard))
        return program.finish(result if result != Input(0) else program.call("aten.clone.default", result))

    return builder.build(all_partial_kinds(call, 0), lower)


def _pad_value(shard: LocalContext) -> Arg:
    """The value to pad with. Of partial values, only one worker's are padded with it, the others' with the identity."""
    value: Arg = shard.call.arg(2, "value", 0)
    spec = shard.operands[0]
    if spec.partial and not shard.is_first_along(spec.partial):
        return {"sum": 0, "prod": 1}.get(spec.kind, value)
    return value


SLICING: dict[str, OpEntry] = {
    "aten.slice": OpEntry(_slice),
    "aten.slice_copy": OpEntry(_slice),
    "aten.narrow_copy": _narrow_copy("aten.slice_copy.Tensor"),
    "aten.slice_backward": OpEntry(_slice_backward),
    "aten.slice_scatter": OpEntry(_slice_scatter),
    "aten.select": OpEntry(_select),
    "aten.select_copy": OpEntry(_select),
    "aten.select_backward": OpEntry(_select_backward),
    "aten.select_scatter": OpEntry(_select_scatter),
    "aten.constant_pad_nd": OpEntry(_pad),
}
