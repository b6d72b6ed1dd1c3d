"""Where torch's factory functions create GT tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gt.sharding.placements import Layout

_LIFT = torch.ops.aten.lift_fresh.default


class FactoryMode(TorchDispatchMode):
    """Inside, a factory that would make a plain tensor makes one of `cls`. What has a tensor among its arguments, or
    asks for another device than the CPU, is left alone. `layout`: how what is made is laid out."""

    def __init__(self, cls: type[torch.Tensor], layout: Layout | None = None) -> None:
        super().__init__()
        self._cls: Any = cls
        self._layout = layout

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch would wrap the method below to keep its compiler out, and import the compiler for that: 1.6 s.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_lift(func, args) or (not types and _is_factory(func) and _is_host(kwargs.get("device"))):
            return self._cls.__torch_dispatch__(func, types, args, kwargs, self._layout)
        return func(*args, **kwargs)


def _is_lift(func: Any, args: Any) -> bool:
    """Whether `torch.tensor(...)` hands over the tensor that it has made of Python values in memory."""
    return func is _LIFT and args[0].device.type == "cpu"


@functools.cache
def _is_factory(func: Any) -> bool:
    arguments = func._schema.arguments
    takes_tensor = any("Tensor" in str(argument.type) for argument in arguments)
    return not takes_tensor and any(argument.name == "device" for argument in arguments)


def _is_host(where: Any) -> bool:
    return where is None or torch.device(where).type == "cpu"
