"""Remembers the values of many objects, and tells which of them have changed.

Values are compared by identity: all of one kind are gathered by C functions into an array of object pointers, and the
bytes of this array are compared. Only if they differ, values are compared one by one, and equal numbers are no change.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import chain, repeat
from operator import getitem
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

SIMPLE_VALUES = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.Size, torch.device, range, slice)
Place: TypeAlias = tuple[int, Any]
"""The id() of a container, a table of attributes or another owner, and the key of a value in it; None for all of it."""
_MISSING = object()  # stands for a value that does not exist
_Read: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], Iterator[Any]]
_READ_ERRORS = (LookupError, RuntimeError, ValueError)  # an entry was deleted, or another thread changes a container


class Change(NamedTuple):
    """A value that has changed, by its name in messages and its place."""

    name: str
    place: Place


class WatchedValues:
    """Values to compare, with the names that messages give to them, except those at places that are `ignored`. `add_*`
    note what to compare; `changes` compares with the values at the last call of `remember`."""

    def __init__(self, ignored: Set[Place] = frozenset()) -> None:
        self._ignored = ignored
        self._in_part = {ident for ident, _ in ignored}  # owners some of whose values are ignored
        self._known: set[Place] = set()
        self._dicts = _Group(_read_items, _read_values, has_items=True)
        self._tables = _Group(_read_values, has_items=True)
        self._sequences = _Group(_read_items, has_items=True)
        self._entries = _Group(_read_entries)
        self._attributes = _Group(_read_attributes)
        self._unhooked = _Group(_read_attributes)
        self._groups = (self._dicts, self._tables, self._sequences, self._entries, self._attributes)
        self._last_hook = 0
        self._sized: list[tuple[str, Any]] = []
        self._empty: list[tuple[str, Any]] = []

    def __len__(self) -> int:
        return sum(group.size for group in self._groups)

    # Adding: the results tell which values are compared

    def add_container(self, name: str, value: Any) -> bool:
        """Compare the items of a dict, list, deque or set, and their order."""
        if not self._is_new((id(value), None)):
            return False
        if value:
            (self._dicts if isinstance(value, dict) else self._sequences).add(name, value)
            self._sized.append((name, value))
        else:
            self._empty.append((name, value))
        return True

    def add_table(self, name: str, table: dict[str, Any]) -> dict[str, Any]:
        """Compare the values of a dict whose names hardly change, such as the attributes of an object."""
        if id(table) in self._in_part:
            return {key: value for key, value in table.items() if self.add_entry(f"{name}{key}", table, key)}
        if self._is_new((id(table), None)):
            if table:
                self._tables.add(name, table)
            else:
                self._empty.append((name, table))
        return table

    def add_entry(self, name: str, owner: Mapping[Any, Any], key: Any) -> bool:
        """Compare one entry of a mapping."""
        is_new = self._is_new((id(owner), key))
        if is_new:
            self._entries.add(name, owner, key)
        return is_new

    def add_attribute(self, name: str, value: object, attribute: str) -> bool:
        """Compare an attribute, which need not exist."""
        is_new = self._is_new((id(value), attribute))
        if is_new:
            self._attributes.add(name, value, attribute)
        return is_new

    def add_no_hooks(self, name: str, tensor: object, attribute: str) -> None:
        """Notice the first hook of a tensor. Tensors are looked at only if torch has given a number to a new hook."""
        if self._is_new((id(tensor), attribute)):
            self._unhooked.add(name, tensor, attribute)

    def _is_new(self, place: Place) -> bool:
        is_new = place not in self._ignored and place not in self._known
        self._known.add(place)
        return is_new

    # Comparing

    def remember(self) -> None:
        for group in (*self._groups, self._unhooked):
            group.remember()
        self._last_hook = RemovableHandle.next_id
        self._containers = [value for _, value in self._sized]
        self._lengths = list(map(len, self._containers))
        self._empty_values = [value for _, value in self._empty]

    def changes(self) -> list[Change]:
        """The values that have changed."""
        found: list[Change] = []
        if any(self._empty_values):
            found += [Change(name, (id(value), None)) for name, value in self._empty if value]
        if list(map(len, self._containers)) != self._lengths:
            sizes = zip(self._sized, self._lengths, strict=True)
            found += [Change(name, (id(value), None)) for (name, value), length in sizes if len(value) != length]
        for group in self._groups:
            found += group.changes()
        if RemovableHandle.next_id != self._last_hook:
            if hooked := self._unhooked.changes():
                return [*found, *hooked]
            self._last_hook = RemovableHandle.next_id
        return found


class _Group:
    """Values that are read in the same way. `reads` are functions that take the owners and the keys of all, and yield
    some of their values. `has_items`: an owner is a container with any number of values, and has no key."""

    def __init__(self, *reads: _Read, has_items: bool = False) -> None:
        self.size = 0
        self._reads = reads
        self._has_items = has_items
        self._names: list[str] = []
        self._owners: list[Any] = []
        self._keys: list[Any] = []
        self._before: list[Any] = []
        self._pointers: list[bytes] = []

    def add(self, name: str, owner: Any, key: Any = None) -> None:
        self._names.append(name)
        self._owners.append(owner)
        self._keys.append(key)
        self.size += len(owner) if self._has_items else 1

    def remember(self) -> None:
        self._before = [self._read(owner, key) for owner, key in zip(self._owners, self._keys, strict=True)]
        self._pointers = self._gather()

    def _read(self, owner: Any, key: Any) -> list[Any]:
        return [value for read in self._reads for value in read([owner], [key])]

    def _gather(self) -> list[bytes]:
        """The pointers of all values."""
        return [_pointers(read(self._owners, self._keys), self.size) for read in self._reads]

    def changes(self) -> list[Change]:
        try:
            pointers = self._gather()
        except _READ_ERRORS:
            pointers = []
        if pointers == self._pointers:
            return []
        found = list(self._find_changes())
        if not found:
            self._pointers = pointers  # equal numbers: compared by identity next time
        return found

    def _find_changes(self) -> Iterator[Change]:
        for position, (owner, key) in enumerate(zip(self._owners, self._keys, strict=True)):
            name, before = self._names[position], self._before[position]
            try:
                now = self._read(owner, key)
            except _READ_ERRORS:
                now = []
            if len(now) != len(before):
                yield Change(name.removesuffix("."), (id(owner), key))
                continue
            changed = [n for n, pair in enumerate(zip(now, before, strict=True)) if _differ(*pair)]
            if not changed:
                self._before[position] = now
            elif self._reads == (_read_values,):
                keys = list(owner)
                yield from [Change(item_name(name, keys[n]), (id(owner), keys[n])) for n in changed]
            else:
                yield Change(self._name_of(name, owner, changed[0]), (id(owner), key))

    def _name_of(self, name: str, owner: Any, changed: int) -> str:
        if isinstance(owner, dict) and self._has_items:
            return item_name(name, list(owner)[changed % len(owner)])
        return f"{name}[{changed}]" if isinstance(owner, list) else name


def item_name(name: str, key: object) -> str:
    """The name of an item of a dict. The names of tables of attributes end with a dot."""
    if name.endswith("."):
        return f"{name}{key}"
    return f"{name}[{key!r}]" if isinstance(key, str | int | bytes | None) else f"{name}[...]"


def same_constant(first: Any, second: Any) -> bool:
    """Whether two values are equal constants, floats bit for bit, or the same object."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(same_constant, first, second))
    if not isinstance(first, SIMPLE_VALUES) or isinstance(first, enum.Enum):
        return False
    if isinstance(first, float):
        return first.hex() == second.hex()
    return bool(first == second) and (isinstance(first, int | str | bytes) or repr(first) == repr(second))


def _differ(now: Any, before: Any) -> bool:
    return now is not before and not same_constant(now, before)


def _pointers(values: Iterator[Any], count: int) -> bytes:
    """The addresses of `count` objects, one after another; empty if there are more."""
    found = np.fromiter(values, object, count)
    return found.tobytes() if next(values, _MISSING) is _MISSING else b""


def _read_items(containers: Sequence[Any], _: Sequence[Any]) -> Iterator[Any]:
    return chain.from_iterable(containers)


def _read_values(dicts: Sequence[Any], _: Sequence[Any]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dicts))


def _read_entries(owners: Sequence[Any], keys: Sequence[Any]) -> Iterator[Any]:
    return map(getitem, owners, keys)


def _read_attributes(values: Sequence[Any], names: Sequence[Any]) -> Iterator[Any]:
    return map(getattr, values, names, repeat(_MISSING))
