"""Layouts by name as layouts by pattern: the layers of a model have the same names but for their numbers."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Mapping
from typing import TypeVar

Layout = TypeVar("Layout")


def as_patterns(layouts: Mapping[str, Layout], names: Collection[str]) -> dict[str, Layout]:
    """Patterns of `fnmatch` that give some of all `names` their layouts, and match no other name. Names that differ in
    numbers alone share a pattern if they have one layout."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(without_numbers(name), []).append(name)
    found: dict[str, Layout] = {}
    for pattern, members in groups.items():
        own = [layouts.get(name) for name in members]
        is_one = len(members) > 1 and own[0] is not None and all(layout == own[0] for layout in own)
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)] if is_one else []
        if is_one and sorted(matched) == sorted(members):
            found[pattern] = own[0]  # type: ignore[assignment]
        else:
            found.update({_escaped(name): layouts[name] for name in members if name in layouts})
    return found


def without_numbers(name: str) -> str:
    """A name with `*` in place of each number."""
    return ".".join("*" if re.fullmatch(r"\d+", part) else _escaped(part) for part in name.split("."))


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
