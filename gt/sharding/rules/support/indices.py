"""Indices into a dim that is cut: every worker finds its own among them.

An index that is out of range has to be refused as it is on whole tensors: the first worker leaves those that are too
small as they are, and the last one those that are too large, and the op refuses them there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gt.core.signatures import Input
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, with_inputs
from gt.sharding.rules.support.dtypes import identity
from gt.sharding.rules.support.element_moves import absent, all_absent, padded
from gt.sharding.rules.support.local_programs import adds_once
from gt.sharding.spec import Interval


class Indexed(NamedTuple):
    """A dim of an op's first tensor that one of its other tensors indexes, counting `unit` for each element of it.
    Where it `wraps`, negative indices count from the end."""

    dim: int
    by: int
    wraps: bool = False
    unit: int = 1


def _wrapped(program: LocalBuilder, index: Input, size: int) -> Input:
    """Indices that count from the end of the whole dim, as ones from its start."""
    negative, known = program.call("aten.lt.Scalar", index, 0), program.call("aten.ge.Scalar", index, -size)
    both = program.call("aten.logical_and.default", negative, known)
    return program.call("aten.where.self", both, program.call("aten.add.Scalar", index, size), index)


def _foreign(program: LocalBuilder, index: Input, bounds: Interval, size: int) -> Input:
    """Which indices are in other workers' shards."""
    start, stop = bounds
    marks = [program.call("aten.lt.Scalar", index, start)] if start > 0 else []
    marks += [program.call("aten.ge.Scalar", index, stop)] if stop < size else []
    return _any_of(program, marks)


def _any_of(program: LocalBuilder, marks: Sequence[Input]) -> Input:
    return functools.reduce(lambda a, b: program.call("aten.logical_or.default", a, b), marks)


def _own(
    program: LocalBuilder, indexed: Indexed, bounds: Interval, size: int, shift: int, elsewhere: int
) -> tuple[Input, Input]:
    """Indices into a worker's shard, whose first row is row `shift` for it, with those that are foreign pointing to row
    `elsewhere`; and which these are."""
    unit, index = indexed.unit, Input(indexed.by)
    index = _wrapped(program, index, size * unit) if indexed.wraps else index
    mark = _foreign(program, index, (bounds[0] * unit, bounds[1] * unit), size * unit)
    index = program.call("aten.sub.Scalar", index, (bounds[0] - shift) * unit)
    return program.call("aten.masked_fill.Scalar", index, mark, elsewhere * unit), mark


def _again(program: LocalBuilder, shard: LocalContext, registers: Mapping[int, Input]) -> Input:
    """The op with other tensors."""

    def change(value: Input) -> Input:
        return registers.get(value.index, value)

    args = [with_inputs(arg, change) for arg in shard.call.args]
    kwargs = {name: with_inputs(arg, change) for name, arg in shard.call.kwargs.items()}
    return program.call(shard.call.op, *args, **kwargs)


def pick(shard: LocalContext, indexed: Sequence[Indexed], trailing: int = 0) -> LocalProgram:
    """An op that picks elements: those that other workers have are absent. The result has as many dims as the broadcast
    indices, some before, and some `trailing` ones."""
    program = LocalBuilder(len(shard.call.inputs))
    registers, marks = {}, []
    for one in indexed:
        size, bounds = shard.call.inputs[0].shape[one.dim], shard.operand_box(0)[one.dim]
        if bounds[0] == bounds[1] and size:
            return program.finish(all_absent(program, shard.result_shape(), shard.call.outputs[0].dtype))
        if bounds != (0, size):
            registers[one.by], mark = _own(program, one, bounds, size, 0, 0)
            marks.append(mark)
    result = _again(program, shard, registers)
    if marks:
        mark = _any_of(program, marks)
        for _ in range(trailing):
            mark = program.call("aten.unsqueeze.default", mark, -1)
        result = program.call("aten.masked_fill.Scalar", result, mark, absent(shard.call.outputs[0].dtype))
    return program.finish(result)


def put(shard: LocalContext, indexed: Sequence[Indexed]) -> LocalProgram:
    """An op that puts elements into its first tensor: what belongs to other workers goes to a spare row, at the side
    where the worker has no index to refuse. Where the updates are cut, one worker adds what was there before."""
    program = LocalBuilder(len(shard.call.inputs))
    shape, box = shard.call.inputs[0].shape, shard.operand_box(0)
    registers: dict[int, Input] = {}
    spare: dict[int, Interval] = {}
    for one in indexed:
        (start, stop), size = box[one.dim], shape[one.dim]
        if (start, stop) != (0, size):
            before = int(stop == size)
            spare[one.dim] = (before, 1 - before)
            elsewhere = 0 if before else stop - start
            registers[one.by], _ = _own(program, one, (start, stop), size, before, elsewhere)
    target = Input(0) if adds_once(shard) else _identity(program, shard)
    registers[0] = padded(program, target, len(shape), spare)
    result = _again(program, shard, registers)
    for dim, (before, _) in spare.items():
        size = box[dim][1] - box[dim][0]
        result = program.call("aten.slice_copy.Tensor", result, dim, before, before + size)
    return program.finish(result)


def _identity(program: LocalBuilder, shard: LocalContext) -> Input:
    """What changes nothing when the workers' results are reduced."""
    value = identity(shard.results[0].kind, shard.call.inputs[0].dtype)
    return program.call("aten.full_like.default", Input(0), value)
