"""Hooks that keep modules on GT: parameters, buffers and children that are registered later are moved to GT.

A module is on GT if `gt.to` has moved it, or if a parameter, a buffer or a child was registered in it inside
`gt.device()`. So adapters that a library adds to a model, a new head, and the weights that `from_pretrained` loads are
on GT. Torch calls the hooks for every registration in any module. Tensors that a library puts into the tables of a
module itself are moved at the end of `gt.device()`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch.nn.modules import module as torch_modules
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from gt.client.factory_mode import is_factory_mode_on
from gt.client.gather_hooks import ParameterPlace
from gt.client.model_layout import apply_to_part, hook_by_name, is_model, lay_out_by_name, layout_by_name
from gt.client.module_moving import move_module, move_tensor
from gt.client.named_layouts import NamedLayouts
from gt.client.parameter_layouts import lay_beside, layout_beside
from gt.client.tensor import Tensor
from gt.client.torch_patches.nn_modules import child_modules, own_buffers, own_parameters
from gt.sharding.spec import ShardingSpec

# Libraries whose modules hold a model and the parameters that they add to it (prompts).
_WRAPPERS = ("peft",)

_modules_on_gt: WeakSet[torch.nn.Module] = WeakSet()
_built: WeakSet[torch.nn.Module] = WeakSet()  # modules with parts that were registered in a scope of `gt.device()`
_parents: WeakKeyDictionary[torch.nn.Module, ReferenceType[torch.nn.Module]] = WeakKeyDictionary()
_moved: Any = WeakTensorKeyDictionary()  # plain tensor, by identity, to a weak reference of the moved one


def keep_on_gt(module: torch.nn.Module) -> None:
    """Move to GT, from now on, every tensor and module that is registered in a module and its children."""
    watch_modules()
    for part in module.modules():
        _modules_on_gt.add(part)
        _parents.update({child: ref(part) for child in part.children()})


@functools.cache
def watch_modules() -> None:
    torch_modules.register_module_parameter_registration_hook(_on_tensor(own_parameters))
    torch_modules.register_module_buffer_registration_hook(_on_tensor(own_buffers))
    torch_modules.register_module_module_registration_hook(_on_module)


def _on_tensor(table_of: Callable[[torch.nn.Module], dict[str, Any]]) -> Callable[[torch.nn.Module, str, Any], Any]:
    def moved(module: torch.nn.Module, name: str, value: Any) -> Any:
        table = table_of(module)
        replaced = table.get(name)
        if isinstance(value, Tensor):
            if value is not replaced and _is_on_gt(module):
                _lay_out(value, replaced, module, name)
            return None
        if not _is_plain(value) or not _is_on_gt(module):
            return None
        if _is_like(replaced, value):
            return _moved_once(value, layout_beside(replaced, value.shape))
        if _is_in_model(module) or (replaced is not None and replaced.device.type == "meta"):
            return _moved_by_name(value, module, ParameterPlace(table, name))
        return _moved_once(value, None)

    return moved


def _is_in_model(module: torch.nn.Module) -> bool:
    """Whether a plan was applied to the model that a module is in."""
    *_, model = (module, *_modules_above(module))
    return is_model(model)


def _lay_out(value: Tensor, replaced: Any, module: torch.nn.Module, name: str) -> None:
    """Lay out a tensor on GT as the one that it replaces, or a new parameter by its name. Other buffers may be results,
    as caches are."""
    if _is_like(replaced, value):
        _follow_plan(value, replaced)
    elif value._is_param and _is_in_model(module):
        lay_out_by_name(value, _full_name(module, name))


def _is_like(replaced: Any, value: torch.Tensor) -> TypeGuard[Tensor]:
    is_known = isinstance(replaced, Tensor) and not is_lazy(replaced) and not is_lazy(value)
    return is_known and replaced.shape == value.shape


def _follow_plan(value: Tensor, replaced: torch.Tensor) -> None:
    """Lay out a loaded tensor as the one that it replaces in a module that a plan has laid out (`assign=True`), unless
    it lies over the same mesh, as a tied parameter does."""
    layouts = NamedLayouts.current() if _is_like(replaced, value) else None
    mesh = None if layouts is None else layouts.mesh
    if mesh is not None and replaced.spec.mesh is mesh and value.spec.mesh is not mesh:
        lay_beside(replaced, value)


def move_assigned_tensors() -> None:
    """Move to GT the plain tensors of modules that were built in `gt.device()`. Libraries that load weights into the
    tables of a module (accelerate) call no hook."""
    for module in _built:
        for table in (own_parameters(module), own_buffers(module)):
            for name, value in table.items():
                if _is_plain(value):
                    table[name] = _moved_by_name(value, module, ParameterPlace(table, name))
    _built.clear()


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor) or not isinstance(value, torch.Tensor):
        return False
    return value.device.type == "cpu" and not is_lazy(value)


def _moved_by_name(value: torch.Tensor, module: torch.nn.Module, place: ParameterPlace) -> Tensor:
    """A tensor in the layout that the configuration has for its name."""
    full_name = _full_name(module, place.name)
    hook_by_name(full_name, module, place)
    return _moved_once(value, layout_by_name(value, full_name))


def _on_module(module: torch.nn.Module, name: str, part: Any) -> None:
    """Called for each module that is registered in another one: moves it to GT if the other one is there."""
    if not isinstance(part, torch.nn.Module):
        return
    if part in _modules_on_gt and _is_wrapper(module):
        _modules_on_gt.add(module)
        return
    if not _is_on_gt(module):
        return
    if is_factory_mode_on():
        _built.update([module, *part.modules()])
    _parents[part] = ref(module)
    if not any(value.device.type == "meta" for value in [*part.parameters(), *part.buffers()]):
        move_module(part)
    keep_on_gt(part)
    apply_to_part(part, _full_name(module, name), [module, *_modules_above(module)])


def _is_wrapper(module: torch.nn.Module) -> bool:
    return any(kind.__module__.partition(".")[0] in _WRAPPERS for kind in type(module).__mro__)


def _is_on_gt(module: torch.nn.Module) -> bool:
    if module in _modules_on_gt:
        return True
    if is_factory_mode_on():
        _modules_on_gt.add(module)
        return True
    return False


def _moved_once(value: torch.Tensor, layout: ShardingSpec | None) -> Tensor:
    """Move a tensor; one that is registered twice is one tensor on GT too, in the layout of the first time."""
    known = _moved.get(value)
    new = None if known is None else known()
    if new is None:
        new = move_tensor(value, layout=layout)
        _moved[value] = ref(new)
    return new  # type: ignore[return-value]


def _full_name(module: torch.nn.Module, name: str) -> str:
    """The name of a tensor or module in the model, as far as the model is built."""
    return ".".join([*reversed([*_names_above(module)]), name])


def _names_above(module: torch.nn.Module) -> Iterator[str]:
    for parent in _modules_above(module):
        yield next((name for name, part in child_modules(parent).items() if part is module), "")
        module = parent


def _modules_above(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    while module in _parents and (parent := _parents[module]()) is not None:
        yield parent
        module = parent
