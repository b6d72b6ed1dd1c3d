"""Writes a value to the elements of a base that a view selects, even if the view has to be a copy."""

from __future__ import annotations

from collections.abc import Callable

import torch


def write_through(base: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor], value: torch.Tensor) -> None:
    """If the view is a copy, the positions of its elements are found by applying it to a base that holds its own
    positions."""
    target = view(base)
    if target.untyped_storage().data_ptr() == base.untyped_storage().data_ptr():
        target.copy_(value)
        return
    if base.is_complex():
        _write_through_complex(base, view, value)
        return
    positions = view(torch.arange(base.numel(), device=base.device).reshape(base.shape)).reshape(-1)
    flat = base.flatten().clone()
    flat[positions] = value.reshape(-1)
    base.copy_(flat.reshape(base.shape))


def _write_through_complex(
    base: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor], value: torch.Tensor
) -> None:
    """A view may select real or imaginary parts, and conjugate. So both parts of each element are numbered from 1 on:
    in the view of these numbers, a minus sign means that the view holds the negative of the part."""
    numbers = torch.arange(1.0, 2 * base.numel() + 1, dtype=torch.float64, device=base.device)
    positions = _parts(view(torch.view_as_complex(numbers.reshape(*base.shape, 2))))
    parts = _parts(base).reshape(-1)
    parts[positions.abs().long() - 1] = _parts(value) * positions.sign().to(parts.dtype)
    base.copy_(torch.view_as_complex(parts.reshape(*base.shape, 2)))


def _parts(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the real and imaginary parts of a complex tensor; a real tensor itself."""
    plain = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(plain).clone() if plain.is_complex() else plain
