"""What is known about a tensor without its bytes."""

from __future__ import annotations

import math

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

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
