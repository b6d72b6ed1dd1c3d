"""The dispatch mode in which torch's factory functions create GT tensors."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from gt.client.torch_patches.dispatch import UntracedMode, current_dispatch_modes, disable_current_modes, schema_of
from gt.sharding.placements import Layout, OpRequest

_LIFT = torch.ops.aten.lift_fresh.default
_FROM_STORAGE = (torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset)
_forks = 0  # number of forks between the first process and this one


class FactoryMode(UntracedMode):
    """A mode in which factories of plain tensors make those of `cls`, in a layout if one is given. Functions that take
    a tensor, or are given another device than the CPU, are unchanged. In a process that is forked inside, such as a
    worker of a data loader, all are unchanged: a session belongs to one process."""

    def __init__(self, cls: type[torch.Tensor], layout: Layout | None = None) -> None:
        super().__init__()
        self._cls: Any = cls
        self._request = OpRequest(layout) if layout is not None else None
        self._forks = _forks

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked inside the mode."""
        return self._forks != _forks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        makes_tensor = _is_lift(func, args) or (not types and _is_factory(func) and _is_host(kwargs.get("device")))
        if func in _FROM_STORAGE and hasattr(args[0], "_ref"):
            return _set_to_storage(func, args, kwargs)
        if makes_tensor and not self.is_inherited:
            return self._cls.__torch_dispatch__(func, types, args, kwargs, self._request)
        return func(*args, **kwargs)


def _set_to_storage(func: Any, args: Any, kwargs: Any) -> Any:
    """Set a tensor to a copy of this process's memory; `torch.load` and data loaders set an empty one to it."""
    with disable_current_modes():
        plain = func(torch.empty(0, dtype=args[0].dtype), *args[1:], **kwargs)
    return torch.ops.aten.set_.source_Tensor(args[0], plain)


def _is_lift(func: Any, args: Any) -> bool:
    """Whether `torch.tensor(...)` hands over the tensor that it has made of Python values in memory."""
    return func is _LIFT and args[0].device.type == "cpu"


def is_factory_mode_on() -> bool:
    return any(isinstance(mode, FactoryMode) and not mode.is_inherited for mode in current_dispatch_modes())


@functools.cache
def _is_factory(func: Any) -> bool:
    arguments = schema_of(func).arguments
    takes_tensor = any("Tensor" in str(argument.type) for argument in arguments)
    return not takes_tensor and any(argument.name == "device" for argument in arguments)


def _is_host(device: Any) -> bool:
    return device is None or torch.device(device).type == "cpu"


def _note_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_note_fork)
