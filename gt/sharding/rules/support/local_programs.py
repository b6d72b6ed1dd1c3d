"""Local programs that rules of several families share."""

from __future__ import annotations

from collections.abc import Mapping

from gt.core.signatures import Arg, DType, Input, ListArg, WorkerDevice
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, Lowering
from gt.sharding.spec import Shape


def same_op(shard: LocalContext, changes: Mapping[int, Arg] | None = None, **kwargs: Arg) -> LocalProgram:
    """The op itself, with other arguments at some positions or names."""
    call = shard.call
    args = list(call.args)
    for position, value in (changes or {}).items():
        args += [None] * (position + 1 - len(args))
        args[position] = value
    builder = LocalBuilder(len(call.inputs))
    return builder.finish(*builder.repeat(call, *args, **(dict(call.kwargs) | kwargs)))


def zeros(builder: LocalBuilder, shape: Shape, dtype: str) -> Input:
    return builder.call("aten.zeros.default", ListArg(shape), dtype=DType(dtype), device=WorkerDevice())


def cast(builder: LocalBuilder, value: Input, source: str, target: str) -> Input:
    return value if source == target else builder.call("aten._to_copy.default", value, dtype=DType(target))


def unless_empty(lowering: Lowering = same_op) -> Lowering:
    """Many kernels refuse tensors without elements: what comes of them is zero, if there is any of it."""

    def lower(shard: LocalContext) -> LocalProgram:
        if all(0 not in shard.operand_shape(place) for place in range(len(shard.operands))):
            return lowering(shard)
        builder = LocalBuilder(len(shard.operands))
        outputs = enumerate(shard.call.outputs)
        return builder.finish(*[zeros(builder, shard.result_shape(place), meta.dtype) for place, meta in outputs])

    return lower


def adds_once(shard: LocalContext) -> bool:
    """Whether this worker adds what is added once, such as a bias: the first along the axes that the op sums over.
    Axes along which operands are partial are not among them, as what is added is partial there too."""
    passed = {axis for spec in shard.operands for axis in spec.partial}
    return shard.is_first_along([axis for axis in shard.results[0].partial if axis not in passed])
