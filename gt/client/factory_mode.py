"""The dispatch mode in which torch's factory functions create GT tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch

from gt.client.torch_patches.dispatch_modes import UntracedMode, current_dispatch_modes
from gt.client.torch_patches.op_registry import schema_of
from gt.sharding.placements import Layout, OpRequest

_LIFT = torch.ops.aten.lift_fresh.default


class FactoryMode(UntracedMode):
    """Inside, a factory that would make a plain tensor makes one of `cls`, in a layout if one is given. Functions that
    take a tensor, or are given another device than the CPU, are unchanged."""

    def __init__(self, cls: type[torch.Tensor], layout: Layout | None = None) -> None:
        super().__init__()
        self._cls: Any = cls
        self._request = OpRequest(layout) if layout is not None else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_lift(func, args) or (not types and _is_factory(func) and _is_host(kwargs.get("device"))):
            return self._cls.__torch_dispatch__(func, types, args, kwargs, self._request)
        return func(*args, **kwargs)


def _is_lift(func: Any, args: Any) -> bool:
    """Whether `torch.tensor(...)` hands over the tensor that it has made of Python values in memory."""
    return func is _LIFT and args[0].device.type == "cpu"


def is_factory_mode_on() -> bool:
    return any(isinstance(mode, FactoryMode) for mode in current_dispatch_modes())


@functools.cache
def _is_factory(func: Any) -> bool:
    arguments = schema_of(func).arguments
    takes_tensor = any("Tensor" in str(argument.type) for argument in arguments)
    return not takes_tensor and any(argument.name == "device" for argument in arguments)


def _is_host(device: Any) -> bool:
    return device is None or torch.device(device).type == "cpu"
