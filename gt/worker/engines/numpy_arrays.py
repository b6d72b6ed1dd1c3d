"""Torch's tensors as NumPy's arrays: dtypes and type promotion, strides, and views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from gt.core.meta import ITEM_BYTES, memory_span, same_places

Array: TypeAlias = npt.NDArray[Any]
NumPyDType: TypeAlias = np.dtype[Any]
Operand: TypeAlias = Array | bool | int | float | complex
Sizes: TypeAlias = Sequence[int]


# Dtypes

DTYPES: dict[str, NumPyDType] = {name: np.dtype(name) for name in ITEM_BYTES if hasattr(np, name)}
BOOL, UINT8, INT64 = DTYPES["bool"], DTYPES["uint8"], DTYPES["int64"]
FLOAT16, FLOAT32, FLOAT64, COMPLEX64 = [DTYPES[name] for name in ("float16", "float32", "float64", "complex64")]
_OF_NUMBERS: dict[type, NumPyDType] = {bool: BOOL, int: INT64, float: FLOAT32, complex: COMPLEX64}
_CATEGORIES = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}  # of NumPy's kinds


def dtype_named(name: str) -> NumPyDType:
    if name not in DTYPES:
        raise NotImplementedError(f"NumPy has no dtype {name}; use one of {', '.join(DTYPES)}, or the pytorch backend")
    return DTYPES[name]


def is_floating(dtype: NumPyDType) -> bool:
    """Whether a dtype is of floating point numbers, real or complex."""
    return dtype.kind in "fc"


def result_dtype(*operands: Operand) -> NumPyDType:
    """The dtype in which torch computes. Tensors with dims come before 0-d tensors, and these before numbers; a later
    operand decides only if its category is higher."""
    ranks: list[list[NumPyDType]] = [[], [], []]
    for operand in operands:
        if isinstance(operand, np.ndarray):
            ranks[0 if operand.ndim else 1].append(operand.dtype)
        else:
            ranks[2].append(_OF_NUMBERS[type(operand)])
    return reduce(_outranked, [_promote(rank) for rank in ranks if rank])


def _promote(dtypes: Sequence[NumPyDType]) -> NumPyDType:
    """The common dtype of operands. Unlike in NumPy, ints never widen floats: int64 + float16 is float16."""
    return np.result_type(*([dtype for dtype in dtypes if is_floating(dtype)] or dtypes))


def _outranked(higher: NumPyDType, lower: NumPyDType) -> NumPyDType:
    if _CATEGORIES[lower.kind] <= _CATEGORIES[higher.kind]:
        return higher
    return np.result_type(higher, COMPLEX64) if higher.kind == "f" else lower


def floating_dtype(*operands: Operand) -> NumPyDType:
    """The dtype of functions whose results are not integers, such as division and exp."""
    dtype = result_dtype(*operands)
    return dtype if is_floating(dtype) else FLOAT32


def wide(array: Array) -> Array:
    """float16 as float32, in which torch sums it."""
    return array.astype(FLOAT32) if array.dtype == FLOAT16 else array


def cast(value: Operand, dtype: NumPyDType) -> Array:
    return np.asarray(value).astype(dtype, copy=False)


def store(target: Array, result: Array) -> Array:
    """Write the result of an in-place op; raises if torch does not allow its dtype or shape."""
    if _CATEGORIES[result.dtype.kind] > _CATEGORIES[target.dtype.kind]:
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {target.dtype}")
    if result.shape != target.shape:
        raise RuntimeError(f"output with shape {target.shape} doesn't match the broadcast shape {result.shape}")
    np.copyto(target, result, casting="unsafe")
    return target


# Strides, which torch counts in elements


def element_strides(array: Array) -> tuple[int, ...]:
    return tuple(stride // array.itemsize for stride in array.strides)


def empty_strided(shape: Sizes, strides: Sizes, dtype: NumPyDType) -> Array:
    """Zeros, since `as_strided` may show the gaps between the elements."""
    return array_at(np.zeros(memory_span(shape, strides), dtype), shape, strides, 0)


def array_at(memory: Array, shape: Sizes, strides: Sizes, offset: int) -> Array:
    """An array over a part of flat memory. Checked, because NumPy's as_strided reads beyond the end."""
    reach = memory_span(shape, strides)
    if offset < 0 or min(strides, default=0) < 0 or (reach and offset + reach > memory.size):
        raise RuntimeError(f"as_strided({shape}, {strides}, {offset}) is out of bounds of {memory.size} elements")
    return as_strided(memory[offset:], tuple(shape), [stride * memory.itemsize for stride in strides])


def with_strides(array: Array, strides: Sizes) -> Array:
    """The array with these strides: over the same memory if they differ in dims of size 1 only, otherwise a copy."""
    if not same_places(array.shape, element_strides(array), strides):
        return copy_with_strides(strides, array)
    return as_strided(array, array.shape, [stride * array.itemsize for stride in strides])


def copy_with_strides(strides: Sizes, array: Array) -> Array:
    """A copy of an array with these strides, which may let equal elements share memory."""
    target = empty_strided(array.shape, strides, array.dtype)
    np.copyto(target, array)
    return target


def memory_owner(array: Array) -> object:
    """The object that owns the memory: an array, or the buffer that a tensor arrived in."""
    holder: object = array
    while (base := getattr(holder, "base", None)) is not None:
        holder = base
    return holder


# Views, which share memory with their argument if its strides allow that


def make_strided_view(shape: Sizes, strides: Sizes, offset: int, assumed: Sizes) -> Callable[[Array], Array]:
    """as_strided on the storage that the client assumes: one that starts at the tensor and has strides `assumed`."""

    def view(array: Array) -> Array:
        array = with_strides(array, assumed)
        memory = as_strided(array, (memory_span(array.shape, assumed),), (array.itemsize,))
        return array_at(memory, shape, strides, offset)

    return view


def _expand(array: Array, shape: Sizes, *, implicit: bool = False) -> Array:
    kept = (1,) * (len(shape) - array.ndim) + array.shape
    wide = np.broadcast_to(array, [have if want == -1 else want for have, want in zip(kept, shape, strict=True)])
    return as_strided(array, wide.shape, wide.strides)  # broadcast_to's own result is read-only


def _t(array: Array) -> Array:
    if array.ndim > 2:
        raise RuntimeError(f"t() expects a tensor with <= 2 dimensions, but self is {array.ndim}D")
    return array.T


def _squeeze(array: Array, dims: Sizes) -> Array:
    return np.squeeze(array, tuple(dim for dim in dims if array.ndim and array.shape[dim] == 1))


def _select(array: Array, dim: int, index: int | slice) -> Array:
    # with the ellipsis NumPy returns a 0-d view, without it a number
    return array[(*[slice(None)] * (dim % array.ndim), index, ...)]


def _slice(array: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    return _select(array, dim, slice(start, end, step))


def _split(array: Array, sizes: int | Sizes, dim: int = 0) -> list[Array]:
    """Parts of given sizes, or parts of one size."""
    length = array.shape[dim]
    if isinstance(sizes, int):
        sizes = [sizes] * max(-(-length // max(sizes, 1)), 1)
    return [_slice(array, dim, end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


VIEWS: dict[str, Callable[..., Array | list[Array]]] = {
    "aten.view.default": np.reshape,
    "aten._reshape_alias.default": lambda array, shape, strides: array.reshape(shape),
    "aten.view.dtype": lambda array, dtype: array.view(dtype),
    "aten.t.default": _t,
    "aten.transpose.int": lambda array, first, second: array.swapaxes(first, second) if array.ndim else array[...],
    "aten.permute.default": np.transpose,
    "aten.expand.default": _expand,
    "aten.unsqueeze.default": np.expand_dims,
    "aten.squeeze.default": np.squeeze,
    "aten.squeeze.dim": lambda array, dim: _squeeze(array, [dim]),
    "aten.squeeze.dims": _squeeze,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.unbind.int": lambda array, dim=0: [_select(array, dim, index) for index in range(array.shape[dim])],
    "aten.detach.default": lambda array: array[...],
    "aten.alias.default": lambda array: array[...],
}
