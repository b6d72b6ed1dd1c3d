"""Factory ops, such as `zeros` and `arange`. Layouts, devices and memory formats are ignored; empty arrays are zero."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from gt.worker.engines.numpy_types import (
    FLOAT32,
    Array,
    NumPyDType,
    Operand,
    cast,
    dtype_of_number,
    promote,
)
from gt.worker.engines.numpy_views import Sizes, empty_strided

Factory: TypeAlias = Callable[..., Array]


def _full(size: Sizes, value: Operand, dtype: NumPyDType | None = None, **_: object) -> Array:
    return np.full(size, cast(value, dtype or dtype_of_number(value)))


def _full_like(like: Array, value: Operand, dtype: NumPyDType | None = None, **_: object) -> Array:
    return np.full_like(like, cast(value, dtype or like.dtype), dtype)


def _new_full(like: Array, size: Sizes, value: Operand, dtype: NumPyDType | None = None, **_: object) -> Array:
    return np.full(size, cast(value, dtype or like.dtype))


def _filled_with(value: int) -> tuple[Factory, Factory, Factory]:
    """Three factories of a constant: `full`, `full_like` and `new_full`."""
    return (
        lambda size, dtype=FLOAT32, **_: _full(size, value, dtype or FLOAT32),
        lambda like, dtype=None, **_: _full_like(like, value, dtype),
        lambda like, size, dtype=None, **_: _new_full(like, size, value, dtype),
    )


_zeros, _zeros_like, _new_zeros = _filled_with(0)
_ones, _ones_like, _new_ones = _filled_with(1)


def _empty_strided(size: Sizes, strides: Sizes, dtype: NumPyDType | None = None, **_: object) -> Array:
    return empty_strided(size, strides, dtype or FLOAT32)


def _arange(start: float, end: float, step: float = 1, dtype: NumPyDType | None = None, **_: object) -> Array:
    count = math.ceil((end - start) / step)
    return (np.arange(count) * step + start).astype(dtype or promote([dtype_of_number(n) for n in (start, end, step)]))


def _eye(rows: int, columns: int | None = None, dtype: NumPyDType | None = None, **_: object) -> Array:
    return np.eye(rows, columns, dtype=dtype or FLOAT32)


def _linspace(start: float, end: float, steps: int, dtype: NumPyDType | None = None, **_: object) -> Array:
    return np.linspace(start, end, steps).astype(dtype or FLOAT32)


FACTORIES: dict[str, Factory] = {
    "aten.empty.memory_format": _zeros,
    "aten.empty_strided.default": _empty_strided,
    "aten.empty_like.default": _zeros_like,
    "aten.zeros.default": _zeros,
    "aten.zeros_like.default": _zeros_like,
    "aten.new_zeros.default": _new_zeros,
    "aten.new_empty.default": _new_zeros,
    "aten.ones.default": _ones,
    "aten.ones_like.default": _ones_like,
    "aten.new_ones.default": _new_ones,
    "aten.full.default": _full,
    "aten.scalar_tensor.default": lambda value, dtype=None, **_: _full((), value, dtype or FLOAT32),
    "aten.full_like.default": _full_like,
    "aten.new_full.default": _new_full,
    "aten.arange.default": lambda end, **options: _arange(0, end, **options),
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
    "aten.eye.default": _eye,
    "aten.eye.m": _eye,
    "aten.linspace.default": _linspace,
}
