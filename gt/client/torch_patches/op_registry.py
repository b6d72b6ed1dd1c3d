"""Torch's registry of ops: overloads, their schemas, and the kernels registered for a dispatch key."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._C import Argument, DispatchKey, FunctionSchema
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel_for_key
from torch._ops import OpOverload

__all__ = [
    "Argument", "DispatchKey", "FunctionSchema", "OpOverload",
    "has_kernel", "has_kernel_for_key", "kernel_of", "packet_name", "schema_of",
]  # fmt: skip


def schema_of(func: OpOverload) -> FunctionSchema:
    return func._schema


def packet_name(func: OpOverload) -> str:
    """The name that an op's overloads have in common: `add_` of `aten.add_.Tensor`."""
    return func._opname


def has_kernel(func: OpOverload, key: DispatchKey | str) -> bool:
    return has_kernel_for_key(func.name(), key)


def kernel_of(func: OpOverload, key: DispatchKey) -> Callable[..., Any]:
    """An op as the kernel registered for one dispatch key runs it."""
    return functools.partial(func._op_dk, key)
