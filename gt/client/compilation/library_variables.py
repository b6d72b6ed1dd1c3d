"""Variables and functions of libraries to which dotted names in code lead."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, NamedTuple

from gt.client.compilation.known_types import is_library
from gt.client.compilation.static_reads import attributes_of, bases_of, entries_of, is_instance, module_of

_MISSING = object()
_SETTINGS = "torch.backends"  # a package whose objects have settings as attributes, as modules have variables


class LibraryVariable(NamedTuple):
    """A variable, function or class of a library: the attribute of a module or a class, and its value."""

    name: str
    owner: object
    attribute: str
    value: object


def find_variable(root: object, names: Sequence[str]) -> LibraryVariable | None:
    """The last variable of a library that a dotted name leads to. `names[0]` is the name of `root`. Modules that are
    not loaded yet stay so."""
    found, owner = None, root
    for depth, attribute in enumerate(names[1:], 1):
        value = _attribute(owner, attribute)
        if value is _MISSING:
            break
        if is_library(_module_name(owner)):
            found = LibraryVariable(".".join(names[: depth + 1]), owner, attribute, value)
        owner = value
    return found


def _attribute(owner: Any, name: str) -> Any:
    """An attribute of a module or of a library's class."""
    kind = type(owner)
    if is_instance(owner, types.ModuleType):
        table = attributes_of(owner) or {}
        if name in table:
            return table[name]
        is_property = any(name in entries_of(base) for base in bases_of(kind))
        return getattr(owner, name, _MISSING) if is_property else _MISSING
    if is_instance(owner, type) and is_library(module_of(owner)):
        return getattr(owner, name, _MISSING)
    return getattr(owner, name, _MISSING) if module_of(kind).startswith(_SETTINGS) else _MISSING


def _module_name(owner: Any) -> str | None:
    if is_instance(owner, types.ModuleType):
        name = (attributes_of(owner) or {}).get("__name__")
        return name if type(name) is str else ""
    return module_of(owner if is_instance(owner, type) else type(owner))
