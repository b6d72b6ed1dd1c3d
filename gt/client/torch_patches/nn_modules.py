"""The tables and hooks of a module, `module.cpu()`, the mark of a parameter, and the construction of parameters of lazy
modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module
from torch.optim import optimizer

from gt.client.torch_patches.dispatch import disable_current_modes

GLOBAL_MODULE_HOOKS: list[dict[Any, Any]] = [
    value for name, value in vars(module).items() if name.startswith("_global_") and isinstance(value, dict)
]
GLOBAL_STEP_HOOKS: list[dict[Any, Any]] = [
    optimizer._global_optimizer_pre_hooks,
    optimizer._global_optimizer_post_hooks,
]


_HOOK_OPTIONS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def own_parameters(module: torch.nn.Module) -> dict[str, Any]:
    """The parameters of a module itself, by name, without those of its children."""
    return module._parameters


def own_buffers(module: torch.nn.Module) -> dict[str, Any]:
    return module._buffers


def child_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    return module._modules


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether torch takes a tensor of a subclass for a parameter."""
    return getattr(tensor, "_is_param", False)


def mark_parameter(tensor: torch.Tensor) -> None:
    tensor._is_param = True


def patch_module_cpu(handle: type[torch.Tensor]) -> None:
    """Let `module.cpu()` leave tensors of a class as they are: their device is the CPU. Their own method gives a plain
    tensor."""

    @functools.wraps(torch.nn.Module.cpu)
    def cpu(module: torch.nn.Module) -> torch.nn.Module:
        return module._apply(lambda tensor: tensor if isinstance(tensor, handle) else tensor.cpu())

    torch.nn.Module.cpu = cpu  # type: ignore[method-assign, assignment]


def has_forward_hooks(module: torch.nn.Module, owners: tuple[type, ...]) -> bool:
    """Whether a module has hooks that are objects of some classes, or methods of them."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(isinstance(getattr(hook, "__self__", hook), owners) for hook in hooks)


def remove_forward_hooks(module: torch.nn.Module, owners: tuple[type, ...]) -> None:
    """Remove the hooks that are objects of some classes, or methods of them, also if they were copied or loaded with
    the module."""
    for table in (module._forward_pre_hooks, module._forward_hooks):
        for number, hook in list(table.items()):
            if isinstance(getattr(hook, "__self__", hook), owners):
                for own in (table, *[getattr(module, name) for name in _HOOK_OPTIONS]):
                    own.pop(number, None)


def patch_lazy_construction(
    kind: type[torch.Tensor], is_redirected: Callable[[], bool], convert: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Make a class of uninitialized parameters construct its tensors outside of all dispatch modes, where its
    `__new__` would fail, and convert them if `is_redirected()`."""
    make: Any = kind.__new__

    def __new__(cls: type[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        redirected = is_redirected()
        with disable_current_modes():
            new = make(cls, *args, **kwargs)
        return convert(new) if redirected else new

    kind.__new__ = __new__  # type: ignore[method-assign, assignment]
