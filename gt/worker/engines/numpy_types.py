"""Torch's dtypes and its rules of type promotion, in NumPy's dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gt.core.meta import ITEM_BYTES

Array: TypeAlias = npt.NDArray[Any]
NumPyDType: TypeAlias = np.dtype[Any]
Operand: TypeAlias = Array | bool | int | float | complex
DTypeRule: TypeAlias = Callable[..., NumPyDType]

DTYPES: dict[str, NumPyDType] = {name: np.dtype(name) for name in ITEM_BYTES if hasattr(np, name)}
BOOL, UINT8, INT64, FLOAT16, FLOAT32 = [DTYPES[name] for name in ("bool", "uint8", "int64", "float16", "float32")]
_OF_NUMBERS: dict[type, NumPyDType] = {bool: BOOL, int: INT64, float: FLOAT32, complex: DTYPES["complex64"]}
_CATEGORIES = "biufc"  # NumPy's letters in torch's order: bool, int (signed or not), float, complex


def dtype_named(name: str) -> NumPyDType:
    if name not in DTYPES:
        raise NotImplementedError(f"NumPy has no dtype {name}; use one of {', '.join(DTYPES)}, or the pytorch backend")
    return DTYPES[name]


def dtype_of_number(value: Operand) -> NumPyDType:
    return _OF_NUMBERS[type(value)]


def category(dtype: NumPyDType) -> int:
    return 1 if dtype.kind == "u" else _CATEGORIES.index(dtype.kind)


def result_dtype(*operands: Operand) -> NumPyDType:
    """The dtype in which torch computes. Tensors with dims come before 0-d tensors, and these before numbers; a later
    operand decides only if its category is higher."""
    arrays = [operand for operand in operands if isinstance(operand, np.ndarray)]
    numbers = [dtype_of_number(operand) for operand in operands if not isinstance(operand, np.ndarray)]
    ranks = [
        [array.dtype for array in arrays if array.ndim],
        [array.dtype for array in arrays if not array.ndim],
        numbers,
    ]
    dtypes = [promote(rank) for rank in ranks if rank]
    found = dtypes.pop()
    while dtypes:
        found = _outranked(dtypes.pop(), found)
    return found


def promote(dtypes: list[NumPyDType]) -> NumPyDType:
    """The common dtype of operands. Unlike in NumPy, ints never widen floats: int64 + float16 is float16."""
    highest = max(map(category, dtypes))
    if highest == category(DTYPES["complex64"]):
        return np.result_type(*[dtype for dtype in dtypes if category(dtype) >= category(FLOAT16)])
    return np.result_type(*[dtype for dtype in dtypes if category(dtype) == highest])


def _outranked(higher: NumPyDType, lower: NumPyDType) -> NumPyDType:
    if category(lower) <= category(higher):
        return higher
    return np.result_type(higher, np.complex64) if higher.kind == "f" else lower


def floating_dtype(*operands: Operand) -> NumPyDType:
    """The dtype of functions whose results are not integers, such as division and exp."""
    dtype = result_dtype(*operands)
    return FLOAT32 if category(dtype) < category(FLOAT16) else dtype


def summed_dtype(array: Array) -> NumPyDType:
    return INT64 if category(array.dtype) < category(FLOAT16) else array.dtype


def wide(array: Array) -> Array:
    """float16 as float32, in which torch sums it."""
    return array.astype(FLOAT32) if array.dtype == FLOAT16 else array


def cast(value: Operand, dtype: NumPyDType) -> Array:
    return np.asarray(value).astype(dtype, copy=False)


def store(target: Array, result: Array) -> Array:
    """Write the result of an in-place op; raises if torch does not allow its dtype or shape."""
    if category(result.dtype) > category(target.dtype):
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {target.dtype}")
    if result.shape != target.shape:
        raise RuntimeError(f"output with shape {target.shape} doesn't match the broadcast shape {result.shape}")
    np.copyto(target, result, casting="unsafe")
    return target
