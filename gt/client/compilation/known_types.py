"""The types whose state `gt.compile` knows: values that never change, code of libraries, classes written in Python."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import inspect
import operator
import pathlib
import re
import site
import sys
import sysconfig
import threading
import types
import typing
import uuid
from typing import Any

import numpy as np
import torch

from gt.client.compilation.static_reads import bases_of, entries_of, is_instance, module_of

SIMPLE_VALUES = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.Size, range, slice)
_CONSTANTS = (
    *SIMPLE_VALUES, type(...), type(NotImplemented), torch.device, torch.layout, torch.memory_format, torch.finfo,
    torch.iinfo, decimal.Decimal, fractions.Fraction, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo,
    uuid.UUID, pathlib.PurePath, re.Pattern, np.generic, np.dtype, enum.Enum, types.CodeType, types.GenericAlias,
    types.UnionType,
)  # fmt: skip
# Objects that a function uses without depending on their state, or whose state cannot change.
_OPAQUE = (
    type(threading.Lock()), type(threading.RLock()), np.ufunc,
    types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType, inspect.Signature, inspect.Parameter, typing.TypeVar,
    type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor), operator.itemgetter,
)  # fmt: skip
_OPAQUE_NAMES = {
    "_lru_list_elem", "_array_function_dispatcher", "_ArrayFunctionDispatcher", "fused_cython_function", "_tuplegetter",
}  # fmt: skip
_FOLDERS = tuple(
    {*[sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")], *site.getsitepackages()}
)
_POINTER = 8  # bytes


def is_constant(value: Any) -> bool:
    """Whether a value never changes."""
    kind = type(value)
    return kind in _CONSTANTS or (
        issubclass(kind, _CONSTANTS) and (issubclass(kind, enum.Enum) or is_library(module_of(kind)))
    )


def is_opaque(value: Any) -> bool:
    """Whether a function may use an object without depending on a state of it that changes."""
    return is_instance(value, _OPAQUE) or type(value).__name__ in _OPAQUE_NAMES


def same_constant(first: Any, second: Any) -> bool:
    """Whether two values that never change are equal: floats bit for bit."""
    if type(first) is not type(second):
        return False
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(same_constant, first, second))
    if not is_constant(first) or isinstance(first, enum.Enum):
        return first is second
    if isinstance(first, float):
        return first.hex() == second.hex()
    return bool(first == second) and (isinstance(first, int | str | bytes) or repr(first) == repr(second))


@functools.cache
def is_library(module: str | None) -> bool:
    """Whether a module is not the program's own."""
    if module is None or module == "__main__":
        return module is None
    package = module.split(".")[0]
    if package in ("gt", "builtins") or package in sys.builtin_module_names or package in sys.stdlib_module_names:
        return True
    files = [getattr(sys.modules.get(name), "__file__", None) or "" for name in (module, package)]
    return any(file.startswith(_FOLDERS) for file in files)


@functools.cache
def is_python_class(kind: type) -> bool:
    """Whether the instances of a class have no state besides attributes: it and its bases are written in Python."""
    return all(base is object or _has_only_attributes(base) for base in bases_of(kind))


def _has_only_attributes(base: type) -> bool:
    module = module_of(base)
    package = module.split(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    if package == "builtins" or package in sys.builtin_module_names or file.endswith((".so", ".pyd", ".dylib")):
        return False
    inner = max(each.__basicsize__ for each in base.__bases__)
    own = sum(isinstance(each, types.MemberDescriptorType) for each in entries_of(base).values())
    return base.__basicsize__ <= inner + (own + 2) * _POINTER  # two: of `__dict__` and `__weakref__`


def describe_type(value: object) -> str:
    kind = type(value)
    module = module_of(kind)
    prefix = "" if module in ("", "builtins", "__main__") else f"{module}."
    return f"an object of type {prefix}{kind.__qualname__}"
