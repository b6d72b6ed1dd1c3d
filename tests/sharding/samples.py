"""Random tensors of small whole numbers, whose sums are exact in any order."""

from __future__ import annotations

import torch


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-9, 10, shape).to(dtype)


def indices(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)
