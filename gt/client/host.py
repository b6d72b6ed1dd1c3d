"""Between plain tensors and bytes."""

from __future__ import annotations

import torch

from gt.client.geometry import Geometry
from gt.wire.channel import Buffer


def payload(tensor: torch.Tensor) -> memoryview:
    """The bytes of a plain tensor in row-major order; its own memory where that is possible."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"GT holds strided tensors, not {tensor.layout}; call to_dense() first")
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return memoryview(flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy())


def as_tensor(buffer: Buffer, geometry: Geometry) -> torch.Tensor:
    """A plain tensor over a buffer of row-major bytes, with the strides the user was told."""
    if geometry.nbytes == 0:
        return torch.empty_strided(geometry.shape, geometry.stride, dtype=geometry.dtype)
    tensor = torch.frombuffer(buffer, dtype=torch.uint8).view(geometry.dtype).reshape(geometry.shape)
    if tensor.stride() == geometry.stride or not _is_dense(geometry):
        return tensor
    return torch.empty_strided(geometry.shape, geometry.stride, dtype=geometry.dtype).copy_(tensor)


def _is_dense(geometry: Geometry) -> bool:
    """Whether the strides are a permutation of row-major ones; slices of larger tensors come back compact."""
    expected = 1
    for step, size in sorted(zip(geometry.stride, geometry.shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True
