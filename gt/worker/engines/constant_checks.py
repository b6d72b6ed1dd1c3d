"""Constants of a call, compared with the schema of its op when the op is defined.

Torch takes a plain integer for a dtype, a layout or a memory format without comparing it with those there are, and
nothing for a tensor that an op cannot do without. Either ends the process in some ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gt.core.signatures import Arg, DType, MemoryFormat, TorchLayout

_KINDS = {
    "ScalarType": (DType, "a dtype"),
    "Layout": (TorchLayout, "a layout"),
    "MemoryFormat": (MemoryFormat, "a format"),
}


def check_constants(op: str, args: Sequence[Arg], kwargs: Mapping[str, Arg]) -> None:
    """Raise TypeError for an argument that is none of what the op takes in its place."""
    namespace, name, overload = op.split(".")
    schema = torch._C._get_schema(f"{namespace}::{name}", "" if overload == "default" else overload)
    given = dict(zip([argument.name for argument in schema.arguments], args, strict=False)) | dict(kwargs)
    for argument in schema.arguments:
        if argument.name in given:
            _check(f"{op}: {argument.name}", str(argument.real_type), given[argument.name])


def _check(what: str, kind: str, value: Arg) -> None:
    optional = kind.startswith("Optional[")
    record, noun = _KINDS.get(kind.removeprefix("Optional[").removesuffix("]"), (object, "a tensor"))
    if value is None and not optional and (record is not object or kind == "Tensor"):
        raise TypeError(f"{what} must be {noun}, and is missing")
    if value is not None and not isinstance(value, record):
        raise TypeError(f"{what} must be {noun}, not {value!r}")
