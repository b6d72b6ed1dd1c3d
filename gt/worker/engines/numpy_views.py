"""View ops on arrays, whose results share memory with their argument if its strides allow that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from gt.core.meta import memory_span
from gt.worker.engines.numpy_types import Array, NumPyDType

Sizes: TypeAlias = Sequence[int]
ViewOp: TypeAlias = Callable[..., Array | list[Array]]


def element_strides(array: Array) -> tuple[int, ...]:
    return tuple(stride // array.itemsize for stride in array.strides)


def empty_strided(shape: Sizes, strides: Sizes, dtype: NumPyDType) -> Array:
    """Zeros, since `as_strided` may show the gaps between the elements."""
    return array_at(np.zeros(memory_span(shape, strides), dtype), shape, strides, 0)


def make_strided_view(shape: Sizes, strides: Sizes, offset: int, assumed: Sizes) -> Callable[[Array], Array]:
    """as_strided on the storage that the client assumes: one that starts at the tensor and has strides `assumed`."""

    def view(array: Array) -> Array:
        array = with_strides(array, assumed)
        memory = as_strided(array, (memory_span(array.shape, assumed),), (array.itemsize,))
        return array_at(memory, shape, strides, offset)

    return view


def with_strides(array: Array, strides: Sizes) -> Array:
    """The array with these strides: over the same memory if they differ in dims of size 1 only, otherwise a copy."""
    if not _has_strides(array, strides):
        return copy_with_strides(strides, array)
    return as_strided(array, array.shape, [stride * array.itemsize for stride in strides])


def copy_with_strides(strides: Sizes, array: Array) -> Array:
    """A copy of an array with these strides, which may let equal elements share memory."""
    target = empty_strided(array.shape, strides, array.dtype)
    np.copyto(target, array)
    return target


def _has_strides(array: Array, strides: Sizes) -> bool:
    """Whether an array has these strides in all dims of more than one element."""
    found = zip(array.shape, element_strides(array), strides, strict=True)
    return all(size <= 1 or stride == wanted for size, stride, wanted in found)


def array_at(memory: Array, shape: Sizes, strides: Sizes, offset: int) -> Array:
    """An array over a part of flat memory. Checked, because NumPy's as_strided reads beyond the end."""
    reach = memory_span(shape, strides)
    if offset < 0 or min(strides, default=0) < 0 or (reach and offset + reach > memory.size):
        raise RuntimeError(f"as_strided({shape}, {strides}, {offset}) is out of bounds of {memory.size} elements")
    return as_strided(memory[offset:], tuple(shape), [stride * memory.itemsize for stride in strides])


def memory_owner(array: Array) -> object:
    """The object that owns the memory: an array, or the buffer that a tensor arrived in."""
    holder: object = array
    while (base := getattr(holder, "base", None)) is not None:
        holder = base
    return holder


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


def _along(array: Array, dim: int, index: int | slice) -> Array:
    # with the ellipsis NumPy returns a 0-d view, without it a number
    return array[(*[slice(None)] * (dim % array.ndim), index, ...)]


def _slice(array: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    return _along(array, dim, slice(start, end, step))


def _select(array: Array, dim: int, index: int) -> Array:
    return _along(array, dim, index)


def _split(array: Array, size: int, dim: int = 0) -> list[Array]:
    return [_along(array, dim, slice(at, at + size)) for at in range(0, max(array.shape[dim], 1), max(size, 1))]


def _split_with_sizes(array: Array, sizes: Sizes, dim: int = 0) -> list[Array]:
    ends = [sum(sizes[: position + 1]) for position in range(len(sizes))]
    return [_along(array, dim, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def _unbind(array: Array, dim: int = 0) -> list[Array]:
    return [_along(array, dim, index) for index in range(array.shape[dim])]


VIEWS: dict[str, ViewOp] = {
    "aten.view.default": lambda array, shape: array.reshape(shape),
    "aten._reshape_alias.default": lambda array, shape, strides: array.reshape(shape),
    "aten.view.dtype": lambda array, dtype: array.view(dtype),
    "aten.t.default": _t,
    "aten.transpose.int": lambda array, first, second: array.swapaxes(first, second) if array.ndim else array[...],
    "aten.permute.default": lambda array, dims: array.transpose(dims),
    "aten.expand.default": _expand,
    "aten.unsqueeze.default": np.expand_dims,
    "aten.squeeze.default": np.squeeze,
    "aten.squeeze.dim": lambda array, dim: _squeeze(array, [dim]),
    "aten.squeeze.dims": _squeeze,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split_with_sizes,
    "aten.unbind.int": _unbind,
    "aten.detach.default": lambda array: array[...],
    "aten.alias.default": lambda array: array[...],
}
