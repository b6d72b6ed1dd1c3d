"""The models, optimizers and tensors that a step function uses: in its arguments, its closure, the globals that its
code names, its defaults, and the attributes of the object whose method it is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from gt.client.compilation.compiled_function import CompiledFunction
from gt.client.tensor import Tensor
from gt.core.errors import SessionError

_DEPTH = 4  # of containers, and of attributes of the program's own objects


class StepObjects(NamedTuple):
    """`model` is the one that the step runs."""

    model: torch.nn.Module
    optimizers: tuple[Optimizer, ...]
    tensors: tuple[Tensor, ...]


def find_step_objects(
    step: Callable[..., Any], args: Sequence[Any], model: torch.nn.Module | None = None
) -> StepObjects:
    """The objects of a step. Raises SessionError unless it has one model."""
    found: dict[int, Any] = {}
    for root in (model, step, *args):
        _visit(root, found, _DEPTH)
    modules = [value for value in found.values() if isinstance(value, torch.nn.Module)]
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    roots = [model] if model is not None else [module for module in modules if id(module) not in inner]
    if len(roots) != 1:
        names = ", ".join(type(root).__name__ for root in roots)
        raise SessionError(
            f"gt.auto_shard has to know the model of the step, and {step!r} uses {names or 'none that was found'}; "
            "name it with model=, or put several into one torch.nn.Module"
        )
    optimizers = [value for value in found.values() if isinstance(value, Optimizer)]
    tensors = [value for value in found.values() if isinstance(value, Tensor)]
    return StepObjects(roots[0], tuple(optimizers), tuple(tensors))


def _visit(value: Any, found: dict[int, Any], depth: int) -> None:
    if id(value) in found or depth < 0:
        return
    if isinstance(value, torch.nn.Module | Optimizer | torch.Tensor):
        found[id(value)] = value
        return
    for inside in _inside(value):
        _visit(inside, found, depth - 1)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set):
        return value
    if isinstance(value, CompiledFunction):
        return (value.__wrapped__, value._state)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if inspect.ismethod(value):
        return (value.__self__, value.__func__)
    if inspect.isfunction(value):
        return _used_by(value)
    own = getattr(value, "__dict__", None)
    is_own = type(value).__module__.partition(".")[0] not in ("torch", "gt", "builtins") and not inspect.ismodule(value)
    return list(own.values()) if isinstance(own, dict) and is_own and not inspect.isclass(value) else ()


def _used_by(function: Any) -> Iterator[Any]:
    """What the code of a function names."""
    if hasattr(function, "__wrapped__"):
        yield function.__wrapped__
    yield from function.__defaults__ or ()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    names = set(function.__code__.co_names)
    yield from [value for name, value in function.__globals__.items() if name in names]
