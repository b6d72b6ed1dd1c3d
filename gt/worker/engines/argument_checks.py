"""Checks of the arguments of ops: shapes, ranges of indices, strides. `checked_ops.py` combines them.

A check raises IndexError or ValueError, or returns arguments to use instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch

from gt.core.meta import contiguous_strides, memory_span

NamedArguments: TypeAlias = Mapping[str, Any]
Check: TypeAlias = Callable[[NamedArguments], "dict[str, Any] | None"]


def no_overlap(*written: str) -> Check:
    """For kernels that write to a given tensor: each element has its own memory."""

    def check(given: NamedArguments) -> None:
        for name in written:
            for tensor in listed(given.get(name)):
                if memory_span(tensor.shape, tensor.stride()) < tensor.numel():
                    raise ValueError(
                        f"argument {name} of strides {tensor.stride()} has several elements at one address of memory, "
                        f"so it cannot be written to; clone() it first"
                    )

    return check


def shapes(pattern: str) -> Check:
    """Shapes that match a pattern such as "input: N C ...; weight: C": the same letter is the same size, `_` any size,
    `...` any number of dims at the end or at the start. Missing tensors match."""
    wanted = [(name.strip(), dims.split()) for name, _, dims in (part.partition(":") for part in pattern.split(";"))]

    def check(given: NamedArguments) -> None:
        sizes: dict[str, int] = {}
        for name, dims in wanted:
            tensor = given.get(name)
            if tensor is not None and not _fits(tuple(tensor.shape), dims, sizes):
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}, which does not fit ({', '.join(dims)}) "
                    f"where {', '.join([f'{letter} is {size}' for letter, size in sizes.items()])}"
                )

    return check


def _fits(shape: tuple[int, ...], dims: Sequence[str], sizes: dict[str, int]) -> bool:
    if "..." in dims:
        named = [dim for dim in dims if dim != "..."]
        if len(shape) < len(named):
            return False
        shape = shape[: len(named)] if dims[-1] == "..." else shape[len(shape) - len(named) :]
        dims = named
    if len(shape) != len(dims):
        return False
    return all(dim == "_" or sizes.setdefault(dim, size) == size for dim, size in zip(dims, shape, strict=True))


def same_shape(*names: str) -> Check:
    """Tensors of one shape; lists are compared item by item. Missing tensors and empty lists match."""

    def check(given: NamedArguments) -> None:
        present = [(name, listed(given[name])) for name in names if given.get(name) is not None]
        present = [(name, tensors) for name, tensors in present if tensors]
        for name, tensors in present[1:]:
            first, others = present[0]
            if [tuple(t.shape) for t in tensors] != [tuple(t.shape) for t in others]:
                raise ValueError(
                    f"{name} has {_describe(tensors)}, but {first} has {_describe(others)}; they must be the same"
                )

    return check


def same_dtype(*names: str) -> Check:
    def check(given: NamedArguments) -> None:
        present = [(name, tensor) for name in names for tensor in listed(given.get(name))]
        for name, tensor in present[1:]:
            first, expected = present[0][0], present[0][1].dtype
            if tensor.dtype is not expected:
                raise ValueError(f"{name} is of {tensor.dtype}, but {first} is of {expected}; they must be the same")

    return check


def in_range(name: str, size: Callable[[NamedArguments], int], lowest: int = 0) -> Check:
    """Indices that are at least `lowest` and below a size that depends on other arguments."""

    def check(given: NamedArguments) -> None:
        indices = given.get(name)
        if indices is None:
            return
        if isinstance(indices, torch.Tensor):
            if not indices.numel():
                return
            low, high = [int(value) for value in torch.stack(indices.aminmax()).tolist()]
        else:
            low, high = min(indices, default=lowest), max(indices, default=lowest)
        bound = size(given)
        if low < lowest or high >= bound:
            raise IndexError(
                f"{name} has values from {low} to {high}, out of range: they must be from {lowest} to {bound - 1}"
            )

    return check


def as_forward_gives(forward: str, arguments: str, *names: str) -> Check:
    """Tensors of the shape that torch's shape function gives for the forward op of these arguments."""
    used = arguments.split()

    def check(given: NamedArguments) -> None:
        values = tuple(_hashable(given.get(name)) for name in used)
        require_shape(given, names, _forward_shape(forward, values), f"{forward} gives that of {used[0]}")

    return check


@lru_cache(maxsize=4096)
def _forward_shape(forward: str, values: tuple[Any, ...]) -> tuple[int, ...]:
    namespace, op, overload = forward.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), op), overload)
    result = function(*[_as_meta_tensor(value) for value in values])
    return tuple((result if isinstance(result, torch.Tensor) else result[0]).shape)


def _hashable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _ShapeAndDtype(tuple(value.shape), value.dtype)
    return tuple(value) if isinstance(value, list) else value


def _as_meta_tensor(value: Any) -> Any:
    if isinstance(value, _ShapeAndDtype):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return list(value) if isinstance(value, tuple) else value


class _ShapeAndDtype(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


def require_shape(given: NamedArguments, names: Sequence[str], expected: Sequence[int], why: str) -> None:
    for name in names:
        if given.get(name) is not None and tuple(given[name].shape) != tuple(expected):
            raise ValueError(f"{name} has shape {list(given[name].shape)}, but must have {list(expected)}: {why}")


def compact(*names: str) -> Check:
    """For kernels that assume tensors without gaps or overlaps: copies of other tensors, in the same memory format."""

    def check(given: NamedArguments) -> dict[str, Any]:
        return {
            name: value.contiguous() for name in names if (value := given.get(name)) is not None and has_gaps(value)
        }

    return check


def contiguous(*names: str) -> Check:
    """For kernels that assume row-major tensors: row-major copies, with row-major strides also in dims of size 1,
    because the results of some kernels depend on these."""

    def check(given: NamedArguments) -> dict[str, Any]:
        return {name: row_major(given[name]) for name in names if given.get(name) is not None}

    return check


def row_major(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().as_strided(tensor.shape, contiguous_strides(tuple(tensor.shape)))


def has_gaps(tensor: torch.Tensor) -> bool:
    return not torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


def dense(*names: str) -> Check:
    """Contiguous tensors, for kernels that write to them and assume memory without gaps."""

    def check(given: NamedArguments) -> None:
        for name in names:
            if not given[name].is_contiguous():
                raise ValueError(f"{name} has strides {given[name].stride()}; it must be contiguous to be written to")

    return check


def length(name: str, *lengths: int) -> Check:
    """A list with one of the given lengths."""

    def check(given: NamedArguments) -> None:
        if len(given[name]) not in lengths:
            wanted = " or ".join(str(each) for each in lengths)
            raise ValueError(f"{name} has {len(given[name])} numbers, but must have {wanted}")

    return check


def listed(value: Any) -> list[torch.Tensor]:
    if value is None:
        return []
    return [value] if isinstance(value, torch.Tensor) else [item for item in value if item is not None]


def _describe(tensors: Sequence[torch.Tensor]) -> str:
    return f"shapes {', '.join([str(list(tensor.shape)) for tensor in tensors])}"
