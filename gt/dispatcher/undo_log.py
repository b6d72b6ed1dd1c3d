"""Changes of dictionaries, sets, lists and attributes that can be taken back together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class UndoLog:
    """Makes changes and records the inverse of each. `commit` keeps the changes, `roll_back` takes them back, the last
    one first."""

    __slots__ = ("inverses",)

    def __init__(self) -> None:
        self.inverses: list[Callable[[], object]] = []

    def put(self, table: dict[K, V], key: K, value: V) -> None:
        if key in table:
            self.inverses.append(partial(table.__setitem__, key, table[key]))
        else:
            self.inverses.append(partial(table.pop, key))
        table[key] = value

    def drop(self, table: dict[K, V], key: K) -> V:
        value = table.pop(key)
        self.inverses.append(partial(table.__setitem__, key, value))
        return value

    def assign(self, record: object, name: str, value: Any) -> None:
        self.inverses.append(partial(setattr, record, name, getattr(record, name)))
        setattr(record, name, value)

    def add(self, members: set[V], new: Iterable[V]) -> None:
        added = set(new) - members
        self.inverses.append(partial(members.difference_update, added))
        members |= added

    def discard(self, members: set[V], old: Iterable[V]) -> None:
        removed = members.intersection(old)
        self.inverses.append(partial(members.update, removed))
        members -= removed

    def extend(self, items: list[V], new: Sequence[V]) -> None:
        self.inverses.append(partial(items.__delitem__, slice(len(items), None)))
        items += new

    def commit(self) -> None:
        self.inverses.clear()

    def roll_back(self) -> None:
        while self.inverses:
            self.inverses.pop()()
