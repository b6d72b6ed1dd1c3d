"""Applies the `model` section of a configuration to a module: lays out its parameters and runs its parts in scopes, by
their names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from gt.client import active_session, scope_stack
from gt.client.cached_calls import rebind
from gt.client.gather_hooks import GatherHook, ParameterPlace
from gt.client.named_layouts import NamedLayouts
from gt.client.parameter_layouts import follow_parameters
from gt.client.storage import Storage, StorageView, TensorRef
from gt.client.tensor import Tensor, to_gt
from gt.client.torch_patches.dispatch import tree_leaves, tree_map
from gt.client.torch_patches.nn_modules import has_forward_hooks, own_buffers, own_parameters, remove_forward_hooks
from gt.core.errors import SignalError, nearest
from gt.sharding.spec import DeviceMesh, ShardingSpec
from gt.sharding.view_layouts import base_layout
from gt.signals.config import AxesPerDim, ModelConfig, ModuleEntry, OutputEntry, ParameterEntry, at
from gt.signals.registry import registry
from gt.signals.resolution import resolve_activation

# A layout is no value: the tensor keeps its id, and autograd does not see the hook. The gradient of a result gets
# the same layout when autograd has computed it.


class ActivationLayout:
    """A layout of tensors over a mesh."""

    def __init__(self, dims: AxesPerDim, mesh: DeviceMesh) -> None:
        self._dims = dims
        self._mesh = mesh

    def spec_for(self, shape: torch.Size) -> ShardingSpec | None:
        return resolve_activation(self._dims, self._mesh, shape)

    def place(self, tensor: torch.Tensor) -> None:
        """Give a tensor the layout, if it can have it."""
        spec = self.spec_for(tensor.shape) if isinstance(tensor, Tensor) else None
        if spec is not None:
            place(tensor._ref, spec)  # type: ignore[attr-defined]


def place(ref: TensorRef, spec: ShardingSpec) -> None:
    """Give a tensor a layout, for good; a view by way of its base. Views that no layout of the base fits stay."""
    storage = ref.storage
    if ref.path is None:
        storage.session.place(storage, spec)
        return
    layout = base_layout(ref.path.steps, storage.geometry.meta(), spec)
    if layout is not None:
        storage.session.place(storage, layout)


class OutputHook:
    """The hook of a module whose results have a layout."""

    def __init__(self, layout: ActivationLayout) -> None:
        self._layout = layout

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and not tensor._ref.storage.is_parameter:
                self._layout.place(tensor)
                if tensor.grad_fn is not None:  # hooks of leaves, which a module may give back, would stay on them
                    tensor.register_hook(self._layout.place)


class InputHook:
    """The hook of a model whose inputs have a layout. Plain tensors are uploaded in it."""

    def __init__(self, layout: ActivationLayout) -> None:
        self._layout = layout

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(self._placed, (args, kwargs))

    def _placed(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or active_session.active is None:
            return value
        spec = self._layout.spec_for(value.shape)
        if spec is None:
            return value
        if isinstance(value, Tensor):
            place(value._ref, spec)
            return value
        return to_gt(value, spec)


log = logging.getLogger("gt.signals")
_gather_hooks: WeakKeyDictionary[torch.nn.Module, GatherHook] = WeakKeyDictionary()
_models: WeakSet[torch.nn.Module] = WeakSet()  # models to which the configuration was applied
_laid_out: Any = WeakTensorKeyDictionary()  # parameters and buffers of these, by identity


def apply_model_config(module: torch.nn.Module, placed: Iterable[torch.Tensor] = ()) -> None:
    """Lay out a module whose tensors are on GT, and hook its parts, if the configuration has a `model` section. Tensors
    that are `placed` have their layouts already."""
    config = registry.current().model
    unhook(module)
    if config is None:
        return
    _warn_of_unmatched(module, config)
    layouts = NamedLayouts.current()
    if layouts is not None:
        _lay_out(module, layouts, {id(tensor) for tensor in placed})
        _models.add(module)
    apply_hooks(module)


def apply_to_part(part: torch.nn.Module, name: str, around: Sequence[torch.nn.Module]) -> None:
    """Lay out and hook a module that was registered in a model later, such as an adapter or a new head. `name` is its
    name in the model, `around` are the modules around it, the model last."""
    layouts = NamedLayouts.current()
    if layouts is None or not is_model(around[-1]):
        return
    _lay_out(
        part, layouts, {id(tensor) for tensor in (*part.parameters(), *part.buffers()) if tensor in _laid_out}, name
    )
    new = {path: inside for path, inside in part.named_modules(prefix=name) if not has_forward_hooks(inside, _HOOKS)}
    _hook_parts(new, layouts.config, layouts)
    added = [_gather_hooks[inside] for inside in new.values() if inside in _gather_hooks]
    for outer in around if added else ():
        _gather_hook_of(outer).inner |= frozenset(added)


def check_layouts(module: torch.nn.Module, config: ModelConfig, mesh: DeviceMesh) -> None:
    """Raise SignalError if a section contradicts itself, or the shapes of a module whose tensors are on GT. Warn of
    patterns that match nothing."""
    for entry, kind, names in _unmatched(module, config):
        _warn_of(entry, kind, names)
    layouts = NamedLayouts(config, mesh)
    for names, tensors in _tensors(module):
        layouts.spec(names, tensors[0])


def apply_hooks(module: torch.nn.Module) -> None:
    """Hook the parts of a module that the configuration names; its parameters stay as they are."""
    config = registry.current().model
    if config is None:
        return
    layouts = NamedLayouts.current()
    if layouts is not None and layouts.mesh is not None and config.inputs is not None:
        hook = InputHook(ActivationLayout(config.inputs, layouts.mesh))
        module.register_forward_pre_hook(hook, with_kwargs=True)
    _hook_parts(dict(module.named_modules()), config, layouts)


def _hook_parts(parts: Mapping[str, torch.nn.Module], config: ModelConfig, layouts: NamedLayouts | None) -> None:
    """Hook modules, given by their names. Hooks of gathers come before those that leave scopes, since scopes say
    whether copies are dropped."""
    if layouts is not None:
        _hook_places({part: list(_cut_places(layouts, name, part)) for name, part in parts.items()})
        _hook_outputs(parts, layouts)
    _hook_scopes(parts, config)


# Parameters


def layouts_of_plain(module: torch.nn.Module) -> dict[int, ShardingSpec]:
    """The layouts of the plain tensors of a module, by id(), if the configuration has a `model` section."""
    layouts = NamedLayouts.current()
    if layouts is None:
        return {}
    names: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in _named_tensors(module):
        if not isinstance(tensor, Tensor) and not is_lazy(tensor):
            names.setdefault(id(tensor), (tensor, []))[1].append(name)
    specs = {ident: layouts.spec(known, tensor) for ident, (tensor, known) in names.items()}
    return {ident: spec for ident, spec in specs.items() if spec is not None}


def _lay_out(module: torch.nn.Module, layouts: NamedLayouts, placed: set[int], prefix: str = "") -> None:
    """Give the tensors of a module, whose name in the model is `prefix`, their layouts; not those that are `placed`."""
    laid_out: dict[int, tuple[Storage, Storage]] = {}
    for names, tensors in sorted(_tensors(module, prefix), key=lambda named: named[1][0]._ref.path is not None):
        ref = tensors[0]._ref
        _laid_out.update(dict.fromkeys(tensors))
        spec = layouts.spec(names, tensors[0])
        if spec is None or any(id(tensor) in placed for tensor in tensors):
            continue
        if id(ref.storage) in laid_out:  # a view of another parameter
            new = laid_out[id(ref.storage)][1]
            moved: TensorRef = StorageView(new, ref.path, ref.geometry)  # type: ignore[arg-type]
        else:
            with torch.no_grad():
                moved = tensors[0].detach().redistribute(placements=spec)._ref
            if ref is ref.storage:
                laid_out[id(ref)] = ref.storage, moved.storage
        for tensor in tensors:
            rebind(tensor, moved)
        follow_parameters(tensors)


def is_model(module: torch.nn.Module) -> bool:
    """Whether the configuration was applied to a module, so that what is registered in it later is laid out too."""
    return module in _models


def laid_out_models() -> list[torch.nn.Module]:
    return list(_models)


def undecided_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers with dims about which no pattern of the section decides, by name, if it has patterns:
    they are whole on each worker of its mesh."""
    layouts = NamedLayouts.current()
    if layouts is None or layouts.mesh is None or layouts.mesh.size == 1 or not layouts.config.parameters:
        return {}
    decides = layouts.config.spec_for
    found = [(names[0], tensors[0]) for names, tensors in _tensors(model) if not any(map(decides, names))]
    return {name: tensor for name, tensor in found if tensor.dim() and tensor._ref.session is active_session.active}


def lay_out_by_name(tensor: Tensor, name: str) -> None:
    """Lay out a tensor on GT that was registered in a model, by its name there, unless a model has it already."""
    spec = None if is_lazy(tensor) or tensor in _laid_out else layout_by_name(tensor, name)
    if spec is not None and tensor._ref is tensor._ref.storage:
        tensor._ref.session.place(tensor._ref.storage, spec)
        _laid_out[tensor] = None


def layout_by_name(tensor: torch.Tensor, name: str) -> ShardingSpec | None:
    """The layout of one parameter or buffer, by its name in the whole model; None if the configuration has none."""
    layouts = NamedLayouts.current()
    return None if layouts is None else layouts.spec([name], tensor)


def hook_by_name(name: str, owner: torch.nn.Module, place: ParameterPlace) -> None:
    """Hook the module that owns a parameter, given by its name in the whole model, if the configuration cuts it."""
    layouts = NamedLayouts.current()
    if layouts is not None and layouts.is_cut(name):
        places = _gather_hook_of(owner).places
        if not any(each.table is place.table and each.name == place.name for each in places):
            places.append(place)


def _tensors(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[list[str], list[Tensor]]]:
    """The names and handles of each distinct parameter and buffer, several if they share data. Those of lazy modules
    that have no shape yet are left out."""
    named: dict[int, tuple[list[str], dict[int, Tensor]]] = {}
    for name, tensor in _named_tensors(module, prefix):
        if not is_lazy(tensor):
            names, tensors = named.setdefault(id(tensor._ref), ([], {}))
            names.append(name)
            tensors[id(tensor)] = tensor
    for names, tensors in named.values():
        yield names, list(tensors.values())


def _named_tensors(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    yield from module.named_parameters(prefix, remove_duplicate=False)
    yield from module.named_buffers(prefix, remove_duplicate=False)


# Modules


class _ScopeHook:
    """A hook that enters a scope before a module runs, unless an enclosing module has entered it. `leave` is called
    even if the module raises."""

    def __init__(self, signal: str) -> None:
        self.signal = signal

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        frame = scope_stack.top()
        if frame is not None and isinstance(frame.owner, _ScopeHook) and frame.owner.signal == self.signal:
            return
        active_session.enter_scope(self.signal, owner=self)

    def leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        scope_stack.leave(self)


_HOOKS = (_ScopeHook, GatherHook, InputHook, OutputHook)


def _hook_scopes(parts: Mapping[str, torch.nn.Module], config: ModelConfig) -> None:
    """Make the parts that the section names run in their scopes."""
    for name, part in parts.items():
        entry = config.scope_for(name)
        if entry is None:
            continue
        if registry.get(entry.signal) is None:
            known = registry.current().signals
            raise SignalError(
                f"{at(entry.source)}{entry.signal!r} is not a configured signal; {nearest(entry.signal, known)}"
            )
        scope = _ScopeHook(entry.signal)
        part.register_forward_pre_hook(scope, prepend=True)
        part.register_forward_hook(scope.leave, always_call=True)


def _hook_outputs(parts: Mapping[str, torch.nn.Module], layouts: NamedLayouts) -> None:
    """Hook the parts whose results the section lays out."""
    for name, part in parts.items():
        entry = layouts.config.output_for(name)
        if entry is not None and layouts.mesh is not None:
            layout = ActivationLayout(entry.dims, layouts.mesh)
            part.register_forward_hook(OutputHook(layout))


def hook_all_gathers(module: torch.nn.Module) -> None:
    """Hook all parts, as if all their parameters were cut."""
    tables = {part: (own_parameters(part), own_buffers(part)) for part in module.modules()}
    _hook_places({part: [ParameterPlace(t, key) for t in own for key in t] for part, own in tables.items()})


def _hook_places(places: dict[torch.nn.Module, list[ParameterPlace]]) -> None:
    """Hook the parts whose parameters are at these places, and the modules around them."""
    hooks = {part: GatherHook(own) for part, own in places.items()}
    for part, hook in hooks.items():
        found = [hooks.get(inside) or _gather_hooks.get(inside) for inside in part.modules() if inside is not part]
        hook.inner = frozenset(inside for inside in found if inside is not None)
        if hook.places or any(inside.places for inside in hook.inner):
            _add_gather_hook(part, hook)


def _add_gather_hook(part: torch.nn.Module, hook: GatherHook) -> None:
    active_session.follow_scopes()  # the scope of each op notes which tensors are computed of parameters
    _gather_hooks[part] = hook
    part.register_forward_pre_hook(hook.begin_forward)
    part.register_forward_hook(hook, always_call=True)


def _gather_hook_of(part: torch.nn.Module) -> GatherHook:
    if part not in _gather_hooks:
        _add_gather_hook(part, GatherHook([]))
    return _gather_hooks[part]


def _cut_places(layouts: NamedLayouts, name: str, part: torch.nn.Module) -> Iterator[ParameterPlace]:
    """The parameters and buffers of a part itself that the configuration cuts."""
    for table in (own_parameters(part), own_buffers(part)):
        for key in table:
            if layouts.is_cut(f"{name}.{key}" if name else key):
                yield ParameterPlace(table, key)


def unhook(module: torch.nn.Module) -> None:
    for part in module.modules():
        _gather_hooks.pop(part, None)
        remove_forward_hooks(part, _HOOKS)


def _warn_of_unmatched(module: torch.nn.Module, config: ModelConfig) -> None:
    """Warn of patterns that match nothing, unless all of them do: then the section is for another model."""
    unmatched = list(_unmatched(module, config))
    if len(unmatched) < len(config.parameters) + len(config.modules) + len(config.outputs):
        for entry, kind, names in unmatched:
            _warn_of(entry, kind, names)


def _warn_of(entry: ParameterEntry | ModuleEntry | OutputEntry, kind: str, names: Sequence[str]) -> None:
    log.warning("%s%r decides about no %s; %s", at(entry.source), entry.pattern, kind, nearest(entry.pattern, names))


def _unmatched(
    module: torch.nn.Module, config: ModelConfig
) -> Iterator[tuple[ParameterEntry | ModuleEntry | OutputEntry, str, list[str]]]:
    """The entries whose patterns match nothing, most likely by mistake: with the kind of what they would decide about,
    and the names of these."""
    tensors = [name for names, _ in _tensors(module) for name in names]
    parts = [name for name, _ in module.named_modules()]
    used_specs = {entry.pattern for entry in map(config.spec_for, tensors) if entry is not None}
    used_scopes = {entry.pattern for entry in map(config.scope_for, parts) if entry is not None}
    used_outputs = {entry.pattern for entry in map(config.output_for, parts) if entry is not None}
    yield from [(entry, "parameter", tensors) for entry in config.parameters if entry.pattern not in used_specs]
    yield from [(entry, "module", parts) for entry in config.modules if entry.pattern not in used_scopes]
    yield from [(entry, "module", parts) for entry in config.outputs if entry.pattern not in used_outputs]
