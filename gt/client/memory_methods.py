"""Methods of a tensor about its memory, which is on workers: identities and sizes in place of addresses and bytes."""

from __future__ import annotations

from typing import Any

import torch

from gt.client.remote_storage import RemoteStorage, address_of, no_memory
from gt.client.safetensors_hooks import patch_safetensors
from gt.client.storage import TensorRef
from gt.core.tracebacks import ends_on_users_line


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
