"""The objects that a function uses without getting them as arguments: variables of its closure, globals, attributes.

`gt.compile` skips a function only while these are what they were when it was recorded: the same tensors, modules and
functions, and equal numbers. They are found by walking from the function through closures, globals that its code
names, modules, optimizers, containers and instances of the program's own classes.
"""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Container, Iterator, Sequence
from operator import getitem, is_
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from gt.client.tensor import Tensor

_NUMBERS = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.Size, range, slice)
_MAX_ITEMS = 4096  # of a container that is walked; of a larger one only the length is watched
_MAX_WATCHED = 1 << 16
_FOLDERS = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))
_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_READS_OF_SCHEDULES = ("get_last_lr", "get_lr", "_last_lr", "last_epoch")
# Special methods that run when an object is made, copied, shown or deleted, and not when a function computes with it.
_NOT_CALLED = {
    "__init__", "__new__", "__init_subclass__", "__repr__", "__str__", "__del__", "__reduce__", "__reduce_ex__",
    "__getstate__", "__setstate__", "__copy__", "__deepcopy__",
}  # fmt: skip
_MISSING = object()


class WatchedState:
    """The objects that can be reached from `roots`, and their values at the time of the walk. `tensors` are the GT
    tensors, `plain` the tensors of this process, `optimizers` the optimizers, each once. A watched entry is an owner (a
    dict or a list) with a key; `names` are the names of entries in warnings."""

    def __init__(self, roots: Sequence[tuple[str, object]]) -> None:
        self.roots = roots
        self.tensors: list[Tensor] = []
        self.plain: list[torch.Tensor] = []
        self.optimizers: list[Optimizer] = []
        self.names: list[str] = []
        self._owners: list[Any] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._containers: list[Any] = []
        self._lengths: list[int] = []
        self._seen: dict[int, object] = {}  # kept, so that no other object gets the same id()
        self._words: set[str] = set()  # names in the code of the functions that were found
        self._attributes: list[tuple[str, dict[str, Any], list[str]]] = []  # of instances: those not visited yet
        self._classes: list[tuple[type, list[str]]] = []  # classes of the program, and methods not visited yet
        self._schedules: list[tuple[str, dict[str, Any]]] = []
        self._counters: list[tuple[str, dict[str, Any], str, Any]] = []
        self._pending: deque[tuple[str, object]] = deque(roots)
        self._walk()

    @property
    def known_ids(self) -> Container[int]:
        """The id()s of the objects that were found."""
        return self._seen

    # Comparing

    def change_inside(self) -> str | None:
        """The name of an entry that the function has changed, counters of schedules included; None if it has not."""
        moved = (name for name, owner, key, value in self._counters if owner.get(key, _MISSING) != value)
        return self.first_change() or next(moved, None)

    def first_change(self) -> str | None:
        """The name of an entry whose value or length has changed since the walk; None if none has."""
        lengths = list(map(len, self._containers))
        if lengths != self._lengths:
            position = next(n for n, length in enumerate(lengths) if length != self._lengths[n])
            changed = self._containers[position]
            names = (self.names[n] for n, owner in enumerate(self._owners) if owner is changed)
            return next(names, "a container")
        try:
            values = list(map(getitem, self._owners, self._keys))
        except (KeyError, IndexError):
            return "an attribute that was deleted"
        if all(map(is_, values, self._values)):
            return None
        return next(self._changes(values), None)

    def _changes(self, values: Sequence[Any]) -> Iterator[str]:
        for position, (now, before) in enumerate(zip(values, self._values, strict=True)):
            if now is before:
                continue
            if type(now) is type(before) and isinstance(now, _NUMBERS) and _is_equal(now, before):
                self._values[position] = now  # compared by identity next time
                continue
            yield self.names[position]

    # Walking

    def _walk(self) -> None:
        while self._pending and len(self._values) < _MAX_WATCHED:
            while self._pending:
                name, value = self._pending.popleft()
                if not isinstance(value, _NUMBERS) and id(value) not in self._seen:
                    self._seen[id(value)] = value
                    self._visit(name, value)
            self._visit_named()
        for name, attributes in self._schedules:
            self._visit_schedule(name, attributes)

    def _visit_named(self) -> None:
        """Visit the methods and attributes that are named in the code found so far. The function does not use others,
        which may be counters of other code."""
        for base, names in self._classes:
            for name in [name for name in names if name in self._words or _is_implicit(name)]:
                names.remove(name)
                self._pending.append((f"{base.__name__}.{name}", _function_of(vars(base)[name])))
        for owner, attributes, names in self._attributes:
            for name in [name for name in names if name in self._words]:
                names.remove(name)
                self._watch(f"{owner}.{name}", attributes, name, attributes[name])

    def _visit(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            (self.tensors if isinstance(value, Tensor) else self.plain).append(value)  # type: ignore[arg-type]
        elif isinstance(value, torch.nn.Module):
            self._visit_module(name, value)
        elif isinstance(value, Optimizer):
            self._visit_optimizer(name, value)
        elif isinstance(value, LRScheduler):
            self._schedules.append((name, vars(value)))
        elif isinstance(value, dict | list | tuple | set | frozenset | deque):
            self._visit_container(name, value)
        elif isinstance(value, types.FunctionType):
            self._visit_function(name, value)
        elif isinstance(value, types.MethodType):
            self._pending.extend([(name, value.__func__), (_owner_name(name), value.__self__)])
        elif isinstance(value, functools.partial):
            self._pending.extend([(name, value.func), (name, value.args), (name, value.keywords)])
        elif isinstance(value, types.CellType | type | types.ModuleType | types.BuiltinFunctionType):
            pass
        elif hasattr(value, "__dict__"):
            self._visit_instance(name, value)

    def _visit_module(self, name: str, module: torch.nn.Module) -> None:
        attributes = vars(module)
        self._read_class(type(module))
        for table in _TABLES:
            self._watch_length(attributes[table])
            for key, value in attributes[table].items():
                self._watch(f"{name}.{key}", attributes[table], key, value)
        for key, value in attributes.items():
            if key in _HOOKS:
                self._watch_length(value)
                self._pending.extend((f"{name}.{key}", hook) for hook in value.values())
            elif not key.startswith("_"):
                self._watch(f"{name}.{key}", attributes, key, value)

    def _visit_optimizer(self, name: str, optimizer: Optimizer) -> None:
        """Watch the parameters and the state of an optimizer, but not its settings and counts, which may change
        (`optimizer_numbers.py`)."""
        self.optimizers.append(optimizer)
        for key in ("param_groups", "state"):  # load_state_dict replaces both
            self._seen[id(vars(optimizer)[key])] = vars(optimizer)[key]
            self._watch(f"{name}.{key}", vars(optimizer), key, vars(optimizer)[key])
        self._watch_length(optimizer.param_groups)
        for group in optimizer.param_groups:
            self._watch_length(group["params"])
            for position, parameter in enumerate(group["params"]):
                self._watch(f"{name}.param_groups", group["params"], position, parameter)
        self._watch_length(optimizer.state)
        for entries in optimizer.state.values():
            if isinstance(entries, dict):
                self._watch_length(entries)
                for key, value in entries.items():
                    if isinstance(value, torch.Tensor):
                        self._watch(f"{name}.state[...][{key!r}]", entries, key, value)

    def _visit_schedule(self, name: str, attributes: dict[str, Any]) -> None:
        """Watch the counters of a learning-rate schedule if the function reads them. Otherwise they may change between
        calls: the rates reach the function through the optimizer."""
        numbers = [(key, value) for key, value in attributes.items() if isinstance(value, _NUMBERS)]
        for key, value in numbers:
            if self._words.isdisjoint(_READS_OF_SCHEDULES):
                self._counters.append((f"{name}.{key}", attributes, key, value))
            else:
                self._watch(f"{name}.{key}", attributes, key, value)

    def _visit_container(self, name: str, value: Any) -> None:
        if not isinstance(value, tuple | frozenset):
            self._watch_length(value)
        if len(value) > _MAX_ITEMS:
            return
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                self._watch(f"{name}[{key!r}]", value, key, item)
        else:
            self._pending.extend((name, item) for item in value)

    def _visit_function(self, name: str, function: types.FunctionType) -> None:
        if _is_library(function.__module__):
            return
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for variable, cell in cells:
            content = _Cell(cell)
            self._watch(variable, content, 0, content[0])
        if function.__defaults__ or function.__kwdefaults__:
            self._pending.extend([(name, function.__defaults__), (name, function.__kwdefaults__)])
        variables = function.__globals__
        self._words |= _words_of(function.__code__)
        for word in _globals_of(function.__code__):
            value = variables.get(word, _MISSING)
            if value is _MISSING or isinstance(value, types.ModuleType | type | types.BuiltinFunctionType):
                continue
            self._watch(word, variables, word, value)

    def _visit_instance(self, name: str, value: Any) -> None:
        """Watch the attributes of another object: of a class of the program, those that are named in code; of a class
        of a library, the public numbers."""
        attributes = vars(value)
        if type(value).__module__.startswith("gt."):
            self._pending.append((name, attributes.get("__wrapped__")))  # another function of gt.compile
            return
        if _is_library(type(value).__module__):
            for key, item in list(attributes.items()):
                if isinstance(item, _NUMBERS) and not key.startswith("_"):
                    self._watch(f"{name}.{key}", attributes, key, item)
            return
        self._attributes.append((name, attributes, list(attributes)))
        self._read_class(type(value))

    def _read_class(self, kind: type) -> None:
        """Note the methods of a class of the program, to be visited when they are named in code."""
        for base in kind.__mro__:
            if _is_library(base.__module__) or id(base) in self._seen:
                continue
            self._seen[id(base)] = base
            methods = [name for name, value in vars(base).items() if _function_of(value) is not None]
            self._classes.append((base, methods))

    def _watch(self, name: str, owner: Any, key: Any, value: Any) -> None:
        self.names.append(name)
        self._owners.append(owner)
        self._keys.append(key)
        self._values.append(value)
        self._pending.append((name, value))

    def _watch_length(self, value: Any) -> None:
        self._containers.append(value)
        self._lengths.append(len(value))


class _Cell:
    """A variable of a closure, as an owner with one entry."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, key: int) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # the variable has no value yet
            return None


def _function_of(value: Any) -> Any:
    """The function of a method or property; None for any other attribute of a class."""
    inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return inner if isinstance(inner, types.FunctionType) or hasattr(inner, "__wrapped__") else None


def _is_implicit(method: str) -> bool:
    """Whether a method may be called without being named, as operators are."""
    return method == "forward" or (method.startswith("__") and method not in _NOT_CALLED)


@functools.cache
def _words_of(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes in a code object and in those of functions inside it."""
    inner = [_words_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


@functools.cache
def _globals_of(code: types.CodeType) -> frozenset[str]:
    """The globals that a code object and those inside it read, without the names of attributes."""
    inner = [_globals_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    own = [each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return frozenset(own).union(*inner)


@functools.cache
def _is_library(module: str | None) -> bool:
    """Whether a module is not the program's own."""
    if module is None or module.split(".")[0] in ("gt", "builtins"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module != "__main__" and (not file or file.startswith(_FOLDERS))


def _is_equal(first: Any, second: Any) -> bool:
    """Whether two numbers are equal: floats bit for bit."""
    return bool(first.hex() == second.hex() if isinstance(first, float) else first == second)


def _owner_name(name: str) -> str:
    return name.rpartition(".")[0] or name
