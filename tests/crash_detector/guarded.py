"""Tensors whose memory lies between two pages that cannot be touched."""

from __future__ import annotations

import ctypes
import mmap

import torch

PAGE = mmap.PAGESIZE
_NO_ACCESS = 0  # PROT_NONE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def guarded(tensor: torch.Tensor, at_end: bool) -> torch.Tensor:
    """A copy with the same strides, whose last byte is the last before a guard page (or its first byte the first after
    one). A tensor without elements has no memory to guard."""
    if tensor.numel() == 0 or tensor.layout is not torch.strided:
        return tensor.clone()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = extent * tensor.itemsize
    memory, inside = _between_guards(nbytes)
    offset = PAGE + (inside - nbytes if at_end else 0)
    base = torch.frombuffer(memory, dtype=tensor.dtype, count=extent, offset=offset)
    base.copy_(tensor.as_strided((extent,), (1,)))
    return base.as_strided(tensor.shape, tensor.stride())


def _between_guards(nbytes: int) -> tuple[mmap.mmap, int]:
    """Memory that starts and ends with a guard page, and how many bytes are between these."""
    inside = -(-nbytes // PAGE) * PAGE
    memory = mmap.mmap(-1, inside + 2 * PAGE)
    view = ctypes.c_char.from_buffer(memory)
    start = ctypes.addressof(view)
    del view
    for guard in (start, start + PAGE + inside):
        if _libc.mprotect(guard, PAGE, _NO_ACCESS):
            raise OSError(ctypes.get_errno(), "mprotect failed: a guard page could not be made")
    return memory, inside
