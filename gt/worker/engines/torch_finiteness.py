"""Whether the elements of torch's tensors are finite."""

from __future__ import annotations

import torch

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
