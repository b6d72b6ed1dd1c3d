"""Reads of objects of the program that run none of its code: no `__getattribute__`, `__class__` or property of it.

An object may answer any name, as proxies and mocks do, so that `isinstance` and `getattr` tell nothing about it.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_read_type_attribute = type.__getattribute__


def is_instance(value: object, kinds: Any) -> bool:
    """Whether the type of an object is one of `kinds`, or derived from one, whatever its `__class__` says."""
    return issubclass(type(value), kinds)


def bases_of(kind: type) -> tuple[type, ...]:
    """A class and its bases, in the order in which attributes are looked up."""
    return _read_type_attribute(kind, "__mro__")  # type: ignore[no-any-return]


def entries_of(kind: type) -> Mapping[str, Any]:
    """The attributes that a class itself has, without those of its bases."""
    return _read_type_attribute(kind, "__dict__")  # type: ignore[no-any-return]


def module_of(kind: type) -> str:
    """The name of the module of a class; empty if the class has something else than a text in its place."""
    module = _read_type_attribute(kind, "__module__")
    return module if type(module) is str else ""


def attributes_of(value: object) -> dict[str, Any] | None:
    """The attributes that an object itself has; None if it has no place for them."""
    for base in bases_of(type(value)):
        entry = entries_of(base).get("__dict__")
        if isinstance(entry, _DESCRIPTORS):
            found = entry.__get__(value)
            return found if isinstance(found, dict) else None
    return None
