"""Local programs, and parts of them, that rules of several families share."""

from __future__ import annotations

from collections.abc import Mapping

from gt.core.signatures import Arg, DType, Input, ListArg, WorkerDevice
from gt.sharding.boxes import Interval, Shape
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, Lowering


def same_op(shard: LocalContext, changes: Mapping[int, Arg] | None = None, **kwargs: Arg) -> LocalProgram:
    """The op itself, with other arguments at some positions or names."""
    call = shard.call
    args = list(call.args)
    for position, value in (changes or {}).items():
        args += [None] * (position + 1 - len(args))
        args[position] = value
    builder = LocalBuilder(len(call.inputs))
    return builder.finish(*builder.repeat(call, *args, **(dict(call.kwargs) | kwargs)))


def single_call(shard: LocalContext, op: str, *args: Arg, **kwargs: Arg) -> LocalProgram:
    """A program of one call that gives all results."""
    builder = LocalBuilder(len(shard.call.inputs))
    return builder.finish(*builder.call_multi(op, len(shard.call.outputs), *args, **kwargs))


def zero_results(shard: LocalContext) -> LocalProgram:
    builder = LocalBuilder(len(shard.operands))
    outputs = enumerate(shard.call.outputs)
    return builder.finish(*[zeros(builder, shard.result_shape(position), meta.dtype) for position, meta in outputs])


def zeros_if_empty(lowering: Lowering = same_op) -> Lowering:
    """A lowering that gives zeros on a worker with an empty shard of an operand: many kernels refuse empty tensors."""

    def lower(shard: LocalContext) -> LocalProgram:
        if all(0 not in shard.operand_shape(position) for position in range(len(shard.operands))):
            return lowering(shard)
        return zero_results(shard)

    return lower


def adds_once(shard: LocalContext) -> bool:
    """Whether this worker adds a term that is added once, such as a bias: it is the first along the axes that the op
    sums over. Axes along which operands are partial do not count, since the term is partial along them too."""
    passed = {axis for spec in shard.operands for axis in spec.partial}
    return shard.is_first_along([axis for axis in shard.results[0].partial if axis not in passed])


# --- Single tensors ---------------------------------------------------------------------------------------------------


def zeros(builder: LocalBuilder, shape: Shape, dtype: str) -> Input:
    return builder.call("aten.zeros.default", ListArg(shape), dtype=DType(dtype), device=WorkerDevice())


def cast(builder: LocalBuilder, value: Input, source: str, target: str) -> Input:
    return value if source == target else builder.call("aten._to_copy.default", value, dtype=DType(target))


def pad_tensor(builder: LocalBuilder, tensor: Input, rank: int, pads: Mapping[int, Interval], value: Arg = 0) -> Input:
    """A tensor padded with `value`. `pads` has the number of elements before and after each padded dim."""
    if not any(before or after for before, after in pads.values()):
        return tensor
    flat = [count for dim in reversed(range(rank)) for count in pads.get(dim, (0, 0))]  # torch lists the last dim first
    return builder.call("aten.constant_pad_nd.default", tensor, ListArg(tuple(flat)), value)
