"""Values in torch's tensors: whether they are finite, writes through views, and tensors of Python numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gt.core.signatures import Number
from gt.worker.engines.engine import Finiteness


def finiteness(value: torch.Tensor) -> Finiteness:
    if not (value.is_floating_point() or value.is_complex()):
        return Finiteness(False, False)
    plain = _comparable(value)
    if bool(torch.isfinite(plain).all()):
        return Finiteness(False, False)
    return Finiteness(bool(torch.isnan(plain).any()), bool(torch.isinf(plain).any()))


def extremes(value: torch.Tensor) -> tuple[float, float] | None:
    if not value.is_floating_point() or not value.numel():
        return None
    low, high = torch.aminmax(_comparable(value))
    return float(low), float(high)


def _comparable(value: torch.Tensor) -> torch.Tensor:
    """Torch cannot compare numbers of 8 bits."""
    return value.float() if value.itemsize == 1 else value


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


_MOST_KEPT = 1 << 12

# With a tensor of type float64 and no dims these ops give the same bits as with the number, which torch turns into such
# a tensor, if the other operand is of a real floating type and has dims. Otherwise the types of results would differ.
_OPS = frozenset(f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_"))


def takes_number_as_tensor(op: str, operand: torch.Tensor) -> bool:
    return op in _OPS and operand.is_floating_point() and operand.dim() > 0


def with_number_as_tensor(function: Callable[[torch.Tensor, Any], Any]) -> Callable[[torch.Tensor, Number], Any]:
    """A function of a tensor and a number, given a function of two tensors."""

    def call(operand: torch.Tensor, number: Number) -> Any:
        """Hot path."""
        kept = _kept.get(number) if type(number) is float else None
        return function(operand, kept if kept is not None else _keep(number))

    return call


_kept: dict[float, torch.Tensor] = {}


def _keep(number: Number) -> Any:
    """A tensor for a number, or the number itself: zeros of both signs would share one tensor, a NaN is never found
    again, and torch converts an int in another way."""
    if type(number) is not float or not number or math.isnan(number):
        return number
    if len(_kept) >= _MOST_KEPT:
        _kept.clear()
    kept = _kept[number] = torch.tensor(number, dtype=torch.float64)
    return kept
