"""Functions that make tensors on GT. They are torch's own, run where torch's factories create GT tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from gt.client.factories import FactoryMode
from gt.client.tensor import Tensor, to_gt

Module = TypeVar("Module", bound=torch.nn.Module)


def device() -> FactoryMode:
    """Inside `with gt.device():` torch's own factory functions create GT tensors, so that a third-party model is built
    on the workers without ever being whole in this process."""
    return FactoryMode(Tensor)


def _on_gt(function: Callable[..., Any]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def create(*args: Any, **kwargs: Any) -> Tensor:
        with device():
            return function(*args, **kwargs)  # type: ignore[no-any-return]

    return create


def _from_gt(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """For functions of a tensor: a plain one is moved first."""

    @functools.wraps(function)
    def create(*args: Any, **kwargs: Any) -> Tensor:
        args, kwargs = tree_map_only(torch.Tensor, to_gt, (args, kwargs))
        return function(*args, **kwargs)  # type: ignore[no-any-return]

    return create


zeros, ones, full, empty = _on_gt(torch.zeros), _on_gt(torch.ones), _on_gt(torch.full), _on_gt(torch.empty)
eye, arange, linspace = _on_gt(torch.eye), _on_gt(torch.arange), _on_gt(torch.linspace)
rand, randn, randint, randperm = _on_gt(torch.rand), _on_gt(torch.randn), _on_gt(torch.randint), _on_gt(torch.randperm)

bernoulli = _from_gt(torch.bernoulli)
zeros_like, ones_like, full_like = _from_gt(torch.zeros_like), _from_gt(torch.ones_like), _from_gt(torch.full_like)
empty_like, rand_like = _from_gt(torch.empty_like), _from_gt(torch.rand_like)
randn_like, randint_like = _from_gt(torch.randn_like), _from_gt(torch.randint_like)


def tensor(data: Any, *, dtype: torch.dtype | None = None, requires_grad: bool = False) -> Tensor:
    """A new tensor with a copy of the data, as torch.tensor."""
    if isinstance(data, Tensor):
        copy = data.detach().clone() if dtype is None else data.detach().to(dtype, copy=True)
        return copy.requires_grad_(requires_grad)  # type: ignore[return-value]
    if isinstance(data, torch.Tensor):
        return to_gt(data.detach().to(dtype or data.dtype)).requires_grad_(requires_grad)  # type: ignore[return-value]
    return to_gt(torch.tensor(data, dtype=dtype)).requires_grad_(requires_grad)  # type: ignore[return-value]


def as_tensor(data: Any, dtype: torch.dtype | None = None) -> Tensor:
    """The data on GT: itself where it is a GT tensor of that dtype already."""
    if isinstance(data, Tensor):
        return data if dtype is None else data.to(dtype)  # type: ignore[return-value]
    return to_gt(torch.as_tensor(data, dtype=dtype))


def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """A copy of an array on GT. Unlike torch.from_numpy it does not share memory: a worker may be elsewhere."""
    return to_gt(torch.from_numpy(array))


def manual_seed(seed: int) -> torch.Generator:
    """Seed random ops. Their keys are drawn from torch's generator, so torch.manual_seed does the same."""
    return torch.manual_seed(seed)


def to(what: Any) -> Any:
    """Move a tensor, or a module in place with its parameters and buffers; tied weights stay tied."""
    if isinstance(what, torch.Tensor):
        return to_gt(what)
    if isinstance(what, torch.nn.Module):
        return move_module(what)
    if isinstance(what, np.ndarray):
        return from_numpy(what)
    raise TypeError(f"gt.to() moves a tensor, an array or a torch.nn.Module, not {type(what).__name__}")


def move_module(module: Module) -> Module:
    """Each distinct parameter and buffer is moved once; every place that held it holds the moved one."""
    moved: dict[int, Any] = {}
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            for name, value in table.items():
                if value is not None:
                    table[name] = moved[id(value)] = moved.get(id(value)) if id(value) in moved else _moved(value)
    return module


def _moved(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, Tensor):
        return value
    with torch.no_grad():
        new: torch.Tensor = to_gt(value.detach())
    if isinstance(value, torch.nn.Parameter):
        new = torch.nn.Parameter(new, requires_grad=value.requires_grad)
    else:
        new.requires_grad_(value.requires_grad)
    if value.grad is not None:
        new.grad = to_gt(value.grad)
    return new
