"""Methods of a tensor whose bytes are on workers: they read its value, describe its memory, or change its view."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gt.client.safetensors_hooks import patch_safetensors
from gt.client.session_reads import fetch
from gt.client.storage import Storage, TensorRef
from gt.client.torch_patches.tensors import is_view, swap_tensors
from gt.core.tracebacks import ends_on_users_line


class InPlaceViews(torch.Tensor):
    """Methods of `gt.Tensor` that turn it into a view of itself."""

    __slots__ = ()
    _ref: TensorRef

    def t_(self) -> Any:
        return self._become("t")

    def transpose_(self, dim0: int, dim1: int) -> Any:
        return self._become("transpose", dim0, dim1)

    def swapaxes_(self, axis0: int, axis1: int) -> Any:
        return self._become("transpose", axis0, axis1)

    def swapdims_(self, dim0: int, dim1: int) -> Any:
        return self._become("transpose", dim0, dim1)

    def squeeze_(self, *dim: Any, **named: Any) -> Any:
        return self._become("squeeze", *dim, **named)

    def unsqueeze_(self, dim: int) -> Any:
        return self._become("unsqueeze", dim)

    def as_strided_(self, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
        return self._become("as_strided", size, stride, storage_offset)

    def _become(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Exchange this tensor for a view of it, with all that autograd knows of the view: autograd records the ops
        that make a view, and not those that change a view in place."""
        if not (torch.is_grad_enabled() and is_view(self)):
            return getattr(super(), f"{name}_")(*args, **kwargs)
        other = getattr(self, name)(*args, **kwargs)
        self._ref, other._ref = other._ref, self._ref  # type: ignore[misc]
        swap_tensors(self, other)
        return self


# Libraries compare addresses to find tied weights, and sort them to find overlaps. So a GT tensor has an address
# too. No memory has such an address: it does not fit into 64 bits, and its low 64 bits are zero, so that C code that
# is given it raises (`OverflowError`), or sees a null pointer.


_BYTE = 1 << 64  # the addresses of neighbouring bytes are this far apart
_STORAGE = 1 << 128  # those of storages are this far apart, which no tensor is large enough to reach


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


class MemoryMethods(torch.Tensor):
    """Methods of `gt.Tensor` about its memory."""

    __slots__ = ()
    _ref: TensorRef

    def data_ptr(self) -> int:
        """A number that is equal for tensors that start at the same byte; not an address of memory."""
        return address_of(self._ref)

    def const_data_ptr(self) -> int:
        return address_of(self._ref)

    def untyped_storage(self) -> Any:
        """The size and the identity of the storage, without its bytes."""
        patch_safetensors(MemoryMethods)
        return RemoteStorage(self._ref.storage)

    def storage(self) -> Any:
        patch_safetensors(MemoryMethods)
        return RemoteStorage(self._ref.storage, self.itemsize)

    def _typed_storage(self) -> Any:
        """Raises an error. The workers of a data loader call this to put batches into shared memory."""
        self._ref.session.require_open()
        raise RuntimeError(no_memory("a typed storage"))

    @ends_on_users_line
    def share_memory_(self) -> Any:
        raise RuntimeError(no_memory("share_memory_()"))


class ValueReads(torch.Tensor):
    """Methods of `gt.Tensor` that read its value."""

    __slots__ = ()
    _ref: TensorRef

    def _fetch(self) -> torch.Tensor:
        return fetch(self._ref)

    @ends_on_users_line
    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self._fetch().numpy(force=force)

    @ends_on_users_line
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    @ends_on_users_line
    def tolist(self) -> Any:
        return self._fetch().tolist()

    @ends_on_users_line
    def item(self) -> Any:
        return self._fetch().item()

    # Torch calls these for the elements of a list (`torch.tensor([loss, loss])`), where it does not dispatch.

    @ends_on_users_line
    def __float__(self) -> float:
        return float(self._fetch())

    @ends_on_users_line
    def __int__(self) -> int:
        return int(self._fetch())

    @ends_on_users_line
    def __index__(self) -> int:
        return self._fetch().__index__()

    @ends_on_users_line
    def __complex__(self) -> complex:
        return complex(self._fetch())

    @ends_on_users_line
    def __bool__(self) -> bool:
        return bool(self._fetch())

    @ends_on_users_line
    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 and not self._is_param else object.__format__(self, spec)

    @ends_on_users_line
    def __dlpack__(self, **options: Any) -> Any:
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return self._fetch().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0).__dlpack_device__()
