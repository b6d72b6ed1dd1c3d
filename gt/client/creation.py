"""Functions that make tensors on GT. They are torch's own, run where torch's factories create GT tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from gt.client.factories import FactoryMode
from gt.client.models import apply_plan
from gt.client.tensor import Tensor, to_gt
from gt.core.errors import LayoutError
from gt.sharding.placements import Layout, Partial, Placement, Placements, Replicate, Shard
from gt.sharding.spec import DeviceMesh, ShardingSpec

Module = TypeVar("Module", bound=torch.nn.Module)


def device() -> FactoryMode:
    """Inside `with gt.device():` torch's own factory functions create GT tensors, so that a third-party model is built
    on the workers without ever being whole in this process."""
    return FactoryMode(Tensor)


def _on_gt(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """With `mesh=` and `placements=` each worker makes its part of the tensor; without placements, all of it."""

    @functools.wraps(function)
    def create(
        *args: Any, mesh: DeviceMesh | None = None, placements: Placements | None = None, **kwargs: Any
    ) -> Tensor:
        with FactoryMode(Tensor, layout_of(mesh, placements)):
            return function(*args, **kwargs)  # type: ignore[no-any-return]

    return create


def _from_gt(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """For functions of a tensor: a plain one is moved first."""

    @functools.wraps(function)
    def create(
        *args: Any, mesh: DeviceMesh | None = None, placements: Placements | None = None, **kwargs: Any
    ) -> Tensor:
        args, kwargs = tree_map_only(torch.Tensor, to_gt, (args, kwargs))
        return _placed(function(*args, **kwargs), mesh, placements)

    return create


def layout_of(mesh: DeviceMesh | None, placements: Placements | None) -> Layout | None:
    if mesh is None and placements is None:
        return None
    if mesh is None:
        if not isinstance(placements, ShardingSpec):
            raise LayoutError(
                "placements= needs mesh=: say over which workers, as in mesh=gt.mesh((2, 2), ('dp', 'tp'))"
            )
        mesh = placements.mesh
    if placements is None:
        placements = [Replicate()] * len(mesh.shape)
    return Layout(mesh, placements if isinstance(placements, str | ShardingSpec) else _each(placements))


def _each(placements: Any) -> tuple[Placement, ...]:
    return (placements,) if isinstance(placements, Shard | Replicate | Partial) else tuple(placements)


def _placed(x: Tensor, mesh: DeviceMesh | None, placements: Placements | None) -> Tensor:
    """A tensor made of host data, laid out if asked for."""
    layout = layout_of(mesh, placements)
    return x if layout is None else x.redistribute(layout.mesh, layout.placements)


def distribute(x: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> Tensor:
    """A copy of a tensor, laid out over a mesh: a placement for each axis of the mesh, or a spec as text such as
    `"dp, - + tp"`. Gradients pass."""
    return to_gt(x).redistribute(mesh, placements)


def shard(x: torch.Tensor, mesh: DeviceMesh, dim: int = 0) -> Tensor:
    """A copy of a tensor with one dim cut over all of a mesh, in the order of its axes."""
    return distribute(x, mesh, [Shard(dim)] * len(mesh.shape))


def replicate(x: torch.Tensor, mesh: DeviceMesh) -> Tensor:
    """A copy of a tensor that is whole on every worker of a mesh."""
    return distribute(x, mesh, [Replicate()] * len(mesh.shape))


zeros, ones, full, empty = _on_gt(torch.zeros), _on_gt(torch.ones), _on_gt(torch.full), _on_gt(torch.empty)
eye, arange, linspace = _on_gt(torch.eye), _on_gt(torch.arange), _on_gt(torch.linspace)
rand, randn, randint, randperm = _on_gt(torch.rand), _on_gt(torch.randn), _on_gt(torch.randint), _on_gt(torch.randperm)

bernoulli = _from_gt(torch.bernoulli)
zeros_like, ones_like, full_like = _from_gt(torch.zeros_like), _from_gt(torch.ones_like), _from_gt(torch.full_like)
empty_like, rand_like = _from_gt(torch.empty_like), _from_gt(torch.rand_like)
randn_like, randint_like = _from_gt(torch.randn_like), _from_gt(torch.randint_like)


def tensor(
    data: Any,
    *,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> Tensor:
    """A new tensor with a copy of the data, as torch.tensor."""
    if isinstance(data, Tensor):
        copy: Any = data.detach().clone() if dtype is None else data.detach().to(dtype, copy=True)
    elif isinstance(data, torch.Tensor):
        copy = to_gt(data.detach().to(dtype or data.dtype))
    else:
        copy = to_gt(torch.tensor(data, dtype=dtype))
    return _placed(copy, mesh, placements).requires_grad_(requires_grad)  # type: ignore[return-value]


def as_tensor(
    data: Any,
    dtype: torch.dtype | None = None,
    *,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> Tensor:
    """The data on GT: itself where it is a GT tensor of that dtype already."""
    if isinstance(data, Tensor):
        return _placed(data if dtype is None else data.to(dtype), mesh, placements)  # type: ignore[arg-type]
    return _placed(to_gt(torch.as_tensor(data, dtype=dtype)), mesh, placements)


def from_numpy(
    array: np.ndarray[Any, Any], *, mesh: DeviceMesh | None = None, placements: Placements | None = None
) -> Tensor:
    """A copy of an array on GT. Unlike torch.from_numpy it does not share memory: a worker may be elsewhere."""
    return _placed(to_gt(torch.from_numpy(array)), mesh, placements)


def manual_seed(seed: int) -> torch.Generator:
    """Seed random ops. Their keys are drawn from torch's generator, so torch.manual_seed does the same."""
    return torch.manual_seed(seed)


def to(what: Any) -> Any:
    """Move a tensor, or a module in place with its parameters and buffers; tied weights stay tied. A module is laid out
    as the `model` section of the configuration says."""
    if isinstance(what, torch.Tensor):
        return to_gt(what)
    if isinstance(what, torch.nn.Module):
        move_module(what)
        apply_plan(what)
        return what
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
