"""Plain tensors on their way to workers and back: operands that are uploaded once for each content, and the parts of a
tensor in a layout."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gt.client.geometry import DTYPE_NAMES, TORCH_DTYPES, Geometry
from gt.client.host_data import empty_dense, payload, strided, tensor_of_bytes
from gt.client.storage import Storage
from gt.client.torch_patches.dispatch import current_dispatch_modes, disable_current_modes
from gt.core.meta import memory_order
from gt.sharding.boxes import Box, box_shape
from gt.sharding.dtypes import accumulation_dtype
from gt.sharding.held_parts import TensorPart, parts_to_read
from gt.sharding.spec import ShardingSpec
from gt.wire.codec import Buffer

MAX_BYTES = 1 << 16  # size of a tensor that is kept
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


REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "and": torch.logical_and,
    "or": torch.logical_or,
}


def write_parts(
    tensor: torch.Tensor, stride: Sequence[int], parts: Sequence[TensorPart], target: memoryview
) -> None:  # fmt: skip
    """Copy boxes of a plain tensor to memory, one after another, each in the order of `stride`."""
    if not len(target):
        return
    memory = torch.frombuffer(target, dtype=tensor.dtype)
    order, start = memory_order(stride), 0
    for part in parts:
        box = tensor[_slices(part.box)].permute(order)
        memory[start : start + box.numel()].view(box.shape).copy_(box)
        start += box.numel()


def assemble(
    buffers: Sequence[Buffer], layout: ShardingSpec | None, geometry: Geometry, is_shared: bool
) -> torch.Tensor:
    """A plain tensor, put together from the parts that workers hold of it in a layout; without a layout, `buffers` has
    the whole tensor. Partial values are reduced as workers do: in the same order, and in a wider dtype where sums need
    one. Memory that `is_shared` is copied."""
    if layout is None:
        return tensor_of_bytes(buffers[0], geometry, copies=is_shared)
    with disable_current_modes() if current_dispatch_modes() else contextlib.nullcontext():
        parts = zip(parts_to_read(layout, tuple(geometry.shape)), buffers, strict=True)
        addends = [list(group) for _, group in itertools.groupby(parts, key=lambda part: part[0].addend)]
        if len(addends) == 1:
            return _joined(addends[0], geometry, copies=is_shared)
        return _reduced(layout.kind, [_joined(addend, geometry, copies=False) for addend in addends], geometry)


def _joined(parts: Sequence[tuple[TensorPart, Buffer]], geometry: Geometry, copies: bool) -> torch.Tensor:
    """The tensor that consists of some boxes."""
    if len(parts) == 1:
        return tensor_of_bytes(parts[0][1], geometry, copies)
    whole = empty_dense(geometry)
    for part, buffer in parts:
        whole[_slices(part.box)] = torch.frombuffer(buffer, dtype=geometry.dtype).view(box_shape(part.box))
    return whole


def _reduced(kind: str, addends: Sequence[torch.Tensor], geometry: Geometry) -> torch.Tensor:
    name = DTYPE_NAMES[geometry.dtype]
    wide = TORCH_DTYPES[accumulation_dtype(name)] if kind in ("sum", "prod") else geometry.dtype
    total = functools.reduce(REDUCTIONS[kind], [addend.to(wide) for addend in addends])
    return total.to(geometry.dtype)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple([slice(start, stop) for start, stop in box])
