"""Geometries: the interned shape, strides, offset and dtype of a tensor, on which the inference of calls depends."""

from __future__ import annotations

import math
from weakref import WeakValueDictionary

import torch

from gt.core.meta import ITEM_BYTES, TensorMeta, contiguous_strides

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    if dtype not in DTYPE_NAMES:
        raise TypeError(f"GT has no tensors of {dtype}; it has {', '.join(TORCH_DTYPES)}")
    return DTYPE_NAMES[dtype]


class Geometry:
    """The shape, strides, offset and dtype of tensors. Equal ones are one object, compared and hashed by identity.

    That holds within a session. A tensor of an ended session never matches a cached call of a new one, so that the call
    is inferred, which raises.

    `family` is equal for tensors of the same rank and dtype that have empty dims and dims of one element in the same
    places, and are both row-major or both not.
    """

    __slots__ = ("__weakref__", "dtype", "family", "nbytes", "offset", "row_major", "shape", "stride")

    def __init__(self, shape: torch.Size, stride: tuple[int, ...], offset: int, dtype: torch.dtype) -> None:
        self.shape = shape
        self.stride = stride
        self.offset = offset
        self.dtype = dtype
        self.nbytes = math.prod(shape) * dtype.itemsize
        self.row_major = contiguous_strides(shape)
        self.family = (dtype, tuple([min(size, 2) for size in shape]), stride == self.row_major)

    def __repr__(self) -> str:
        return f"{DTYPE_NAMES[self.dtype]}{list(self.shape)}"

    def meta(self) -> TensorMeta:
        return TensorMeta(tuple(self.shape), self.stride, self.offset, dtype_name(self.dtype))

    def storage_span(self) -> int:
        """The number of elements from the start of the storage to the last one of the tensor."""
        if 0 in self.shape:
            return self.offset
        return self.offset + 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def on_meta(self) -> torch.Tensor:
        """A tensor without bytes of this geometry, for torch's shape functions."""
        storage = torch.empty(self.storage_span(), dtype=self.dtype, device="meta")
        return storage.as_strided(self.shape, self.stride, self.offset)


_Key = tuple[torch.Size, tuple[int, ...], int, torch.dtype]
_interned: WeakValueDictionary[_Key, Geometry] = WeakValueDictionary()


def forget_geometries() -> None:
    """Called when a session begins."""
    _interned.clear()


def geometry_of(tensor: torch.Tensor) -> Geometry:
    return intern_geometry(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


def geometry_from_meta(meta: TensorMeta) -> Geometry:
    return intern_geometry(torch.Size(meta.shape), meta.stride, meta.offset, TORCH_DTYPES[meta.dtype])


def intern_geometry(shape: torch.Size, stride: tuple[int, ...], offset: int, dtype: torch.dtype) -> Geometry:
    key = (shape, stride, offset, dtype)
    found = _interned.get(key)
    if found is None:
        found = _interned[key] = Geometry(shape, stride, offset, dtype)
    return found
