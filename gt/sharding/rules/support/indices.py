"""Indices into a cut dim: each worker handles the indices of its own shard.

An index out of range must be refused, as on whole tensors. So the first worker passes indices that are too small to the
op unchanged, the last worker those that are too large, and the op refuses them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gt.core.signatures import Input
from gt.sharding.boxes import Interval
from gt.sharding.dtypes import identity
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, with_inputs
from gt.sharding.rules.support.element_moves import absent_tensor, absent_value
from gt.sharding.rules.support.local_programs import adds_once, pad_tensor


class IndexedDim(NamedTuple):
    """A dim of an op's first input that another input, `index_input`, indexes. An element of the dim is `unit` indices.
    If it `wraps`, negative indices count from the end."""

    dim: int
    index_input: int
    wraps: bool = False
    unit: int = 1


def _wrapped(program: LocalBuilder, index: Input, size: int) -> Input:
    """The indices with negative ones made non-negative."""
    negative, known = program.call("aten.lt.Scalar", index, 0), program.call("aten.ge.Scalar", index, -size)
    both = program.call("aten.logical_and.default", negative, known)
    return program.call("aten.where.self", both, program.call("aten.add.Scalar", index, size), index)


def _foreign_mask(program: LocalBuilder, index: Input, bounds: Interval, size: int) -> Input:
    """A mask of the indices that are in other workers' shards."""
    start, stop = bounds
    masks = [program.call("aten.lt.Scalar", index, start)] if start > 0 else []
    masks += [program.call("aten.ge.Scalar", index, stop)] if stop < size else []
    return _any_of(program, masks)


def _any_of(program: LocalBuilder, masks: Sequence[Input]) -> Input:
    return functools.reduce(lambda a, b: program.call("aten.logical_or.default", a, b), masks)


def _local_index(
    program: LocalBuilder, indexed: IndexedDim, bounds: Interval, size: int, shift: int, elsewhere: int
) -> tuple[Input, Input]:
    """Indices into a worker's shard, and the mask of foreign ones. The shard starts at row `shift`; foreign indices
    point to row `elsewhere`."""
    unit, index = indexed.unit, Input(indexed.index_input)
    index = _wrapped(program, index, size * unit) if indexed.wraps else index
    foreign = _foreign_mask(program, index, (bounds[0] * unit, bounds[1] * unit), size * unit)
    index = program.call("aten.sub.Scalar", index, (bounds[0] - shift) * unit)
    return program.call("aten.masked_fill.Scalar", index, foreign, elsewhere * unit), foreign


def _call_with(program: LocalBuilder, shard: LocalContext, registers: Mapping[int, Input]) -> Input:
    """The op with some inputs replaced."""

    def change(value: Input) -> Input:
        return registers.get(value.index, value)

    args = [with_inputs(arg, change) for arg in shard.call.args]
    kwargs = {name: with_inputs(arg, change) for name, arg in shard.call.kwargs.items()}
    return program.call(shard.call.op, *args, **kwargs)


def lower_gather(shard: LocalContext, indexed: Sequence[IndexedDim], trailing: int = 0) -> LocalProgram:
    """Lower an op that picks elements: elements of other workers are absent. `trailing` is the number of dims of the
    result after those of the broadcast indices."""
    program = LocalBuilder(len(shard.call.inputs))
    registers, masks = {}, []
    for indexed_dim in indexed:
        size, bounds = shard.call.inputs[0].shape[indexed_dim.dim], shard.operand_box(0)[indexed_dim.dim]
        if bounds[0] == bounds[1] and size:
            return program.finish(absent_tensor(program, shard.result_shape(), shard.call.outputs[0].dtype))
        if bounds != (0, size):
            registers[indexed_dim.index_input], foreign = _local_index(program, indexed_dim, bounds, size, 0, 0)
            masks.append(foreign)
    result = _call_with(program, shard, registers)
    if masks:
        foreign = _any_of(program, masks)
        for _ in range(trailing):
            foreign = program.call("aten.unsqueeze.default", foreign, -1)
        result = program.call("aten.masked_fill.Scalar", result, foreign, absent_value(shard.call.outputs[0].dtype))
    return program.finish(result)


def lower_scatter(shard: LocalContext, indexed: Sequence[IndexedDim]) -> LocalProgram:
    """Lower an op that writes elements into its first input: updates of other workers' elements go to a spare row, on
    the side where this worker has no out-of-range indices to refuse. If the updates are cut, one worker adds the
    existing elements."""
    program = LocalBuilder(len(shard.call.inputs))
    shape, box = shard.call.inputs[0].shape, shard.operand_box(0)
    registers: dict[int, Input] = {}
    spare: dict[int, Interval] = {}
    for indexed_dim in indexed:
        (start, stop), size = box[indexed_dim.dim], shape[indexed_dim.dim]
        if (start, stop) != (0, size):
            before = int(stop == size)
            spare[indexed_dim.dim] = (before, 1 - before)
            elsewhere = 0 if before else stop - start
            registers[indexed_dim.index_input], _ = _local_index(
                program, indexed_dim, (start, stop), size, before, elsewhere
            )
    target = Input(0) if adds_once(shard) else _identity(program, shard)
    registers[0] = pad_tensor(program, target, len(shape), spare)
    result = _call_with(program, shard, registers)
    for dim, (before, _) in spare.items():
        size = box[dim][1] - box[dim][0]
        result = program.call("aten.slice_copy.Tensor", result, dim, before, before + size)
    return program.finish(result)


def _identity(program: LocalBuilder, shard: LocalContext) -> Input:
    """A tensor of the identity of the reduction of the workers' results."""
    value = identity(shard.results[0].kind, shard.call.inputs[0].dtype)
    return program.call("aten.full_like.default", Input(0), value)
