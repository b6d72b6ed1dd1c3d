"""torch.optim: its optimizers work on GT parameters as they are."""

from __future__ import annotations

from typing import Any

import torch


def __getattr__(name: str) -> Any:
    return getattr(torch.optim, name)
