"""Plain tensors that are operands of ops on GT tensors: small ones are uploaded once for each content."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from gt.client.host_data import payload, strided
from gt.client.storage import Storage

MAX_BYTES = 1 << 16  # of a tensor that is kept
MAX_TENSORS = 512


class UploadCache:
    """Uploads by content; the least recently used is dropped first. Models make the same masks and numbers again and
    again. By content and not by identity, because NumPy may write to a tensor's memory unseen."""

    def __init__(self, upload: Callable[[torch.Tensor], Storage]) -> None:
        self._upload = upload
        self._kept: OrderedDict[tuple[Any, ...], Storage] = OrderedDict()
        self._lock = threading.RLock()

    def storage_of(self, tensor: torch.Tensor) -> Storage:
        """The upload of a plain tensor: an earlier one if the tensor is small and its content was uploaded before."""
        if tensor.numel() * tensor.itemsize > MAX_BYTES:
            return self._upload(tensor)
        plain = strided(tensor)
        key = (plain.dtype, plain.shape, plain.stride(), bytes(payload(plain, plain.stride())))
        with self._lock:
            kept = self._kept  # not the table of a `forget` that comes while this tensor is uploaded
            storage = kept.get(key)
            if storage is None:
                storage = kept[key] = self._upload(plain)
                if len(kept) > MAX_TENSORS:
                    kept.popitem(last=False)
            else:
                kept.move_to_end(key)
        return storage

    def forget(self) -> None:
        """Upload every content anew when it is next used: uploads may be lost with a worker. Without the lock, whose
        holder may wait for the thread that calls this."""
        self._kept = OrderedDict()
