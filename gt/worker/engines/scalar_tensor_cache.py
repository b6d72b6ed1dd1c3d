"""A cache of tensors for Python numbers: torch makes a tensor of a number at every call, as slowly as a small op."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gt.core.signatures import Number

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
