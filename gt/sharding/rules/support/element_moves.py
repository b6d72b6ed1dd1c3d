"""What rules of ops that move elements around share."""

from __future__ import annotations

from collections.abc import Container, Mapping

from gt.core.signatures import Arg, DType, Input, ListArg, WorkerDevice
from gt.sharding.factors import Dim, PartialPassthrough, Ref, RuleBuilder
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.support.dtypes import identity, is_complex
from gt.sharding.spec import Interval, Shape


def own_dims(rule: RuleBuilder, shape: Shape, uncut: Container[int] = ()) -> list[Dim]:
    """A factor for every dim of a shape: d0, d1, ...; none for those that nothing cuts."""
    return [(Ref(rule.factor(f"d{dim}", size)),) if dim not in uncut else () for dim, size in enumerate(shape)]


def every_kind(call: OpCall, *operands: int) -> list[PartialPassthrough]:
    """The passes of ops that move the elements of these operands, and may put zeros between them: any reduction of
    zeros is zero again."""
    dtypes = {call.inputs[place].dtype for place in operands} | {meta.dtype for meta in call.outputs}
    if len(dtypes) != 1:
        return []
    (dtype,) = dtypes
    kinds = ("sum", "prod") if is_complex(dtype) else ("sum", "max", "min", "prod")
    return [
        PartialPassthrough(frozenset(operands), kind, kind) for kind in (kinds if dtype != "bool" else ("or", "and"))
    ]


def sum_kind(dtype: str) -> str:
    """How values that one worker has, and all others have zeros for, are put together."""
    return "or" if dtype == "bool" else "sum"


def absent(dtype: str) -> bool | int | float:
    """What a worker gives for an element that another one has."""
    return identity(sum_kind(dtype), dtype)


def all_absent(builder: LocalBuilder, shape: Shape, dtype: str) -> Input:
    return builder.call("aten.full.default", ListArg(shape), absent(dtype), dtype=DType(dtype), device=WorkerDevice())


def once(shard: LocalContext, op: str, *args: Arg, **kwargs: Arg) -> LocalProgram:
    """A program of one call that gives all results."""
    builder = LocalBuilder(len(shard.call.inputs))
    return builder.finish(*builder.calls(op, len(shard.call.outputs), *args, **kwargs))


def padded(builder: LocalBuilder, tensor: Input, rank: int, pads: Mapping[int, Interval], value: Arg = 0) -> Input:
    """A tensor with so many elements of `value` before and after those of some dims."""
    if not any(before or after for before, after in pads.values()):
        return tensor
    flat = [count for dim in reversed(range(rank)) for count in pads.get(dim, (0, 0))]  # torch names the last dim first
    return builder.call("aten.constant_pad_nd.default", tensor, ListArg(tuple(flat)), value)
