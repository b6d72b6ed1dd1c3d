"""Compares the constant arguments of a call with the schema of its op, when the op is defined.

Torch takes any integer for a dtype, a layout or a memory format, and None for a required tensor. Either crashes the
process in some ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gt.core.signatures import Arg, DType, MemoryFormat, TorchLayout
from gt.worker.engines.torch_private import find_schema

_KINDS = {
    "ScalarType": (DType, "a dtype"),
    "Layout": (TorchLayout, "a layout"),
    "MemoryFormat": (MemoryFormat, "a format"),
}


def check_constants(op: str, args: Sequence[Arg], kwargs: Mapping[str, Arg]) -> None:
    """Raise TypeError for an argument of a type that the schema does not allow."""
    parameters = find_schema(op).arguments
    given = dict(zip([parameter.name for parameter in parameters], args, strict=False)) | dict(kwargs)
    for argument in parameters:
        if argument.name in given:
            _check(f"{op}: {argument.name}", str(argument.real_type), given[argument.name])


def _check(what: str, kind: str, value: Arg) -> None:
    optional = kind.startswith("Optional[")
    record, noun = _KINDS.get(kind.removeprefix("Optional[").removesuffix("]"), (object, "a tensor"))
    if value is None and not optional and (record is not object or kind == "Tensor"):
        raise TypeError(f"{what} must be {noun}, and is missing")
    if value is not None and not isinstance(value, record):
        raise TypeError(f"{what} must be {noun}, not {value!r}")
