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


def hides_attributes(kind: type) -> bool:
    """Whether instances have attributes that `attributes_of` does not find: the class has a `__dict__` of its own."""
    has_table = any(type(entries_of(base).get("__dict__")) in _DESCRIPTORS for base in bases_of(kind))
    return not has_table and _read_type_attribute(kind, "__dictoffset__") != 0


def slots_of(kind: type) -> dict[str, types.MemberDescriptorType]:
    """The slots that instances of a class have, by name; those of the class hide those of its bases."""
    bases = reversed(bases_of(kind))
    return {
        name: entry
        for base in bases
        for name, entry in entries_of(base).items()
        if type(entry) is types.MemberDescriptorType
    }


def is_read_by_getattr(kind: type, name: str, slot: types.MemberDescriptorType) -> bool:
    """Whether `getattr` reads this slot of an instance, and runs no code of the program."""
    if any("__getattribute__" in entries_of(base) for base in bases_of(kind) if base is not object):
        return False
    found = next(entries_of(base)[name] for base in bases_of(kind) if name in entries_of(base))
    return found is slot
