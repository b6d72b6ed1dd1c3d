"""The objects that a function uses besides its arguments, which `gt.compile` looks at on every call.

They are found by walking from the function: the variables and globals that its code names, its defaults and its
instance, and of functions and objects among these one level more. Modules, optimizers, tensors and containers are
opened wherever the walk meets them. Any other object is compared by identity, and numbers and texts by value.
"""

from __future__ import annotations

import dis
import functools
import re
import types
from collections import deque
from collections.abc import Container, Iterable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from gt.client.compilation.static_reads import attributes_of, bases_of, entries_of, is_instance, module_of
from gt.client.compilation.watched_values import SIMPLE_VALUES, Change, Place, WatchedValues, item_name
from gt.client.tensor import Tensor
from gt.client.torch_patches.dispatch import tree_leaves
from gt.client.torch_patches.nn_modules import GLOBAL_MODULE_HOOKS, GLOBAL_STEP_HOOKS

_LEVELS = 2  # functions and objects that are opened: the function itself, and those that it names
_MAX_ITEMS = 1 << 12  # of a container that is opened
_MAX_WATCHED = 1 << 17
_SIMPLE_TYPES = frozenset(SIMPLE_VALUES)
_CONTAINERS = (dict, list, set, deque)
_TABLES = ("_parameters", "_buffers", "_modules")
# Attributes of modules that do not change a call, or change only together with another one.
_IGNORED = {
    "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
}  # fmt: skip
_IMPLICIT = ("forward", "__call__", "__getattr__", "__getitem__")  # methods that code uses without their names
_WORD = re.compile(r"\w+")
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class WatchedState:
    """The objects that can be reached from `roots`, and their values at the time of the walk. `tensors` are the GT
    tensors, `plain` the tensors of this process, `optimizers` the optimizers, each once. `touched` are objects that an
    earlier call has used and that cannot be reached, `own_ids` the id()s of those that can. Values at `ignored` places
    are not looked at."""

    def __init__(
        self, roots: Sequence[tuple[str, object]], touched: Iterable[object] = (), ignored: Set[Place] = frozenset()
    ) -> None:
        self.roots = roots
        self.tensors: list[Tensor] = []
        self.plain: list[torch.Tensor] = []
        self.optimizers: list[Optimizer] = []
        self.ignored = ignored
        self._values = WatchedValues(ignored)
        self._seen: dict[int, object] = {}  # kept, so that no other object gets the same id()
        self._pending: deque[tuple[str, object, int]] = deque()
        self._walk(roots)
        self.own_ids = frozenset(self._seen)
        self._walk([(f"a {type(each).__name__}", each) for each in touched])
        self._values.remember()

    @property
    def known_ids(self) -> Container[int]:
        """The id()s of the objects that were found."""
        return self._seen

    def changes(self) -> list[Change]:
        """The values that have changed since the walk."""
        return self._values.changes()

    def changed_state(self) -> str:
        """The state that has changed since the walk, for a message."""
        names = [each.name for each in self.changes() if self.may_be_read(each)]
        return f"{names[0] if names else 'a tensor or a gradient that it uses'} changes from call to call"

    def may_be_read(self, change: Change) -> bool:
        """Whether the code that was found names a value."""
        return not self._words.isdisjoint(_WORD.findall(change.name.rpartition(".")[2]))

    @functools.cached_property
    def _words(self) -> set[str]:
        """The names in the code of the function, and in those methods of the objects that were found which it names."""
        words, methods = set(_IMPLICIT), self._methods()
        pending = [each.__code__ for each in self._seen.values() if is_instance(each, types.FunctionType)]  # type: ignore[attr-defined]
        while pending:
            for code in pending:
                words |= names_in(code).words
            pending = [methods.pop(each) for each in list(methods) if each[1] in words]
        return words

    def _methods(self) -> dict[tuple[type, str], types.CodeType]:
        """The code of the methods and properties of the objects that were found."""
        kinds = {base for each in self._seen.values() for base in bases_of(type(each))} - set(bases_of(torch.nn.Module))
        entries = [(kind, name, entry) for kind in kinds for name, entry in entries_of(kind).items()]
        found = [(kind, name, _function_of(entry)) for kind, name, entry in entries]
        return {(kind, name): each.__code__ for kind, name, each in found if is_instance(each, types.FunctionType)}

    # The walk

    def _walk(self, roots: Iterable[tuple[str, object]]) -> None:
        for name, root in roots:
            self._reach(name, root, 0)
        while self._pending:
            name, value, level = self._pending.popleft()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                visit = next((visit for kinds, visit in _VISITS if is_instance(value, kinds)), _visit_object)
                visit(self, name, value, level)

    def _reach(self, name: str, value: object, level: int) -> None:
        """Have an object visited. `level` is the number of functions and objects on the way to it."""
        if type(value) not in _SIMPLE_TYPES:
            self._pending.append((name, value, level))

    def _watch_table(self, name: str, table: dict[str, Any], level: int) -> None:
        """Watch a dict of attributes, and reach their values."""
        for key, value in self._values.add_table(name, table).items():
            self._reach(f"{name}{key}", value, level)

    def _watch_container(self, name: str, value: Any, level: int) -> None:
        if len(value) > _MAX_ITEMS or len(self._values) > _MAX_WATCHED or not self._values.add_container(name, value):
            return
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            self._reach(item_name(name, key), item, level)

    def _watch_entry(self, name: str, owner: Any, key: str, level: int) -> None:
        if self._values.add_entry(name, owner, key):
            self._reach(name, owner[key], level)

    def _watch_attribute(self, name: str, value: object, attribute: str, level: int) -> None:
        if self._values.add_attribute(name, value, attribute):
            self._reach(name, getattr(value, attribute, None), level)


def _visit_tensor(state: WatchedState, name: str, tensor: torch.Tensor, level: int) -> None:
    (state.tensors if is_instance(tensor, Tensor) else state.plain).append(tensor)  # type: ignore[arg-type]
    state._values.add_table(f"{name}.", attributes_of(tensor) or {})
    if tensor.requires_grad:
        for hooks in _HOOKS_OF_TENSORS:
            if getattr(tensor, hooks) is None:
                state._values.add_no_hooks(f"the hooks of {name}", tensor, hooks)
            else:
                state._watch_attribute(f"the hooks of {name}", tensor, hooks, level)


def _visit_module(state: WatchedState, name: str, module: torch.nn.Module, level: int) -> None:
    for hooks in GLOBAL_MODULE_HOOKS:
        state._reach("the hooks of all modules", hooks, _LEVELS)
    attributes = attributes_of(module) or {}
    for key, value in state._values.add_table(f"{name}.", attributes).items():
        if key in _TABLES and isinstance(value, dict):
            state._watch_table(f"{name}.", value, _LEVELS)
        elif key not in _IGNORED:
            state._reach(f"{name}.{key}", value, _LEVELS)
    if level == 0:
        state._reach(f"{name}.forward", getattr(type(module), "forward", None), level)


def _visit_optimizer(state: WatchedState, name: str, optimizer: Optimizer, level: int) -> None:
    """Watch the attributes, the parameters and the state of an optimizer, but neither its counts nor its settings,
    which may change (`optimizer_scalars.py`)."""
    state.optimizers.append(optimizer)
    for hooks in GLOBAL_STEP_HOOKS:
        state._reach("the hooks of all optimizers", hooks, _LEVELS)
    for part in (optimizer.param_groups, optimizer.state):
        state._seen[id(part)] = part
    state._watch_table(f"{name}.", attributes_of(optimizer) or {}, _LEVELS)
    state._values.add_container(f"{name}.param_groups", optimizer.param_groups)
    for number, group in enumerate(optimizer.param_groups):
        state._reach(f"{name}.param_groups", group["params"], _LEVELS)
        for key, value in group.items():
            if key != "params" and any(is_instance(each, Tensor) for each in tree_leaves(value)):
                state._watch_entry(f"{name}.param_groups[{number}][{key!r}]", group, key, _LEVELS)
    state._values.add_container(f"{name}.state", optimizer.state)
    for entries in optimizer.state.values():
        if not isinstance(entries, dict):
            state._reach(f"{name}.state", entries, _LEVELS)
        elif not any(isinstance(value, SIMPLE_VALUES) for value in entries.values()):
            state._watch_table(f"{name}.state.", entries, _LEVELS)
        else:
            for key in [key for key, value in entries.items() if not isinstance(value, SIMPLE_VALUES)]:
                state._watch_entry(f"{name}.state[...][{key!r}]", entries, key, _LEVELS)


def _visit_container(state: WatchedState, name: str, value: Any, level: int) -> None:
    state._watch_container(name, value, level)


def _visit_tuple(state: WatchedState, name: str, value: Any, level: int) -> None:
    for item in value if len(value) <= _MAX_ITEMS else ():
        state._reach(name, item, level)


def _visit_referring(state: WatchedState, name: str, value: Any, level: int) -> None:
    """Reach the objects behind a method or a partial function. An instance counts as a variable of the method."""
    if isinstance(value, types.MethodType):
        state._reach(name, value.__func__, level)
        state._reach(name, value.__self__, max(level, 1))
        return
    for each in (value.func, value.args, value.keywords):
        state._reach(name, each, level)


def _visit_function(state: WatchedState, name: str, function: types.FunctionType, level: int) -> None:
    """Watch the variables that a function names."""
    if level >= _LEVELS:
        return
    state._reach(name, vars(function).get("__wrapped__"), level)
    for attribute in ("__code__", "__defaults__", "__kwdefaults__"):
        state._watch_attribute(f"{name}.{attribute}", function, attribute, level + 1)
    state._watch_table(f"{name}.", vars(function), level + 1)
    names = names_in(function.__code__)
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if not _is_empty(cell):
            state._watch_attribute(variable, cell, "cell_contents", level + 1)
            _watch_named(state, variable, cell.cell_contents, names.words)
    for variable in names.globals & function.__globals__.keys():
        state._watch_entry(variable, function.__globals__, variable, level + 1)
        _watch_named(state, variable, function.__globals__[variable], names.words)


def _watch_named(state: WatchedState, name: str, value: Any, names: Set[str]) -> None:
    """Watch those of the variables of a Python module or a class that the code names."""
    if not is_instance(value, types.ModuleType | type):
        return
    entries = entries_of(value) if is_instance(value, type) else attributes_of(value) or {}
    for key in names & entries.keys():
        state._watch_entry(f"{name}.{key}", entries, key, _LEVELS)
        if is_instance(entries[key], types.ModuleType) and id(entries[key]) not in state._seen:
            state._seen[id(entries[key])] = entries[key]
            _watch_named(state, f"{name}.{key}", entries[key], names)


def _visit_object(state: WatchedState, name: str, value: Any, level: int) -> None:
    """Watch the attributes of another object."""
    attributes = attributes_of(value)
    if level >= _LEVELS or attributes is None or is_instance(value, types.ModuleType | type):
        return
    if module_of(type(value)).split(".")[0] == "gt":
        state._reach(name, attributes.get("__wrapped__"), level)  # another function of gt.compile
        return
    state._watch_table(f"{name}.", attributes, max(level, 1) + 1)
    if level == 0:  # the function itself may be an object
        state._reach(f"{name}.__call__", entries_of(type(value)).get("__call__"), level)


def _function_of(entry: Any) -> Any:
    """The function behind an entry of a class."""
    if is_instance(entry, staticmethod | classmethod):
        return entry.__func__
    return entry.fget if is_instance(entry, property) else entry


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:  # the variable has no value yet
        return True


class NamesInCode(NamedTuple):
    """The globals that a code object and those inside it name, and all names in it: those of attributes and of
    variables too."""

    globals: frozenset[str]
    words: frozenset[str]


@functools.cache
def names_in(code: types.CodeType) -> NamesInCode:
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    found = [each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return NamesInCode(
        frozenset(found).union(*[each.globals for each in inner]),
        frozenset((*code.co_names, *code.co_freevars)).union(*[each.words for each in inner]),
    )


_VISITS: tuple[tuple[Any, Any], ...] = (
    (torch.Tensor, _visit_tensor),
    (torch.nn.Module, _visit_module),
    (Optimizer, _visit_optimizer),
    (_CONTAINERS, _visit_container),
    ((tuple, frozenset), _visit_tuple),
    ((types.MethodType, functools.partial), _visit_referring),
    (types.FunctionType, _visit_function),
)
