"""torch.optim: its optimizers work on GT parameters as they are.

>>> model = gt.nn.Linear(3, 1)
>>> optimizer = gt.optim.SGD(model.parameters(), lr=0.1)
>>> model(gt.ones(2, 3)).sum().backward()
>>> optimizer.step()
>>> gt.optim.SGD is torch.optim.SGD
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.optim import *  # noqa: F403
    from torch.optim import lr_scheduler as lr_scheduler
else:

    def __getattr__(name: str) -> Any:
        return getattr(torch.optim, name)
