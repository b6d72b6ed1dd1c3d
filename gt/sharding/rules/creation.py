"""Creation ops: constants, ranges, random numbers. Their results can be created in any layout."""

from __future__ import annotations

from dataclasses import replace

from gt.core.signatures import DType, ListArg, WorkerDevice
from gt.sharding.factors import PASS, WHOLE, FactorRef, OpShardingRule, RuleBuilder
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, Lowering, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.pointwise import elementwise
from gt.sharding.rules.support.dims import dim_names
from gt.sharding.rules.support.local_programs import same_op


def _created(lowering: Lowering | None, role: str = PASS) -> OpEntry:
    """A creation op. Operands, if any, only provide their dtype, so their layouts do not matter."""

    def rule(call: OpCall) -> OpShardingRule:
        builder = RuleBuilder()
        (shape,) = call.result_shapes
        names = [builder.factor(name, size, role) for name, size in zip(dim_names(len(shape)), shape, strict=True)]
        builder.results.append(tuple([(FactorRef(name),) for name in names]))
        for position, own in enumerate(call.shapes):
            letters = dim_names(len(own), "d" if own == shape else f"operand{position}_")
            factors = [builder.factor(name, size) for name, size in zip(letters, own, strict=True)]
            builder.operands.append(tuple([(FactorRef(factor),) for factor in factors]))
        return replace(builder.build(lowering=lowering), reads_values=False)

    return OpEntry(rule)


def _like(call: OpCall) -> OpShardingRule | None:
    rule = elementwise().rule(call)
    return None if rule is None else replace(rule, reads_values=False)


def _of_local_size(shard: LocalContext) -> LocalProgram:
    """The op with the local size: the first list among its arguments."""
    position = next(position for position, value in enumerate(shard.call.args) if isinstance(value, ListArg))
    return same_op(shard, {position: ListArg(shard.result_shape())})


def _without_strides(op: str) -> Lowering:
    """Replaces the last two arguments of `op`, size and strides, by the local size: strides of the whole tensor do not
    apply to a shard."""

    def lower(shard: LocalContext) -> LocalProgram:
        builder = LocalBuilder(len(shard.call.inputs))
        args = [*shard.call.args[:-2], ListArg(shard.result_shape())]
        return builder.finish(builder.call(op, *args, **shard.call.kwargs))

    return lower


def _part_of_whole(shard: LocalContext) -> LocalProgram:
    """Create the whole tensor and slice it: some values depend on the number of elements or on rounding in the
    kernel."""
    call = shard.call
    builder = LocalBuilder(len(call.inputs))
    value = builder.call(call.op, *call.args, **call.kwargs)
    box = [(0, size) for size in call.outputs[0].shape]
    if shard.result_box() == tuple(box):
        return builder.finish(value)
    for dim, (start, stop) in enumerate(shard.result_box()):
        value = builder.call("aten.slice.Tensor", value, dim, start, stop)
    return builder.finish(builder.call("aten.clone.default", value))


def _part_of_range(shard: LocalContext) -> LocalProgram:
    """A range of integers from the first element of the shard. Floats are sliced from the whole range, since torch
    rounds them depending on their position."""
    call = shard.call
    bounds = [bound for bound in call.args if type(bound) is int]
    if len(bounds) < len(call.args) or not call.outputs[0].dtype.startswith(("int", "uint")):
        return _part_of_whole(shard)
    first, _, step = [*([0] if len(bounds) == 1 else []), *bounds, 1][:3]
    (interval,) = shard.result_box()
    start, stop = [first + position * step for position in interval]
    builder = LocalBuilder(0)
    return builder.finish(builder.call("aten.arange.start_step", start, stop, step, **call.kwargs))


def _part_of_eye(shard: LocalContext) -> LocalProgram:
    builder = LocalBuilder(0)
    rows, columns = [
        builder.call("aten.arange.start", start, stop, dtype=DType("int64"), device=WorkerDevice())
        for start, stop in shard.result_box()
    ]
    same = builder.call("aten.eq.Tensor", builder.call("aten.unsqueeze.default", rows, 1), columns)
    dtype = DType(shard.call.outputs[0].dtype)
    return builder.finish(builder.call("aten._to_copy.default", same, dtype=dtype))


_WITH_SIZE = _created(_of_local_size)
_COMPUTED = _created(_part_of_whole)
_LIKE_OTHER = OpEntry(_like)

CREATION: dict[str, OpEntry] = {
    "aten.empty": _WITH_SIZE,
    "aten.empty_permuted": _WITH_SIZE,
    "aten.empty_strided": _created(_without_strides("aten.empty.memory_format")),
    "aten.full": _WITH_SIZE,
    "aten.ones": _WITH_SIZE,
    "aten.zeros": _WITH_SIZE,
    "aten.new_empty": _WITH_SIZE,
    "aten.new_empty_strided": _created(_without_strides("aten.new_empty.default")),
    "aten.new_full": _WITH_SIZE,
    "aten.new_ones": _WITH_SIZE,
    "aten.new_zeros": _WITH_SIZE,
    "aten.empty_like": _LIKE_OTHER,
    "aten.full_like": _LIKE_OTHER,
    "aten.ones_like": _LIKE_OTHER,
    "aten.zeros_like": _LIKE_OTHER,
    "aten.scalar_tensor": _created(None),
    # Random: each element depends on its position in the whole tensor, which the worker knows.
    "aten.normal.float_float": _WITH_SIZE,
    "aten.rand": _WITH_SIZE,
    "aten.randint": _WITH_SIZE,
    "aten.randn": _WITH_SIZE,
    "aten.rand_like": _LIKE_OTHER,
    "aten.randint_like": _LIKE_OTHER,
    "aten.randn_like": _LIKE_OTHER,
    "aten.randperm": _created(None, WHOLE),
    "aten.arange": _created(_part_of_range),
    "aten.eye": _created(_part_of_eye),
    "aten.bartlett_window": _COMPUTED,
    "aten.blackman_window": _COMPUTED,
    "aten.fft_fftfreq": _COMPUTED,
    "aten.fft_rfftfreq": _COMPUTED,
    "aten.hamming_window": _COMPUTED,
    "aten.hann_window": _COMPUTED,
    "aten.kaiser_window": _COMPUTED,
    "aten.linspace": _COMPUTED,
    "aten.logspace": _COMPUTED,
    "aten.range": _COMPUTED,
    "aten.tril_indices": _COMPUTED,
    "aten.triu_indices": _COMPUTED,
}
