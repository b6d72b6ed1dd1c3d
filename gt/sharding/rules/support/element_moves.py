"""Ops that move elements without computing: their passthroughs, and the values for elements of other workers."""

from __future__ import annotations

from gt.core.signatures import DType, Input, ListArg, WorkerDevice
from gt.sharding.boxes import Shape
from gt.sharding.dtypes import identity, is_complex
from gt.sharding.factors import PartialPassthrough
from gt.sharding.op_calls import LocalBuilder, OpCall


def all_partial_kinds(call: OpCall, *operands: int) -> list[PartialPassthrough]:
    """The passthroughs of an op that moves elements of these operands and may put zeros between them, since any
    reduction of zeros is zero."""
    dtypes = {call.inputs[position].dtype for position in operands} | {meta.dtype for meta in call.outputs}
    if len(dtypes) != 1:
        return []
    (dtype,) = dtypes
    kinds = ("sum", "prod") if is_complex(dtype) else ("sum", "max", "min", "prod")
    return [
        PartialPassthrough(frozenset(operands), kind, kind) for kind in (kinds if dtype != "bool" else ("or", "and"))
    ]


def merge_kind(dtype: str) -> str:
    """The reduction that merges results in which each element is held by one worker and absent on the others."""
    return "or" if dtype == "bool" else "sum"


def absent_value(dtype: str) -> bool | int | float:
    """The value that a worker gives for an element that another worker holds."""
    return identity(merge_kind(dtype), dtype)


def absent_tensor(builder: LocalBuilder, shape: Shape, dtype: str) -> Input:
    value = absent_value(dtype)
    return builder.call("aten.full.default", ListArg(shape), value, dtype=DType(dtype), device=WorkerDevice())
