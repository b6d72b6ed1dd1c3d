"""Remembers the values of many objects, and tells which of them has changed.

Values are compared by identity: all of one kind are gathered by C functions into an array of object pointers, and the
bytes of this array are compared. Only if they differ, values are compared one by one, and equal numbers are no change.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import contains, getitem, is_
from typing import Any, TypeAlias

import numpy as np
from torch.utils.hooks import RemovableHandle

from gt.client.compilation.known_types import same_constant
from gt.client.compilation.names_in_code import is_implicit

MISSING = object()  # stands for a value that does not exist
_Read: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], Iterator[Any]]
_READ_ERRORS = (LookupError, RuntimeError, ValueError)  # an entry was deleted, or another thread changes a container


class WatchedValues:
    """Values to compare, with the names that warnings give to them. `add_*` note what to compare; `first_change`
    compares with the values at the first call of `remember`."""

    def __init__(self) -> None:
        self.words: set[str] = set()  # keys of `add_named` mappings that matter
        self.all_words = False
        self._dicts = _Group(_read_items, _read_values, has_items=True)
        self._tables = _Group(_read_values, has_items=True)
        self._last_keys = _Group(_read_last_keys)
        self._sequences = _Group(_read_items, has_items=True)
        self._entries = _Group(_read_entries)
        self._attributes = _Group(_read_attributes)
        self._unhooked = _Group(_read_attributes)
        self._last_hook = 0
        self._sized: list[tuple[str, Any]] = []
        self._empty: list[tuple[str, Any]] = []
        self._absent: list[tuple[str, Any, Any]] = []
        self._named: list[tuple[str, Mapping[str, Any], bool]] = []
        self._objects: list[tuple[str, object]] = []
        self._contents: list[tuple[str, Callable[[], Any], Any]] = []

    def __len__(self) -> int:
        return sum(group.size for group in self._groups())

    # Adding

    def add_container(self, name: str, value: Any, is_table: bool = False) -> None:
        """Compare the items of a dict, list, deque or set, and their order. `is_table`: the names of a dict's items
        never change, and none moves to another dict."""
        if not value:
            self._empty.append((name, value))
        elif is_table:
            self._tables.add(name, value)
        else:
            (self._dicts if isinstance(value, dict) else self._sequences).add(name, value)
            self._sized.append((name, value))

    def add_attributes(self, name: str, attributes: dict[str, Any]) -> None:
        """Compare the attributes of a module. Of their names only the last is compared: a new one comes last."""
        self._tables.add(name, attributes)
        self._last_keys.add(f"an attribute of {name.removesuffix('.')}", attributes)

    def add_entry(self, name: str, owner: Any, key: Any) -> None:
        """Compare one entry of a mapping, which need not exist."""
        if key in owner:
            self._entries.add(name, owner, key)
        else:
            self._absent.append((name, owner, key))

    def add_attribute(self, name: str, value: object, attribute: str) -> None:
        """Compare an attribute, which need not exist."""
        self._attributes.add(name, value, attribute)

    def add_no_hooks(self, name: str, tensor: object, attribute: str) -> None:
        """Notice the first hook of a tensor. Tensors are looked at only if torch has given a number to a new hook."""
        self._unhooked.add(name, tensor, attribute)

    def add_named(self, name: str, mapping: Mapping[str, Any], is_class: bool) -> None:
        """Notice new keys of a mapping that are among `words`, and new special methods of a class."""
        self._named.append((name, mapping, is_class))

    def add_object(self, name: str, value: object) -> None:
        """Compare the class of an object."""
        self._objects.append((name, value))

    def add_content(self, name: str, read: Callable[[], Any]) -> None:
        """Compare a value that is made anew at each reading."""
        self._contents.append((name, read, read()))

    # Comparing

    def remember(self) -> None:
        for group in (*self._groups(), self._unhooked):
            group.remember()
        self._last_hook = RemovableHandle.next_id
        self._containers = [value for _, value in self._sized]
        self._lengths = list(map(len, self._containers))
        self._empty_values = [value for _, value in self._empty]
        self._absent_owners = [owner for _, owner, _ in self._absent]
        self._absent_keys = [key for _, _, key in self._absent]
        self._mappings = [mapping for _, mapping, _ in self._named]
        self._names = list(map(tuple, self._mappings))
        self._values = [value for _, value in self._objects]
        self._kinds = list(map(type, self._values))

    def first_change(self) -> str | None:
        """The name of a value that has changed; None if none has."""
        if any(self._empty_values):
            return next(name for name, value in self._empty if value)
        if any(map(contains, self._absent_owners, self._absent_keys)):
            return next(name for name, owner, key in self._absent if key in owner)
        if not all(map(is_, map(type, self._values), self._kinds)):
            classes = zip(self._objects, self._kinds, strict=True)
            return next(f"the class of {name}" for (name, value), kind in classes if type(value) is not kind)
        if list(map(len, self._containers)) != self._lengths:
            sizes = zip(self._sized, self._lengths, strict=True)
            return next(name for (name, value), length in sizes if len(value) != length)
        for group in self._groups():
            if changed := group.first_change():
                return changed
        if RemovableHandle.next_id != self._last_hook:
            if changed := self._unhooked.first_change():
                return changed
            self._last_hook = RemovableHandle.next_id
        if list(map(tuple, self._mappings)) != self._names and (new := self._new_name()):
            return new
        return next((name for name, read, value in self._contents if read() != value), None)

    def _groups(self) -> tuple[_Group, ...]:
        return self._dicts, self._tables, self._last_keys, self._sequences, self._entries, self._attributes

    def _new_name(self) -> str | None:
        """A new key of a mapping that the function may read."""
        for position, (name, mapping, is_class) in enumerate(self._named):
            new = set(mapping).difference(self._names[position])
            if found := {key for key in new if self.all_words or key in self.words or is_implicit(key, is_class)}:
                return f"{name}.{min(found)}"
            self._names[position] = tuple(mapping)
        return None


class _Group:
    """Values that are read in the same way. `reads` are functions that take the owners and the keys of all, and yield
    some of their values. `has_items`: an owner is a container with any number of values, and has no key."""

    def __init__(self, *reads: _Read, has_items: bool = False) -> None:
        self.size = 0
        self._reads = reads
        self._has_items = has_items
        self._names: list[str] = []
        self.owners: list[Any] = []
        self._keys: list[Any] = []
        self._before: list[Any] = []
        self._pointers: list[bytes] = []

    def add(self, name: str, owner: Any, key: Any = None) -> None:
        self._names.append(name)
        self.owners.append(owner)
        self._keys.append(key)
        self.size += len(owner) if self._has_items else 1

    def remember(self) -> None:
        self._before = [self._read(owner, key) for owner, key in zip(self.owners, self._keys, strict=True)]
        self._pointers = self._gather()

    def _read(self, owner: Any, key: Any) -> list[Any]:
        return [value for read in self._reads for value in read([owner], [key])]

    def _gather(self) -> list[bytes]:
        """The pointers of all values."""
        return [_pointers(read(self.owners, self._keys), self.size) for read in self._reads]

    def first_change(self) -> str | None:
        try:
            pointers = self._gather()
        except _READ_ERRORS:
            pointers = []
        if pointers == self._pointers:
            return None
        if changed := next(self._changes(), None):
            return changed
        self._pointers = pointers  # equal numbers: compared by identity next time
        return None

    def _changes(self) -> Iterator[str]:
        for position, (owner, key) in enumerate(zip(self.owners, self._keys, strict=True)):
            before = self._before[position]
            try:
                now = self._read(owner, key)
            except _READ_ERRORS:
                yield self._names[position]
                continue
            if len(now) != len(before):
                yield self._names[position]
                continue
            changed = next((n for n, pair in enumerate(zip(now, before, strict=True)) if _differ(*pair)), None)
            if changed is None:
                self._before[position] = now
            else:
                yield self._name_of(position, changed)

    def _name_of(self, position: int, changed: int) -> str:
        name, owner = self._names[position], self.owners[position]
        if not self._has_items:
            return name
        if isinstance(owner, dict):
            return item_name(name, list(owner)[changed % len(owner)])
        return f"{name}[{changed}]" if isinstance(owner, list) else name


def item_name(name: str, key: object) -> str:
    """The name of an item of a dict. The names of the tables of modules end with a dot."""
    if name.endswith("."):
        return f"{name}{key}"
    return f"{name}[{key!r}]" if isinstance(key, str | int | bytes | None) else f"{name}[...]"


def _differ(now: Any, before: Any) -> bool:
    return now is not before and not same_constant(now, before)


def _pointers(values: Iterator[Any], count: int) -> bytes:
    """The addresses of `count` objects, one after another; empty if there are more."""
    found = np.fromiter(values, object, count)
    return found.tobytes() if next(values, MISSING) is MISSING else b""


def _read_items(containers: Sequence[Any], _: Sequence[Any]) -> Iterator[Any]:
    return chain.from_iterable(containers)


def _read_values(dicts: Sequence[Any], _: Sequence[Any]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dicts))


def _read_last_keys(dicts: Sequence[Any], _: Sequence[Any]) -> Iterator[Any]:
    return map(next, map(reversed, dicts))


def _read_entries(owners: Sequence[Any], keys: Sequence[Any]) -> Iterator[Any]:
    return map(getitem, owners, keys)


def _read_attributes(values: Sequence[Any], names: Sequence[Any]) -> Iterator[Any]:
    return map(getattr, values, names, repeat(MISSING))


class Reading:
    """Gives the result of `read` as the attribute `value`, so that it is compared as other attributes are."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    @property
    def value(self) -> Any:
        return self._read()


def is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is MISSING
    except ValueError:
        return True


def content_of(value: Any) -> Any:
    """The content of an array."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return bytes(value)
