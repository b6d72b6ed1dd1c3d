"""The recordings of one compiled function: a table of specializations, those of an object with the object.

A recording refers to the objects that the function uses. Recordings for a method's instance, a module or an optimizer
among the arguments are kept in that object, so that they go with it and do not keep it alive.
"""

from __future__ import annotations

import gc
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import Optimizer

from gt.client.compilation.call_arguments import CallArguments
from gt.client.compilation.specialization import Specialization
from gt.client.compilation.static_reads import attributes_of, is_instance

MAX_SPECIALIZATIONS = 32  # kinds of arguments for which one function is recorded
_ATTRIBUTE = "_gt_recordings"


class Recordings(dict[tuple[Any, ...], Specialization]):
    """Specializations by the keys of arguments. Has weak references, which a dict has not."""

    __slots__ = ("__weakref__",)
    __hash__ = object.__hash__  # type: ignore[assignment]


class ObjectRecordings:
    """The recordings of all functions that an object has. A copy of the object, or a pickled one, has none."""

    def __init__(self) -> None:
        self.by_table: WeakKeyDictionary[SpecializationTable, Recordings] = WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> ObjectRecordings:
        return ObjectRecordings()

    def __copy__(self) -> ObjectRecordings:
        return ObjectRecordings()

    def __reduce__(self) -> Any:
        return ObjectRecordings, ()


class SpecializationTable:
    """The specializations of a function. `check_every` as in `gt.compile`."""

    def __init__(self, check_every: int) -> None:
        self._check_every = check_every
        self._own = Recordings()
        self._all: WeakSet[Recordings] = WeakSet([self._own])
        self._refused = 0

    def __len__(self) -> int:
        return sum(map(len, self._all))

    def clear(self) -> None:
        for recordings in self._all:
            recordings.clear()

    def find(self, call: CallArguments) -> Specialization | None:
        """The specialization for a call, which is made if there is room for it."""
        recordings = self._recordings(call)
        found = recordings.get(call.key)
        if found is None and self._has_room():
            found = recordings[call.key] = Specialization(self._check_every)
        return found

    def _has_room(self) -> bool:
        """Whether the function may be recorded for another kind of arguments. Dead objects that are not collected yet
        are collected at times: that takes longer than most calls."""
        if len(self) < MAX_SPECIALIZATIONS:
            return True
        if self._refused % MAX_SPECIALIZATIONS == 0:
            gc.collect()
        self._refused += 1
        return len(self) < MAX_SPECIALIZATIONS

    def _recordings(self, call: CallArguments) -> Recordings:
        if not call.objects:
            return self._own
        keeper = self._keeper(call)
        if keeper is None:
            return self._own
        of_object = keeper.setdefault(_ATTRIBUTE, ObjectRecordings()).by_table
        if self not in of_object:
            of_object[self] = Recordings()
            self._all.add(of_object[self])
        return of_object[self]

    def _keeper(self, call: CallArguments) -> dict[str, Any] | None:
        """The attributes of the object that keeps the recordings for a call."""
        for _, value in call.objects:
            attributes = attributes_of(value)
            if attributes is not None and (value is call.instance or is_instance(value, (torch.nn.Module, Optimizer))):
                return attributes
        return None
