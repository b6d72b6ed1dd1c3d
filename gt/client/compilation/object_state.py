"""The content of an object among the arguments of a call, to notice that a call has changed it.

Modules and optimizers are watched by `watched_state.py`, and so are attributes of the program's own objects that its
code names. This is for the others: arrays, sets, generators of random numbers, iterators, objects of the standard
library.
"""

from __future__ import annotations

import pickle
import random
import sys
import types
from collections import UserDict, UserList
from hashlib import blake2b
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from gt.client.compilation.static_reads import attributes_of, bases_of, entries_of, is_instance, module_of

_WITH_CONTENT = (random.Random, UserDict, UserList)
_ELSEWHERE = (torch.Tensor, torch.nn.Module, Optimizer, type, types.FunctionType, types.MethodType, types.ModuleType)


class ObjectState:
    """The state of an object before a call. `is_changed` compares it with the state after the call."""

    def __init__(self, value: object) -> None:
        self._value = value
        self._before = self._read()

    def _read(self) -> Any:
        value = self._value
        if is_instance(value, _ELSEWHERE):
            return None
        if isinstance(value, torch.Generator):
            return value.get_state().tolist()
        attributes = attributes_of(value)
        if type(attributes) is not dict or _is_of_standard_library(value):
            return digest(value)
        return list(map(_described, attributes.items()))

    def is_changed(self) -> bool:
        return bool(self._read() != self._before)

    def is_unknown(self) -> bool:
        """Whether a call may have changed the object unseen: an iterator that cannot be compared."""
        is_iterator = any("__next__" in entries_of(base) for base in bases_of(type(self._value)))
        return self._before is None and is_iterator


def _is_of_standard_library(value: object) -> bool:
    package = module_of(type(value)).partition(".")[0]
    return package in sys.stdlib_module_names or is_instance(value, _WITH_CONTENT)


def digest(value: object) -> bytes | None:
    """A hash of the content of an object, without that of tensors and modules in it; None if it has none."""
    sink = _Sink()
    try:
        _Pickler(sink, protocol=5).dump(value)
    except Exception:  # of the object's own code: it cannot be pickled
        return None
    return sink.digest()


class _Sink:
    """A file that keeps the hash of its content only."""

    def __init__(self) -> None:
        hashed = blake2b(digest_size=16)
        self.write = hashed.update
        self.digest = hashed.digest


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> str | None:
        return str(id(value)) if is_instance(value, _ELSEWHERE) else None


def _described(item: tuple[str, object]) -> Any:
    """An attribute: a number by value, any other object by identity."""
    name, value = item
    return name, (type(value), repr(value)) if is_instance(value, (int, float, str, bool)) else id(value)
