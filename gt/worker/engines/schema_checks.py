"""Compares the constant arguments of a call with the schema of its op, when the op is defined.

Torch takes any integer for a dtype, a layout or a memory format, and None for a required tensor. Either crashes the
process in some ops.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gt.core.signatures import Arg, DType, MemoryFormat, TorchLayout
from gt.worker.engines.torch_private import find_schema

_KINDS = {
    "ScalarType": (DType, "a dtype"),
    "Layout": (TorchLayout, "a layout"),
    "MemoryFormat": (MemoryFormat, "a format"),
}


def check_constants(op: str, args: Sequence[Arg], kwargs: Mapping[str, Arg]) -> None:
    """Raise TypeError for an argument of a type that the schema does not allow."""
    positional, named = _expected(op)
    for parameter, value in zip(positional, args, strict=False):
        if parameter is not None:
            parameter.check(op, value)
    for name, value in kwargs.items():
        if name in named:
            named[name].check(op, value)


class _CheckedParameter(NamedTuple):
    """A parameter that has to be checked: the record that a value must be, and whether it may be None."""

    name: str
    record: type
    noun: str
    is_optional: bool

    def check(self, op: str, value: Arg) -> None:
        if value is None and not self.is_optional:
            raise TypeError(f"{op}: {self.name} must be {self.noun}, and is missing")
        if value is not None and not isinstance(value, self.record):
            raise TypeError(f"{op}: {self.name} must be {self.noun}, not {value!r}")


@functools.lru_cache(maxsize=1 << 12)  # programs choose the names
def _expected(op: str) -> tuple[tuple[_CheckedParameter | None, ...], dict[str, _CheckedParameter]]:
    """The parameters of an op in order, None for those that take any value, and by name."""
    found = tuple(_parameter(argument.name, str(argument.real_type)) for argument in find_schema(op).arguments)
    return found, {parameter.name: parameter for parameter in found if parameter is not None}


def _parameter(name: str, kind: str) -> _CheckedParameter | None:
    is_optional = kind.startswith("Optional[")
    record, noun = _KINDS.get(kind.removeprefix("Optional[").removesuffix("]"), (object, "a tensor"))
    takes_none = is_optional or (record is object and kind != "Tensor")
    return None if takes_none and record is object else _CheckedParameter(name, record, noun, takes_none)
