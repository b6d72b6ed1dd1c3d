"""The objects that a function uses without getting them as arguments: variables of its closure, globals, attributes.

`gt.compile` skips a function only while these are what they were when it was recorded. They are found by walking from
the function through closures, globals that its code names, modules, optimizers, containers and other objects. Each is
of one of three kinds: a value that never changes; an object whose state GT compares; or an object whose state GT does
not know, and then the function is not skipped (`unknown`).
"""

from __future__ import annotations

import array
import builtins
import contextvars
import functools
import operator
import os
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from gt.client.compilation.known_types import (
    SIMPLE_VALUES,
    describe_type,
    is_constant,
    is_library,
    is_opaque,
    is_python_class,
)
from gt.client.compilation.names_in_code import NOT_CALLED, absolute_name, is_implicit, names_in
from gt.client.compilation.random_generators import GENERATORS, state_of
from gt.client.compilation.referred_objects import referred_objects
from gt.client.compilation.watched_values import MISSING, Reading, WatchedValues, content_of, is_empty, item_name
from gt.client.tensor import Tensor
from gt.client.torch_patches.global_hooks import GLOBAL_MODULE_HOOKS, GLOBAL_STEP_HOOKS

_MAX_WATCHED = 1 << 17
_MAX_BYTES = 1 << 18  # of an array that is compared
_TABLES = ("_parameters", "_buffers", "_modules")
# Attributes of modules that do not change a call, or change only together with another one.
_IGNORED = {
    "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
}  # fmt: skip
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_READS_OF_SCHEDULES = ("get_last_lr", "get_lr", "_last_lr", "last_epoch")
_READS_OF_ENVIRONMENT = ("environ", "environb", "getenv", "getenvb", "expandvars")
# Builtins that reach variables which the code does not name.
_UNBOUNDED = ("globals", "eval", "exec", "__import__")
# Entries of a class that are not read by name.
_NOT_READ = {"__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "__slots__", "__hash__"}
_BUFFERS = (np.ndarray, bytearray, array.array, memoryview)


class WatchedState:
    """The objects that can be reached from `roots`, and their values at the time of the walk. `tensors` are the GT
    tensors, `plain` the tensors of this process, `optimizers` the optimizers, `generators` torch's random generators
    with their states, each once. `unknown` tells why a function with these roots is never skipped, or is empty."""

    def __init__(self, roots: Sequence[tuple[str, object]]) -> None:
        self.roots = roots
        self.tensors: list[Tensor] = []
        self.plain: list[torch.Tensor] = []
        self.optimizers: list[Optimizer] = []
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self.unknown = ""
        self._values = WatchedValues()
        self._seen: dict[int, object] = {}  # kept, so that no other object gets the same id()
        self._named: list[tuple[str, Mapping[str, Any], set[str], bool]] = []  # mappings, and names not visited yet
        self._classes: set[type] = set()
        self._slots: list[tuple[str, object, list[str]]] = []
        self._settings: list[tuple[str, dict[str, Any], set[str]]] = []  # groups of parameters of optimizers
        self._words_of_steps: set[str] = set()
        self._schedules: list[tuple[str, dict[str, Any]]] = []
        self._inside: list[tuple[str, Callable[[], Any], Any]] = []  # may change between calls, but not in a call
        self._pending: deque[tuple[str, object, bool]] = deque((name, root, False) for name, root in roots)
        self._walk()
        self._values.remember()

    @property
    def known_ids(self) -> Container[int]:
        """The id()s of the objects that were found."""
        return self._seen

    # Comparing

    def change_inside(self) -> str | None:
        """The name of a value that the function has changed, counters of schedules and random generators included;
        None if it has not."""
        moved = (name for name, read, value in self._inside if read() != value)
        return self.first_change() or next(moved, None)

    def first_change(self) -> str | None:
        """The name of a value that has changed since the walk; None if none has."""
        return self._values.first_change()

    # Walking

    def _walk(self) -> None:
        while self._pending and not self.unknown:
            while self._pending and not self.unknown:
                name, value, is_trusted = self._pending.popleft()
                if id(value) not in self._seen and not is_constant(value):
                    self._seen[id(value)] = value
                    self._visit(name, value, is_trusted)
            self._visit_named()
            if len(self._values) > _MAX_WATCHED:
                self.unknown = f"it uses more than {_MAX_WATCHED} values besides its arguments"
        for name, attributes in self._schedules:
            self._watch_schedule(name, attributes)

    def _visit(self, name: str, value: Any, is_trusted: bool) -> None:
        visit = next((visit for kinds, visit in _VISITS if isinstance(value, kinds)), None)
        if visit is not None:
            visit(self, name, value)
        elif (referred := referred_objects(value)) is not None:
            for each in referred:
                self._reach(name, each)
        elif type(value).__module__.split(".")[0] == "gt":
            self._reach(name, getattr(value, "__dict__", {}).get("__wrapped__"))  # another function of gt.compile
        elif is_opaque(value):
            pass
        elif is_python_class(type(value)):  # type: ignore[arg-type]
            self._visit_instance(name, value)
        elif not is_trusted:
            self.unknown = (
                f"it uses {name}, {describe_type(value)}, and GT cannot tell whether its state changes; use it outside "
                "of the function"
            )

    def _visit_references(self, name: str, value: Any) -> None:
        """Watch the object that a weak reference or a context variable refers to now."""
        read = functools.partial(value.get, MISSING) if isinstance(value, contextvars.ContextVar) else value
        self._values.add_attribute(name, Reading(read), "value")
        self._reach(name, read())

    def _visit_getter(self, name: str, getter: Any) -> None:
        given = getter.__reduce__()[1]
        self._values.words.update(word for path in given if isinstance(path, str) for word in path.split("."))
        self._values.all_words |= isinstance(getter, operator.methodcaller)
        self._reach(name, given)

    def _visit_python_module(self, name: str, module: types.ModuleType) -> None:
        if not is_library(module.__name__):
            self._watch_named(name, vars(module))

    def _visit_tensor(self, name: str, tensor: torch.Tensor) -> None:
        (self.tensors if isinstance(tensor, Tensor) else self.plain).append(tensor)  # type: ignore[arg-type]
        self._watch_items(f"{name}.", vars(tensor))
        if tensor.requires_grad:
            for hooks in _HOOKS_OF_TENSORS:
                if getattr(tensor, hooks) is None:
                    self._values.add_no_hooks(f"the hooks of {name}", tensor, hooks)
                else:
                    self._watch_attribute(f"the hooks of {name}", tensor, hooks)

    def _visit_module(self, name: str, module: torch.nn.Module) -> None:
        if not self._seen.get(id(GLOBAL_MODULE_HOOKS)):
            self._seen[id(GLOBAL_MODULE_HOOKS)] = GLOBAL_MODULE_HOOKS
            for hooks in GLOBAL_MODULE_HOOKS:
                self._reach("the hooks of all modules", hooks)
        attributes = vars(module)
        self._values.add_object(name, module)
        self._visit_class(name, type(module))
        self._seen[id(attributes)] = attributes
        self._values.add_attributes(f"{name}.", attributes)
        for key, value in attributes.items():
            if key in _TABLES and isinstance(value, dict):
                self._watch_items(f"{name}.", value, is_table=True)
            elif key not in _IGNORED:
                self._reach(f"{name}.{key}", value)

    def _visit_optimizer(self, name: str, optimizer: Optimizer) -> None:
        """Watch the attributes, the parameters and the state of an optimizer, but not its counts, which may change, nor
        its settings, unless the function reads them (`optimizer_scalars.py`)."""
        self.optimizers.append(optimizer)
        for hooks in GLOBAL_STEP_HOOKS:
            self._reach("the hooks of all optimizers", hooks)
        self._visit_class(name, type(optimizer))
        for part in (optimizer.param_groups, optimizer.state):
            self._seen[id(part)] = part
        self._watch_items(f"{name}.", vars(optimizer))
        self._values.add_container(f"{name}.param_groups", optimizer.param_groups)
        for number, group in enumerate(optimizer.param_groups):
            self._reach(f"{name}.param_groups", group["params"])
            self._settings.append((f"{name}.param_groups[{number}]", group, {*group, "params"} - {"params"}))
        self._values.add_container(f"{name}.state", optimizer.state)
        for entries in optimizer.state.values():
            if not isinstance(entries, dict):
                self._reach(f"{name}.state", entries)
            elif not any(isinstance(value, SIMPLE_VALUES) for value in entries.values()):
                self._watch_items(f"{name}.state.", entries, is_table=True)
            else:
                self._values.add_content(f"{name}.state", functools.partial(tuple, entries))
                for key in [key for key, value in entries.items() if not isinstance(value, SIMPLE_VALUES)]:
                    self._watch_entry(f"{name}.state[...][{key!r}]", entries, key)

    def _visit_schedule(self, name: str, schedule: LRScheduler) -> None:
        self._schedules.append((name, vars(schedule)))
        self._visit_class(name, type(schedule))

    def _watch_schedule(self, name: str, attributes: dict[str, Any]) -> None:
        """Watch the counters of a learning-rate schedule if the function reads them. Otherwise they may change between
        calls: the rates reach the function through the optimizer."""
        is_read = not self._values.words.isdisjoint(_READS_OF_SCHEDULES)
        for key in [key for key, value in attributes.items() if isinstance(value, SIMPLE_VALUES)]:
            if is_read or key in self._values.words:
                self._values.add_entry(f"{name}.{key}", attributes, key)
            else:
                self._watch_inside(f"{name}.{key}", functools.partial(attributes.get, key))

    def _visit_container(self, name: str, value: Any) -> None:
        if isinstance(value, tuple | frozenset):
            for item in value:
                self._reach(name, item)
        else:
            self._watch_items(name, value)
        if not is_library(type(value).__module__):  # a class of the program
            self._visit_instance(name, value)

    def _visit_function(self, name: str, function: types.FunctionType) -> None:
        """Watch the variables that a function of the program uses. Functions of libraries are trusted, but not the
        functions of the program that they call, such as those that they decorate."""
        is_own = not is_library(function.__globals__.get("__name__"))
        if not is_own and not (function.__closure__ or "__wrapped__" in vars(function)):
            return
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._visit_cell(variable, cell, is_trusted=not is_own)
        if not is_own:
            self._reach(name, vars(function).get("__wrapped__"), is_trusted=True)
            return
        for attribute in ("__code__", "__defaults__", "__kwdefaults__"):
            self._watch_attribute(f"{name}.{attribute}", function, attribute)
        self._watch_items(f"{name}.", vars(function))
        self._read_names(name, function)

    def _read_names(self, name: str, function: types.FunctionType) -> None:
        """Watch the globals that a function names, and note the names of attributes."""
        names, variables = names_in(function.__code__), function.__globals__
        self._note_words(name, names.words)
        self._values.all_words |= names.reads_all
        for word in names.globals:
            if word not in variables and word in _UNBOUNDED:
                self.unknown = f"its code calls {word}(), so that GT cannot tell which variables it reads"
                return
            self._watch_entry(word, variables, word)
            if word not in variables:
                self._watch_entry(word, vars(builtins), word)
        if "import_module" in names.words:
            self.unknown = "its code calls import_module(), so that GT cannot tell which modules it reads"
        for imported, level in names.imports:
            module = absolute_name(imported, level, variables)
            self._watch_entry(f"the module {module}", sys.modules, module)

    def _note_words(self, name: str, words: frozenset[str]) -> None:
        self._values.words |= words
        if not name.startswith("the optimizer class"):
            self._words_of_steps |= words
        if not words.isdisjoint(_READS_OF_ENVIRONMENT):
            self._reach("os.environ", vars(os.environ)["_data"])

    def _visit_instance(self, name: str, value: Any) -> None:
        """Watch the attributes of another object: those that are named in code, or all if code of a library may read
        them."""
        kind = type(value)
        self._values.add_object(name, value)
        self._visit_class(name, kind)
        reads_all = any(base is not object and is_library(base.__module__) for base in kind.__mro__)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            if reads_all:
                self._watch_items(f"{name}.", attributes)
            else:
                self._watch_named(name, attributes)
        slots = [
            key
            for base in kind.__mro__
            for key, entry in vars(base).items()
            if isinstance(entry, types.MemberDescriptorType)
        ]
        if slots:
            self._slots.append((name, value, slots))
            if reads_all:
                self._visit_slots(slots, name, value, slots)

    def _visit_class(self, name: str, kind: type) -> None:
        """Watch the attributes of a class of the program, and of its bases, that are named in code."""
        for base in [*kind.__mro__, *type.mro(type(kind))]:
            if not is_library(base.__module__) and base not in self._classes:
                self._classes.add(base)
                self._watch_named(_class_name(base), vars(base), is_class=True)

    def _visit_generator(self, name: str, generator: Any) -> None:
        if isinstance(generator, torch.Generator):
            if generator is not torch.default_generator:
                self.generators.append((generator, generator.get_state()))
        elif isinstance(generator, random.SystemRandom):
            self.unknown = f"it uses {name}, which draws random numbers outside of GT"
        else:
            self._watch_inside(name, functools.partial(state_of, generator))

    def _visit_buffer(self, name: str, value: Any) -> None:
        size = (
            value.nbytes if isinstance(value, np.ndarray | memoryview) else len(value) * getattr(value, "itemsize", 1)
        )
        if size > _MAX_BYTES or getattr(value, "dtype", None) is np.dtype(object):
            self.unknown = (
                f"it uses {name}, {describe_type(value)} of {size} bytes, which GT does not compare at each call; have "
                "it as a tensor, or pass it as an argument"
            )
        else:
            self._values.add_content(name, functools.partial(content_of, value))

    # Attributes that are named in code

    def _visit_named(self) -> None:
        """Visit the attributes that are named in the code found so far. The function does not use others, which may be
        counters of other code."""
        words, reads_all = self._values.words, self._values.all_words
        for owner, mapping, names, is_class in self._named:
            for name in [name for name in names if name in words or reads_all or is_implicit(name)]:
                names.remove(name)
                if is_class and name in NOT_CALLED and name not in words:
                    continue
                self._watch_entry(f"{owner}.{name}", mapping, name)
        for name, value, slots in self._slots:
            self._visit_slots([slot for slot in slots if slot in words or reads_all], name, value, slots)
        for owner, group, names in self._settings:
            self._visit_settings(owner, group, names)

    def _visit_slots(self, found: Sequence[str], name: str, value: object, slots: list[str]) -> None:
        for slot in list(found):
            slots.remove(slot)
            self._watch_attribute(f"{name}.{slot}", value, slot)

    def _visit_settings(self, owner: str, group: dict[str, Any], names: set[str]) -> None:
        """Watch the settings of an optimizer that other code than its own reads."""
        words = self._words_of_steps
        if "param_groups" not in words:
            return
        for name in [name for name in names if name in words or not words.isdisjoint(("items", "values"))]:
            names.remove(name)
            self._watch_entry(f"{owner}[{name!r}]", group, name)

    # Watching

    def _reach(self, name: str, value: object, is_trusted: bool = False) -> None:
        if value is not None:
            self._pending.append((name, value, is_trusted))

    def _watch_items(self, name: str, value: Any, is_table: bool = False) -> None:
        """Watch a container and its items. The name of a table of attributes ends with a dot."""
        self._seen[id(value)] = value
        self._values.add_container(name, value, is_table)
        if isinstance(value, dict):
            for key, item in value.items():
                self._reach(name, key)
                self._reach(item_name(name, key), item)
        else:
            for number, item in enumerate(value):
                self._reach(f"{name}[{number}]", item)

    def _watch_named(self, name: str, mapping: Mapping[str, Any], is_class: bool = False) -> None:
        self._named.append((name, mapping, set(mapping) - (_NOT_READ if is_class else set()), is_class))
        self._values.add_named(name, mapping)

    def _watch_entry(self, name: str, owner: Any, key: Any) -> None:
        self._values.add_entry(name, owner, key)
        self._reach(name, owner.get(key))

    def _watch_attribute(self, name: str, value: object, attribute: str) -> None:
        self._values.add_attribute(name, value, attribute)
        self._reach(name, getattr(value, attribute, None))

    def _visit_cell(self, variable: str, cell: types.CellType, is_trusted: bool = False) -> None:
        try:
            content = cell.cell_contents
        except ValueError:  # the variable has no value yet
            self._values.add_content(variable, functools.partial(is_empty, cell))
            return
        self._values.add_attribute(variable, cell, "cell_contents")
        self._reach(variable, content, is_trusted)

    def _watch_inside(self, name: str, read: Callable[[], Any]) -> None:
        self._inside.append((name, read, read()))


def _class_name(kind: type) -> str:
    return f"the optimizer class {kind.__name__}" if issubclass(kind, Optimizer) else kind.__name__


_VISITS: tuple[tuple[Any, Callable[[WatchedState, str, Any], None]], ...] = (
    (torch.Tensor, WatchedState._visit_tensor),
    (torch.nn.Module, WatchedState._visit_module),
    (Optimizer, WatchedState._visit_optimizer),
    (LRScheduler, WatchedState._visit_schedule),
    ((dict, list, tuple, set, frozenset, deque), WatchedState._visit_container),
    (types.FunctionType, WatchedState._visit_function),
    (type, WatchedState._visit_class),
    (types.ModuleType, WatchedState._visit_python_module),
    (types.CellType, WatchedState._visit_cell),
    (GENERATORS, WatchedState._visit_generator),
    (_BUFFERS, WatchedState._visit_buffer),
    ((weakref.ref, contextvars.ContextVar), WatchedState._visit_references),
    ((operator.attrgetter, operator.methodcaller), WatchedState._visit_getter),
)
