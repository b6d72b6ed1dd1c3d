"""`RemoteStorage`, the storage of a GT tensor: its size, and an address that identifies it.

Libraries compare addresses to find tied weights, and sort them to find overlaps. So a GT tensor has an address too. No
memory has such an address: it does not fit into 64 bits, and its low 64 bits are zero, so that C code that is given it
raises (`OverflowError`), or sees a null pointer.
"""

from __future__ import annotations

from typing import Any

import torch

from gt.client.storage import Storage, TensorRef

_BYTE = 1 << 64  # the addresses of neighbouring bytes are this far apart
_STORAGE = 1 << 128  # and those of storages this far, which no tensor is large enough to reach


def address_of(ref: TensorRef) -> int:
    """A number that is equal for tensors that start at the same byte of the same storage; 0 for an empty tensor."""
    geometry = ref.geometry
    if geometry.nbytes == 0:
        return 0
    return id(ref.storage) * _STORAGE + geometry.offset * geometry.dtype.itemsize * _BYTE


class RemoteStorage:
    """The result of `tensor.untyped_storage()`, and of `tensor.storage()`, which counts elements instead of bytes."""

    __slots__ = ("_item_bytes", "_storage")

    def __init__(self, storage: Storage, item_bytes: int = 1) -> None:
        self._storage = storage
        self._item_bytes = item_bytes

    def data_ptr(self) -> int:
        return id(self._storage) * _STORAGE if self.nbytes() else 0

    def nbytes(self) -> int:
        geometry = self._storage.geometry
        return geometry.storage_span() * geometry.dtype.itemsize

    def size(self) -> int:
        return self.nbytes() // self._item_bytes

    def __len__(self) -> int:
        return self.size()

    def __sizeof__(self) -> int:
        """As torch's storages count themselves."""
        return object.__sizeof__(self) + self.nbytes()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteStorage) and other._storage is self._storage

    def __hash__(self) -> int:
        return id(self._storage)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(no_memory(f"{name} of a storage"), name=name, obj=self)


def no_memory(what: str) -> str:
    return f"{what} is not possible on a GT tensor: its bytes are on a worker; use tensor.cpu() for a copy here"
