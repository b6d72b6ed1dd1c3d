"""Classes of GT tensors that are also of a user's subclass of `torch.Tensor`.

Torch makes a tensor of a subclass out of another tensor, in `as_subclass`, in `_make_subclass` and after every op of a
subclass that overrides `__torch_function__`. Made out of a GT tensor, it is of a class that inherits from both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gt.client.error_text import refuse_other_processes
from gt.client.torch_patches.tensors import patch_make_subclass, restore_torch_function

_made: dict[tuple[type[torch.Tensor], type[torch.Tensor]], type[torch.Tensor]] = {}
# Methods of torch's parameters that access memory.
_MEMORY_METHODS = ("__deepcopy__", "__reduce_ex__", "__repr__")


def on_gt(kind: type[torch.Tensor], handle: type[torch.Tensor]) -> type[torch.Tensor]:
    """The class that inherits from a user's class, its `user_type`, and from GT's."""
    if issubclass(kind, handle):
        return kind
    if kind in (torch.Tensor, torch.nn.Parameter):
        return handle
    if (kind, handle) not in _made:
        _made[kind, handle] = _make_class(kind, _overridable(handle))
        refuse_other_processes(_made[kind, handle])
    return _made[kind, handle]


def _make_class(kind: type[torch.Tensor], handle: type[torch.Tensor]) -> type[torch.Tensor]:
    body: dict[str, Any] = {"user_type": kind}
    for name in _MEMORY_METHODS:
        if getattr(kind, name) is getattr(torch.nn.Parameter, name):
            body[name] = getattr(handle, name)
    body |= {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return restore_torch_function(type(kind.__name__, (kind, handle), body))


def _overridable(handle: type[torch.Tensor]) -> type[torch.Tensor]:
    """GT's class with torch's `__torch_function__`, which converts the results of ops to the user's class. The ops
    themselves give tensors of GT's class."""
    override: Any = torch.Tensor.__torch_function__
    body = {"__torch_dispatch__": handle.__torch_dispatch__, "__module__": handle.__module__}
    new: Any = restore_torch_function(type(handle.__name__, (handle,), body))
    new.__torch_function__ = classmethod(override.__func__)
    return new  # type: ignore[no-any-return]


def has_memory(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of a class have their own memory, as in a subclass that only adds methods or attributes.
    Others (`DTensor`, nested tensors) have a `__torch_dispatch__`."""
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def make_subclasses_on_gt(handle: type[torch.Tensor], of_class: Callable[[type[torch.Tensor], Any], Any]) -> None:
    """Let user subclasses make their tensors of GT tensors, by `of_class(subclass, tensor)`."""
    patch_make_subclass(handle, lambda kind, data: of_class(kind, data.data))
