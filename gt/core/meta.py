"""Shape, strides and dtype of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

ITEM_BYTES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip

MAX_DIMS = 64
MAX_ELEMENTS = 1 << 48


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """Global shape, logical strides and dtype. `offset` and `stride` count elements of the tensor's storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(ITEM_BYTES)}")
        if len(self.shape) > MAX_DIMS or len(self.stride) != len(self.shape):
            raise ValueError(
                f"a tensor has at most {MAX_DIMS} dims and a stride for each, not {self.shape} {self.stride}"
            )
        if min(self.shape, default=0) < 0 or self.offset < 0:
            raise ValueError(f"negative size or offset in {self.shape}, {self.offset}")
        if math.prod(self.shape) > MAX_ELEMENTS:
            raise ValueError(f"shape {self.shape} has more than 2^48 elements")
        if min(self.stride, default=0) < 0 or self.memory_span > MAX_ELEMENTS:
            raise ValueError(f"strides {self.stride} are negative, or reach over more than 2^48 elements")

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]

    @property
    def memory_span(self) -> int:
        """The number of memory elements from the tensor's first element to its last."""
        return memory_span(self.shape, self.stride)

    def dense(self) -> TensorMeta:
        """The same tensor in its own memory, with the same memory format and without gaps."""
        return TensorMeta(self.shape, dense_strides(self.shape, self.stride), 0, self.dtype)

    def part(self, shape: tuple[int, ...]) -> TensorMeta:
        """A shard of the tensor in its own memory. The whole tensor keeps its strides; any other shard is dense, with
        its dims in the same memory order."""
        stride = self.stride if shape == self.shape else dense_strides(shape, self.stride)
        return TensorMeta(shape, stride, 0, self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def memory_span(shape: Sequence[int], stride: Sequence[int]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum([(size - 1) * step for size, step in zip(shape, stride, strict=True)])


def memory_order(stride: Sequence[int]) -> tuple[int, ...]:
    """The dims of a tensor from the outermost to the innermost in memory; dims of equal strides keep their order."""
    return tuple(sorted(range(len(stride)), key=lambda dim: -stride[dim]))


def dense_strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, with the dims in the memory order of the given strides."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(memory_order(stride)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the tensor has no gaps and no two elements share memory. Strides of dims of size 1 do not count; a tensor
    without elements has neither."""
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True


def has_overlap(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two elements may share memory; True also for some strides where none do."""
    end = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and step < end:
            return True
        end += (size - 1) * step
    return False


def same_places(shape: Sequence[int], stride: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two strides give every element the same address; strides of dims of size 1 do not count."""
    return 0 in shape or all(size == 1 or left == right for size, left, right in zip(shape, stride, other, strict=True))
