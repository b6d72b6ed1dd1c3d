"""Tensors on GT that are also of a user's subclass of `torch.Tensor`.

Torch makes a tensor of such a class out of another tensor, in `as_subclass`, in `_make_subclass` and after every op of
a subclass that overrides `__torch_function__`. What it makes of a GT tensor is of a class that is both.
"""

from __future__ import annotations

from typing import Any

import torch

from gt.client.torch_patches.subclass_making import patch_make_subclass, restore_torch_function

_made: dict[tuple[type[torch.Tensor], type[torch.Tensor]], type[torch.Tensor]] = {}
# Methods of torch's parameters that take their tensors for memory.
_OF_MEMORY = ("__deepcopy__", "__reduce_ex__", "__repr__")


def on_gt(kind: type[torch.Tensor], handle: type[torch.Tensor]) -> type[torch.Tensor]:
    """The class of tensors that are of a user's class and of ours. `user_type` is the former."""
    if issubclass(kind, handle):
        return kind
    if kind in (torch.Tensor, torch.nn.Parameter):
        return handle
    if (kind, handle) not in _made:
        _made[kind, handle] = _make_class(kind, _overridable(handle))
    return _made[kind, handle]


def _make_class(kind: type[torch.Tensor], handle: type[torch.Tensor]) -> type[torch.Tensor]:
    body: dict[str, Any] = {"user_type": kind}
    for name in _OF_MEMORY:
        if getattr(kind, name) is getattr(torch.nn.Parameter, name):
            body[name] = getattr(handle, name)
    body |= {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return restore_torch_function(type(kind.__name__, (kind, handle), body))


def _overridable(handle: type[torch.Tensor]) -> type[torch.Tensor]:
    """Our class with `__torch_function__` as torch has it, which keeps the results of ops in the user's class. The ops
    themselves give tensors of our class."""
    override: Any = torch.Tensor.__torch_function__
    body = {"__torch_dispatch__": handle.__torch_dispatch__, "__module__": handle.__module__}
    new: Any = restore_torch_function(type(handle.__name__, (handle,), body))
    new.__torch_function__ = classmethod(override.__func__)
    return new  # type: ignore[no-any-return]


def has_memory(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of a class are memory, as those of a subclass are that only adds methods or attributes. Others
    (`DTensor`, nested tensors) run ops by themselves."""
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def make_subclasses_on_gt(handle: type[torch.Tensor]) -> None:
    """Let user subclasses make their tensors of GT tensors."""

    def convert(kind: type[torch.Tensor], data: Any) -> torch.Tensor:
        new: Any = data.data
        new.__class__ = on_gt(kind, handle)
        return new  # type: ignore[no-any-return]

    patch_make_subclass(handle, convert)
