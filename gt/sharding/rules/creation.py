"""Tensors made of nothing: constants, ranges, random numbers. They take any layout that is wished for."""

from __future__ import annotations

from dataclasses import replace

from gt.core.signatures import DType, ListArg, WorkerDevice
from gt.sharding.factors import WHOLE, OpShardingRule, Ref, RuleBuilder
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, Lowering, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.pointwise import elementwise
from gt.sharding.rules.support.dims import named
from gt.sharding.rules.support.local_programs import same_op


def _made(lowering: Lowering | None, kind: str = "pass") -> OpEntry:
    """A tensor that does not depend on how operands are cut, if there are any: they only lend their dtype."""

    def rule(call: OpCall) -> OpShardingRule:
        builder = RuleBuilder()
        (shape,) = call.result_shapes
        names = [builder.factor(name, size, kind) for name, size in zip(named(len(shape)), shape, strict=True)]
        builder.results.append(tuple([(Ref(name),) for name in names]))
        for place, own in enumerate(call.shapes):
            letters = named(len(own), "d" if own == shape else f"operand{place}_")
            factors = [builder.factor(name, size) for name, size in zip(letters, own, strict=True)]
            builder.operands.append(tuple([(Ref(factor),) for factor in factors]))
        return replace(builder.build(lowering=lowering), reads=False)

    return OpEntry(rule)


def _like(call: OpCall) -> OpShardingRule | None:
    rule = elementwise().rule(call)
    return None if rule is None else replace(rule, reads=False)


def _of_local_size(shard: LocalContext) -> LocalProgram:
    """The first list among the arguments is the size."""
    position = next(place for place, value in enumerate(shard.call.args) if isinstance(value, ListArg))
    return same_op(shard, {position: ListArg(shard.result_shape())})


def _without_strides(op: str) -> Lowering:
    """What was size and strides is the local size: the strides of the whole say nothing about a part."""

    def lower(shard: LocalContext) -> LocalProgram:
        builder = LocalBuilder(len(shard.call.inputs))
        args = [*shard.call.args[:-2], ListArg(shard.result_shape())]
        return builder.finish(builder.call(op, *args, **shard.call.kwargs))

    return lower


def _part_of_whole(shard: LocalContext) -> LocalProgram:
    """Some values depend on how many there are, or on how a kernel counts: make all of them, and keep a part."""
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
    """Whole numbers are counted on from where this part starts. Of others, torch rounds some before adding the last
    steps and some after."""
    call = shard.call
    bounds = [bound for bound in call.args if type(bound) is int]
    if len(bounds) < len(call.args) or not call.outputs[0].dtype.startswith(("int", "uint")):
        return _part_of_whole(shard)
    first, _, step = [*([0] if len(bounds) == 1 else []), *bounds, 1][:3]
    (interval,) = shard.result_box()
    start, stop = [first + place * step for place in interval]
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


_SIZED = _made(_of_local_size)
_COMPUTED = _made(_part_of_whole)
_LIKE = OpEntry(_like)

CREATION: dict[str, OpEntry] = {
    "aten.empty": _SIZED,
    "aten.empty_permuted": _SIZED,
    "aten.empty_strided": _made(_without_strides("aten.empty.memory_format")),
    "aten.full": _SIZED,
    "aten.ones": _SIZED,
    "aten.zeros": _SIZED,
    "aten.new_empty": _SIZED,
    "aten.new_empty_strided": _made(_without_strides("aten.new_empty.default")),
    "aten.new_full": _SIZED,
    "aten.new_ones": _SIZED,
    "aten.new_zeros": _SIZED,
    "aten.empty_like": _LIKE,
    "aten.full_like": _LIKE,
    "aten.ones_like": _LIKE,
    "aten.zeros_like": _LIKE,
    "aten.scalar_tensor": _made(None),
    # Random: every element from its place in the whole tensor, which the worker knows.
    "aten.normal.float_float": _SIZED,
    "aten.rand": _SIZED,
    "aten.randint": _SIZED,
    "aten.randn": _SIZED,
    "aten.rand_like": _LIKE,
    "aten.randint_like": _LIKE,
    "aten.randn_like": _LIKE,
    "aten.randperm": _made(None, WHOLE),
    "aten.arange": _made(_part_of_range),
    "aten.eye": _made(_part_of_eye),
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
