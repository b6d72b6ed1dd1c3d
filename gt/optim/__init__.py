"""torch.optim: its optimizers work on GT parameters as they are.

>>> model = gt.nn.Linear(3, 1)
>>> optimizer = gt.optim.SGD(model.parameters(), lr=0.1)
>>> model(gt.ones(2, 3)).sum().backward()
>>> optimizer.step()
>>> gt.optim.SGD is torch.optim.SGD
True
"""

from __future__ import annotations

from typing import Any

import torch


def __getattr__(name: str) -> Any:
    return getattr(torch.optim, name)
