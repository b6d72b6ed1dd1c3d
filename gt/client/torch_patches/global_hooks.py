"""The hooks that torch calls for every module, and for the step of every optimizer."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module
from torch.optim import optimizer

GLOBAL_MODULE_HOOKS: list[dict[Any, Any]] = [
    value for name, value in vars(module).items() if name.startswith("_global_") and isinstance(value, dict)
]
GLOBAL_STEP_HOOKS: list[dict[Any, Any]] = [
    optimizer._global_optimizer_pre_hooks,
    optimizer._global_optimizer_post_hooks,
]
