"""A walk over the objects that a function uses: the objects to visit, and what visits have found.

`object_visits.py` visits the objects. Attributes of the program's own objects are visited only if code that was found
names them: others may be counters of other code.
"""

from __future__ import annotations

import abc
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, MemberDescriptorType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from gt.client.compilation.known_types import is_constant
from gt.client.compilation.library_variables import LibraryVariable
from gt.client.compilation.names_in_code import NOT_CALLED, is_implicit
from gt.client.compilation.referred_objects import methods_of
from gt.client.compilation.static_reads import attributes_of, is_instance, is_read_by_getattr
from gt.client.compilation.watched_values import Reading, WatchedValues, item_name
from gt.client.tensor import Tensor

_READS_OF_ENVIRONMENT = ("environ", "environb", "getenv", "getenvb", "expandvars")
_UNKNOWN = {  # names of attributes with a state of its own
    "_version": "whether a tensor was written to",
    "__subclasses__": "whether there are other subclasses",
}
_OUTPUTS = ("sys.stdout", "sys.stderr", "sys.stdin")  # replaced by whoever redirects the output
_CONTAINERS = (dict, list, set, deque)
# Entries of a class that are not read by name.
_NOT_READ = {"__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "__slots__", "__hash__"}


class StateWalk:
    """The objects that are reached from `roots`. `tensors`, `plain`, `optimizers`, `generators` and `unknown` as in
    WatchedState. `values` are the values to compare, `seen` the objects that were visited, by id(). `fixed_in_call` are
    values that may change between calls, but not in a call: a name, a function that reads it, and the value."""

    def __init__(self, roots: Sequence[tuple[str, object]]) -> None:
        self.tensors: list[Tensor] = []
        self.plain: list[torch.Tensor] = []
        self.optimizers: list[Optimizer] = []
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self.unknown = ""
        self.values = WatchedValues()
        self.seen: dict[int, object] = {}  # kept, so that no other object gets the same id()
        self.classes: set[type] = set()
        self.schedules: list[tuple[str, dict[str, Any]]] = []
        self.fixed_in_call: list[tuple[str, Callable[[], Any], Any]] = []
        self._named: list[tuple[str, Mapping[str, Any], set[str], bool]] = []  # mappings, and names not watched yet
        # objects, and slots not watched yet
        self.gets_loggers = False
        self._watches_registrations = False
        self._variables: set[tuple[int, str]] = set()  # of libraries: the id() of the module, and the name
        self._slots: list[tuple[str, object, dict[str, MemberDescriptorType]]] = []
        self._settings: list[tuple[str, dict[str, Any], set[str]]] = []  # groups of parameters of optimizers
        self._optimizer_code: set[CodeType] = set()  # of the methods of the program's own optimizers
        self._words_elsewhere: set[str] = set()  # names in other code
        self._pending: deque[tuple[str, object, bool]] = deque((name, root, False) for name, root in roots)

    def is_going_on(self) -> bool:
        return bool(self._pending) and not self.unknown

    def unvisited(self) -> Iterator[tuple[str, object, bool]]:
        """The objects to visit, with their names and whether they are trusted. Visits may add others."""
        while self.is_going_on():
            name, value, is_trusted = self._pending.popleft()
            if id(value) not in self.seen and not is_constant(value):
                self.seen[id(value)] = value
                yield name, value, is_trusted

    # Reaching and watching

    def reach(self, name: str, value: object, is_trusted: bool = False) -> None:
        """Have an object visited. `is_trusted`: only code of a library uses it."""
        if value is not None:
            self._pending.append((name, value, is_trusted))

    def watch_items(self, name: str, value: Any, is_table: bool = False) -> None:
        """Watch a container and its items. The name of a table of attributes ends with a dot."""
        self.seen[id(value)] = value
        self.values.add_container(name, value, is_table)
        if isinstance(value, dict):
            for key, item in value.items():
                self.reach(name, key)
                self.reach(item_name(name, key), item)
        else:
            for number, item in enumerate(value):
                self.reach(f"{name}[{number}]", item)

    def watch_entry(self, name: str, owner: Any, key: Any) -> None:
        self.values.add_entry(name, owner, key)
        self.reach(name, owner.get(key))

    def watch_attribute(self, name: str, value: object, attribute: str) -> None:
        self.values.add_attribute(name, value, attribute)
        self.reach(name, getattr(value, attribute, None))

    def watch_in_call(self, name: str, read: Callable[[], Any]) -> None:
        """Watch a value that may change between calls, but not in a call."""
        self.fixed_in_call.append((name, read, read()))

    # Attributes that are named in code

    def note_optimizer_class(self, kind: type[Optimizer]) -> None:
        """Note the code of an optimizer of the program: settings that only it reads may change between calls."""
        self._optimizer_code.update(method.__code__ for method in methods_of(kind))

    def note_words(self, code: CodeType, words: frozenset[str]) -> None:
        """Note the names in the code of a function or method."""
        self.values.words |= words
        if code not in self._optimizer_code:
            self._words_elsewhere |= words
        if not words.isdisjoint(_READS_OF_ENVIRONMENT):
            self.watch_environment()
        for word in _UNKNOWN.keys() & words:
            self.unknown = f"its code uses {word}, and GT cannot tell {_UNKNOWN[word]}"

    def watch_environment(self) -> None:
        self.reach("os.environ", vars(os.environ)["_data"])

    def watch_registrations(self) -> None:
        """Watch whether a class is registered with any abstract one."""
        if not self._watches_registrations:
            self._watches_registrations = True
            self.values.add_attribute("the registered subclasses", Reading(abc.get_cache_token), "value")

    def watch_variable(self, variable: LibraryVariable) -> None:
        """Watch a variable or a function of a library, and reach functions and loggers. Other objects of libraries are
        compared by identity, and containers by their items."""
        name, owner, attribute, value = variable
        if (id(owner), attribute) in self._variables or name in _OUTPUTS or is_instance(owner, type):
            return  # a class makes a new object for a method at each reading
        self._variables.add((id(owner), attribute))
        table = attributes_of(owner) or {}
        if attribute in table:
            self.values.add_entry(name, table, attribute)
        else:
            self.values.add_attribute(name, owner, attribute)
        if type(value) in _CONTAINERS and id(value) not in self.seen:
            self.seen[id(value)] = value
            self.values.add_container(name, value)

    def watch_named(self, name: str, mapping: Mapping[str, Any], is_class: bool = False) -> None:
        """Watch those of the attributes of an object or a class that are named in code."""
        self._named.append((name, mapping, set(mapping) - (_NOT_READ if is_class else set()), is_class))
        self.values.add_named(name, mapping, is_class)

    def watch_slots(self, name: str, value: object, slots: dict[str, MemberDescriptorType], reads_all: bool) -> None:
        """Watch those of the slots of an object that are named in code, or all."""
        self._slots.append((name, value, slots))
        if reads_all:
            self._watch_slots(name, value, slots, list(slots))

    def watch_settings(self, name: str, group: dict[str, Any]) -> None:
        """Watch those of the settings of an optimizer's group of parameters that code reads."""
        self._settings.append((name, group, set(group) - {"params"}))

    def watch_named_attributes(self) -> None:
        """Watch the attributes that are named in the code found so far. The function does not use others, which may be
        counters of other code."""
        words, reads_all = self.values.words, self.values.all_words
        if "__match_args__" in words:
            for _, mapping, _, is_class in self._named:
                words.update(mapping.get("__match_args__", ()) if is_class else ())
        for owner, mapping, names, is_class in self._named:
            called = {name for name in names if name in words or is_implicit(name, is_class)}
            for name in {*called, *(names if reads_all else ())} - ((NOT_CALLED - called) if is_class else set()):
                names.remove(name)
                self.watch_entry(f"{owner}.{name}", mapping, name)
        for name, value, slots in self._slots:
            self._watch_slots(name, value, slots, [slot for slot in slots if slot in words or reads_all])
        for owner, group, names in self._settings:
            self._watch_settings(owner, group, names)

    def _watch_slots(
        self, name: str, value: object, slots: dict[str, MemberDescriptorType], named: Sequence[str]
    ) -> None:
        for key in named:
            slot = slots.pop(key)
            if is_read_by_getattr(type(value), key, slot):
                self.watch_attribute(f"{name}.{key}", value, key)
            else:
                self.watch_attribute(f"{name}.{key}", Reading(partial(slot.__get__, value)), "value")

    def _watch_settings(self, owner: str, group: dict[str, Any], names: set[str]) -> None:
        """Watch the settings of an optimizer that other code than that of optimizers reads."""
        words = self._words_elsewhere
        if "param_groups" not in words:
            return
        for name in [name for name in names if name in words or not words.isdisjoint(("items", "values"))]:
            names.remove(name)
            self.watch_entry(f"{owner}[{name!r}]", group, name)
