"""Dotted names in the code of a function that begin with a variable: `torch.backends.mkldnn.enabled`.

Local variables that are assigned such a name, or a module that the function imports, stand for it.
"""

from __future__ import annotations

import dis
import functools
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple, TypeAlias

_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
_CELLS = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_LOCALS = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_STORES = ("STORE_FAST", "STORE_NAME", "STORE_DEREF")
_NEUTRAL = ("CACHE", "PUSH_NULL", "NOP", "SWAP", "POP_TOP", "EXTENDED_ARG")  # between a module and its names


class Root(Enum):
    """The place of the first name of a path."""

    GLOBAL = "global"
    FREE = "free"  # a variable of an enclosing function
    MODULE = "module"  # imported by the function; dots before its name tell the level


class AttributePath(NamedTuple):
    """A dotted name, and the line on which it is."""

    root: Root
    names: tuple[str, ...]
    line: int

    def __str__(self) -> str:
        return ".".join(self.names)


_Aliases: TypeAlias = dict[str, set[AttributePath]]


@functools.cache
def paths_in(code: types.CodeType) -> frozenset[AttributePath]:
    """The dotted names in a code object and in those inside it."""
    aliases: _Aliases = defaultdict(set)
    found = set(_scan(code, aliases))
    found.update(_scan(code, aliases))  # a loop uses a name before the line that assigns it
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(_from_inside(paths_in(constant), code.co_cellvars, aliases))
    return frozenset(found)


def _scan(code: types.CodeType, aliases: _Aliases) -> Iterator[AttributePath]:
    """The dotted names of one code object. `aliases` get the names that are assigned to its variables."""
    current: set[AttributePath] = set()
    module: set[AttributePath] = set()
    instructions = list(dis.get_instructions(code))
    for number, each in enumerate(instructions):
        name, line = each.argval, (each.positions and each.positions.lineno) or code.co_firstlineno
        if each.opname in _NEUTRAL:
            continue
        if each.opname in _ATTRIBUTES:
            current = set(_extended(current, name, line))
        elif each.opname == "IMPORT_NAME":
            level, members = instructions[number - 2].argval or 0, instructions[number - 1].argval
            first = name if members else name.partition(".")[0]
            current = module = {AttributePath(Root.MODULE, ("." * level + first,), line)}
        elif each.opname == "IMPORT_FROM":
            current = set(_extended(module, name, line))
        elif each.opname in _STORES:
            aliases[name] |= current
            current = set()
        elif each.opname in _GLOBALS:
            current = {AttributePath(Root.GLOBAL, (name,), line)}
        elif each.opname in _CELLS and name in code.co_freevars:
            current = {AttributePath(Root.FREE, (name,), line)}
        elif each.opname in (*_LOCALS, *_CELLS):
            current = set(aliases[name])
        else:
            current = set()
        yield from current


def _extended(paths: Iterable[AttributePath], name: str, line: int) -> Iterator[AttributePath]:
    return (AttributePath(path.root, (*path.names, name), line) for path in paths)


def _from_inside(paths: Iterable[AttributePath], cells: tuple[str, ...], aliases: _Aliases) -> Iterator[AttributePath]:
    """Paths of a code object for the one around it, which has the variables `cells`."""
    for path in paths:
        if path.root is not Root.FREE or path.names[0] not in cells:
            yield path
            continue
        for outer in aliases[path.names[0]]:
            yield AttributePath(outer.root, (*outer.names, *path.names[1:]), path.line)
