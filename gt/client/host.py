"""Between plain tensors and bytes."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gt.client.geometry import Geometry
from gt.wire.channel import Buffer


def payload(tensor: torch.Tensor) -> memoryview:
    """The bytes of a plain tensor in row-major order; its own memory where that is possible."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"GT holds strided tensors, not {tensor.layout}; call to_dense() first")
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return memoryview(flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy())


def fill(target: memoryview, source: Buffer) -> None:
    """Copy bytes with all cores: most of the time goes into faulting in the pages of the target."""
    torch.frombuffer(target, dtype=torch.uint8).copy_(torch.frombuffer(source, dtype=torch.uint8))


def as_tensor(buffer: Buffer, geometry: Geometry) -> torch.Tensor:
    """A plain tensor over a buffer of row-major bytes, with the strides the user was told."""
    if geometry.nbytes == 0:
        return _empty(geometry)
    tensor = torch.frombuffer(buffer, dtype=geometry.dtype)
    if len(geometry.shape) != 1:
        tensor = tensor.as_strided(geometry.shape, geometry.row_major)
    if geometry.stride == geometry.row_major or not _is_dense(geometry):
        return tensor
    return _empty(geometry).copy_(tensor)


def _empty(geometry: Geometry) -> torch.Tensor:
    """Plain memory, also inside `with gt.device():`."""
    with _disable_current_modes():
        return torch.empty_strided(geometry.shape, geometry.stride, dtype=geometry.dtype)


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
