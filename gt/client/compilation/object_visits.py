"""Visits of the objects that a function uses, by type: each adds the objects behind one, and the values to compare."""

from __future__ import annotations

import abc
import array
import builtins
import contextvars
import functools
import logging
import operator
import random
import sys
import types
import typing
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from gt.client.compilation.attribute_paths import AttributePath, Root, paths_in
from gt.client.compilation.known_types import SIMPLE_VALUES, describe_type, is_library, is_opaque, is_python_class
from gt.client.compilation.library_functions import (
    called_methods,
    home_of,
    is_compared,
    is_distributed,
    is_pure,
    is_unbounded,
    reads_all_attributes,
    reads_environment,
)
from gt.client.compilation.library_variables import find_variable
from gt.client.compilation.names_in_code import absolute_name, names_in
from gt.client.compilation.random_generators import GENERATORS, state_of
from gt.client.compilation.referred_objects import referred_objects
from gt.client.compilation.state_walk import StateWalk
from gt.client.compilation.static_reads import (
    attributes_of,
    bases_of,
    entries_of,
    hides_attributes,
    is_instance,
    module_of,
    slots_of,
)
from gt.client.compilation.watched_values import MISSING, Reading, content_of, is_empty
from gt.client.tensor import Tensor
from gt.client.torch_patches.dispatch import tree_leaves
from gt.client.torch_patches.nn_modules import GLOBAL_MODULE_HOOKS, GLOBAL_STEP_HOOKS

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
_READS_OF_LEVELS = ("isEnabledFor", "getEffectiveLevel", "hasHandlers", "level")
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_BARE_BASES = (object, abc.ABC, typing.Generic, typing.Protocol)  # classes of libraries that read no attributes
_CONSTRUCTORS = ("__new__", "__init__")
_BUFFERS = (np.ndarray, bytearray, array.array, memoryview)


def visit(walk: StateWalk, name: str, value: Any, is_trusted: bool) -> None:
    """Visit an object: let the walk reach the objects behind it, and watch its state. The walk ends at an object of
    unknown state, unless code of a library uses it (`is_trusted`)."""
    if is_instance(value, _FUNCTIONS) and not is_trusted:
        _visit_callee(walk, name, value)
    visit_kind = next((visit for kinds, visit in _VISITS if is_instance(value, kinds)), None)
    if visit_kind is not None:
        visit_kind(walk, name, value)
    elif (referred := referred_objects(value)) is not None:
        is_method = type(value) is types.MethodType
        for each in referred:  # the function of a method of a library works on the object, which is visited too
            walk.reach(name, each, is_trusted=is_method and each is value.__func__)
    elif module_of(type(value)).split(".")[0] == "gt":
        walk.reach(name, (attributes_of(value) or {}).get("__wrapped__"))  # another function of gt.compile
    elif is_opaque(value):
        pass
    elif is_python_class(type(value)) and not hides_attributes(type(value)):  # type: ignore[arg-type]
        _visit_instance(walk, name, value)
    elif not is_trusted:
        walk.unknown = (
            f"it uses {name}, {describe_type(value)}, and GT cannot tell whether its state changes; use it outside "
            "of the function"
        )


def _visit_tensor(walk: StateWalk, name: str, tensor: torch.Tensor) -> None:
    (walk.tensors if is_instance(tensor, Tensor) else walk.plain).append(tensor)  # type: ignore[arg-type]
    walk.watch_items(f"{name}.", attributes_of(tensor))
    if tensor.requires_grad:
        for hooks in _HOOKS_OF_TENSORS:
            if getattr(tensor, hooks) is None:
                walk.values.add_no_hooks(f"the hooks of {name}", tensor, hooks)
            else:
                walk.watch_attribute(f"the hooks of {name}", tensor, hooks)


def _visit_module(walk: StateWalk, name: str, module: torch.nn.Module) -> None:
    if not walk.seen.get(id(GLOBAL_MODULE_HOOKS)):
        walk.seen[id(GLOBAL_MODULE_HOOKS)] = GLOBAL_MODULE_HOOKS
        for hooks in GLOBAL_MODULE_HOOKS:
            walk.reach("the hooks of all modules", hooks)
    attributes = attributes_of(module) or {}
    walk.values.add_object(name, module)
    _visit_class(walk, name, type(module))
    walk.seen[id(attributes)] = attributes
    walk.values.add_attributes(f"{name}.", attributes)
    for key, value in attributes.items():
        if key in _TABLES and isinstance(value, dict):
            walk.watch_items(f"{name}.", value, is_table=True)
        elif key not in _IGNORED:
            walk.reach(f"{name}.{key}", value)


def _visit_optimizer(walk: StateWalk, name: str, optimizer: Optimizer) -> None:
    """Watch the attributes, the parameters and the state of an optimizer, but not its counts, which may change, nor
    its settings, unless the function reads them (`optimizer_scalars.py`)."""
    walk.optimizers.append(optimizer)
    for hooks in GLOBAL_STEP_HOOKS:
        walk.reach("the hooks of all optimizers", hooks)
    _visit_class(walk, name, type(optimizer))
    for part in (optimizer.param_groups, optimizer.state):
        walk.seen[id(part)] = part
    walk.watch_items(f"{name}.", attributes_of(optimizer))
    walk.values.add_container(f"{name}.param_groups", optimizer.param_groups)
    for number, group in enumerate(optimizer.param_groups):
        walk.reach(f"{name}.param_groups", group["params"])
        walk.watch_settings(f"{name}.param_groups[{number}]", group)
        for key, value in group.items():
            if key != "params" and any(is_instance(each, Tensor) for each in tree_leaves(value)):
                walk.watch_entry(f"{name}.param_groups[{number}][{key!r}]", group, key)
    walk.values.add_container(f"{name}.state", optimizer.state)
    for entries in optimizer.state.values():
        if not isinstance(entries, dict):
            walk.reach(f"{name}.state", entries)
        elif not any(isinstance(value, SIMPLE_VALUES) for value in entries.values()):
            walk.watch_items(f"{name}.state.", entries, is_table=True)
        else:
            walk.values.add_content(f"{name}.state", functools.partial(tuple, entries))
            for key in [key for key, value in entries.items() if not isinstance(value, SIMPLE_VALUES)]:
                walk.watch_entry(f"{name}.state[...][{key!r}]", entries, key)


def _visit_schedule(walk: StateWalk, name: str, schedule: LRScheduler) -> None:
    walk.schedules.append((name, attributes_of(schedule) or {}))
    _visit_class(walk, name, type(schedule))


def watch_schedules(walk: StateWalk) -> None:
    """Watch the counters of learning-rate schedules that the function reads. The others may change between calls: the
    rates reach the function through the optimizer. Called after all code was found."""
    words = walk.values.words
    for name, attributes in walk.schedules:
        is_read = not words.isdisjoint(_READS_OF_SCHEDULES)
        for key in [key for key, value in attributes.items() if isinstance(value, SIMPLE_VALUES)]:
            if is_read or key in words:
                walk.values.add_entry(f"{name}.{key}", attributes, key)
            else:
                walk.watch_in_call(f"{name}.{key}", functools.partial(attributes.get, key))


def _visit_container(walk: StateWalk, name: str, value: Any) -> None:
    if isinstance(value, tuple | frozenset):
        for item in value:
            walk.reach(name, item)
    else:
        walk.watch_items(name, value)
    if is_instance(value, defaultdict):
        walk.watch_attribute(f"the factory of {name}", value, "default_factory")
    if not is_library(module_of(type(value))):  # a class of the program
        _visit_instance(walk, name, value)


def _visit_function(walk: StateWalk, name: str, function: types.FunctionType) -> None:
    """Watch the variables that a function of the program uses. Functions of libraries are trusted, but not the
    functions of the program that they call, such as those that they decorate."""
    is_own = not is_library(function.__globals__.get("__name__"))
    if not is_own and not (function.__closure__ or "__wrapped__" in vars(function)):
        return
    if is_own:
        _watch_paths(walk, function)  # first, so that functions of libraries are reached with their lines
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        _visit_cell(walk, variable, cell, is_trusted=not is_own)
    if not is_own:
        walk.reach(name, vars(function).get("__wrapped__"), is_trusted=True)
        return
    for attribute in ("__code__", "__defaults__", "__kwdefaults__"):
        walk.watch_attribute(f"{name}.{attribute}", function, attribute)
    walk.watch_items(f"{name}.", vars(function))
    _read_names(walk, function)


def _read_names(walk: StateWalk, function: types.FunctionType) -> None:
    """Watch the globals that a function names, and note the names of attributes."""
    names, variables = names_in(function.__code__), function.__globals__
    is_constructor = function.__code__.co_name in _CONSTRUCTORS
    walk.note_words(function.__code__, names.words - names.new_attributes if is_constructor else names.words)
    walk.values.all_words |= names.reads_all
    for word in names.globals:
        walk.watch_entry(word, variables, word)
        if word not in variables:
            walk.watch_entry(word, vars(builtins), word)
    for imported, level in names.imports:
        module = absolute_name(imported, level, variables)
        walk.watch_entry(f"the module {module}", sys.modules, module)


def _watch_paths(walk: StateWalk, function: types.FunctionType) -> None:
    """Watch the variables of libraries that a function names, and reach functions and classes with the lines that name
    them."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for path in paths_in(function.__code__):
        root = _root_of(path, function.__globals__, cells)
        found = find_variable(root, path.names)
        if found is not None:
            walk.watch_variable(found)
        value = root if len(path.names) == 1 else None if found is None else found.value
        if is_instance(value, (*_FUNCTIONS, type, logging.Logger)):
            is_callee = is_instance(value, _FUNCTIONS)
            line = f" ({function.__code__.co_filename}:{path.line})" if is_callee else ""
            walk.reach(f"{path}{line}", value)


def _root_of(path: AttributePath, variables: dict[str, Any], cells: dict[str, types.CellType]) -> object:
    """The object of the first name of a path; None if it has none."""
    first = path.names[0]
    if path.root is Root.GLOBAL:
        return variables[first] if first in variables else vars(builtins).get(first)
    if path.root is Root.FREE:
        return None if first not in cells or is_empty(cells[first]) else cells[first].cell_contents
    module = first.lstrip(".")
    return sys.modules.get(absolute_name(module, len(first) - len(module), variables))


def _visit_callee(walk: StateWalk, name: str, function: Any) -> None:
    """Note the state that a function of a library reads besides its arguments. The walk ends at a function that may
    read state which GT does not compare."""
    called = name.partition(" ")[0].rpartition(".")[2]
    walk.values.words |= called_methods(function)
    walk.values.all_words |= reads_all_attributes(called, function)
    walk.gets_loggers |= function is logging.getLogger
    if reads_environment(function):
        walk.watch_environment()
    if is_unbounded(function):
        walk.unknown = f"its code calls {name}, so that GT cannot tell which variables it reads"
    elif is_compared(function):
        walk.values.add_attribute(f"the result of {name}", Reading(function), "value")
    elif is_distributed(function) and torch.distributed.is_available() and not torch.distributed.is_initialized():
        walk.values.add_content("torch.distributed", torch.distributed.is_initialized)
    elif not is_pure(function):
        walk.unknown = (
            f"its code uses {name}, and the result of {home_of(function)} may change unnoticed; call it outside of the "
            "function"
        )


def _visit_logger(walk: StateWalk, name: str, logger: logging.Logger) -> None:
    """Watch the levels that decide whether a logger is enabled. Its output does not matter."""
    _visit_class(walk, name, type(logger))
    walk.values.add_attribute("the level of all loggers", logger.manager, "disable")
    for attribute in ("level", "disabled", "parent"):
        walk.watch_attribute(f"{name}.{attribute}", logger, attribute)


def check_loggers(walk: StateWalk) -> None:
    """Refuse a function that gets loggers by their names and reads their levels. Called after all code was found."""
    if walk.gets_loggers and not walk.values.words.isdisjoint(_READS_OF_LEVELS):
        walk.unknown = walk.unknown or (
            "its code reads the level of a logger that it gets by logging.getLogger; have the logger in a variable "
            "outside of the function"
        )


def _visit_cell(walk: StateWalk, variable: str, cell: types.CellType, is_trusted: bool = False) -> None:
    try:
        content = cell.cell_contents
    except ValueError:  # the variable has no value yet
        walk.values.add_content(variable, functools.partial(is_empty, cell))
        return
    walk.values.add_attribute(variable, cell, "cell_contents")
    if variable == "__class__" and is_instance(content, type):  # of super(), which makes no instance
        _visit_class(walk, variable, content)
    else:
        walk.reach(variable, content, is_trusted)


def _visit_python_module(walk: StateWalk, name: str, module: types.ModuleType) -> None:
    if not is_library(module.__name__):
        walk.watch_named(name, attributes_of(module) or {})


def _visit_instance(walk: StateWalk, name: str, value: Any) -> None:
    """Watch the attributes of another object: those that are named in code, or all if code of a library may read
    them."""
    kind = type(value)
    walk.values.add_object(name, value)
    _visit_class(walk, name, kind)
    reads_all = any(base not in _BARE_BASES and is_library(module_of(base)) for base in bases_of(kind))
    attributes = attributes_of(value)
    if attributes is not None:
        if reads_all:
            walk.watch_items(f"{name}.", attributes)
        else:
            walk.watch_named(name, attributes)
    if slots := slots_of(kind):
        walk.watch_slots(name, value, slots, reads_all)


def _visit_named_class(walk: StateWalk, name: str, kind: type) -> None:
    """Watch a class that the function may make instances of."""
    _visit_class(walk, name, kind)
    walk.values.words |= called_methods(kind)
    walk.values.all_words |= reads_all_attributes("", kind)
    for base in bases_of(kind):
        if not is_library(module_of(base)):
            for method in [each for each in _CONSTRUCTORS if each in entries_of(base)]:
                walk.watch_entry(f"{base.__name__}.{method}", entries_of(base), method)


def _visit_class(walk: StateWalk, name: str, kind: type) -> None:
    """Watch the attributes of a class of the program, and of its bases, that are named in code."""
    if is_instance(kind, abc.ABCMeta):
        walk.watch_registrations()
    for base in [*bases_of(kind), *bases_of(type(kind))]:
        if not is_library(module_of(base)) and base not in walk.classes:
            walk.classes.add(base)
            walk.watch_named(base.__name__, entries_of(base), is_class=True)
            if issubclass(base, Optimizer):
                walk.note_optimizer_class(base)


def _visit_generator(walk: StateWalk, name: str, generator: Any) -> None:
    if isinstance(generator, torch.Generator):
        if generator is not torch.default_generator:
            walk.generators.append((generator, generator.get_state()))
    elif isinstance(generator, random.SystemRandom):
        walk.unknown = f"it uses {name}, which draws random numbers outside of GT"
    else:
        walk.watch_in_call(name, functools.partial(state_of, generator))


def _visit_buffer(walk: StateWalk, name: str, value: Any) -> None:
    size = value.nbytes if isinstance(value, np.ndarray | memoryview) else len(value) * getattr(value, "itemsize", 1)
    if size > _MAX_BYTES or getattr(value, "dtype", None) is np.dtype(object):
        walk.unknown = (
            f"it uses {name}, {describe_type(value)} of {size} bytes, which GT does not compare at each call; have "
            "it as a tensor, or pass it as an argument"
        )
    else:
        walk.values.add_content(name, functools.partial(content_of, value))


def _visit_references(walk: StateWalk, name: str, value: Any) -> None:
    """Watch the object that a weak reference or a context variable refers to now."""
    read = functools.partial(value.get, MISSING) if isinstance(value, contextvars.ContextVar) else value
    walk.values.add_attribute(name, Reading(read), "value")
    walk.reach(name, read())


def _visit_getter(walk: StateWalk, name: str, getter: Any) -> None:
    given = getter.__reduce__()[1]
    walk.values.words.update(word for path in given if isinstance(path, str) for word in path.split("."))
    walk.values.all_words |= isinstance(getter, operator.methodcaller)
    walk.reach(name, given)


_VISITS: tuple[tuple[Any, Callable[[StateWalk, str, Any], None]], ...] = (
    (torch.Tensor, _visit_tensor),
    (torch.nn.Module, _visit_module),
    (Optimizer, _visit_optimizer),
    (LRScheduler, _visit_schedule),
    ((dict, list, tuple, set, frozenset, deque), _visit_container),
    (types.FunctionType, _visit_function),
    (type, _visit_named_class),
    (types.ModuleType, _visit_python_module),
    (logging.Logger, _visit_logger),
    (types.CellType, _visit_cell),
    (GENERATORS, _visit_generator),
    (_BUFFERS, _visit_buffer),
    ((weakref.ref, contextvars.ContextVar), _visit_references),
    ((operator.attrgetter, operator.methodcaller), _visit_getter),
)
