"""The names in the code of a function: globals and attributes that it may read, modules that it imports."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

# Functions that read attributes whose names are not in the code, apart from `getattr` and the like.
_READ_ALL = {
    "vars", "dir", "__dict__", "asdict", "astuple", "attrgetter", "getmembers", "copy", "deepcopy", "replace",
    "__getattribute__", "__getstate__",
}  # fmt: skip
_READ_ONE = {"getattr", "setattr", "hasattr", "delattr"}
_LOADS = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_CONST")
SHOWING = frozenset(("__str__", "__repr__"))
_FORMATS = ("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE")
_ENDS = ("RAISE_VARARGS", "STORE", "RETURN", "JUMP", "POP", "FOR_ITER", "YIELD", "LIST", "SET", "MAP", "SEND")
_FORMAT_METHODS = {"format", "format_map"}
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")

# Special methods that run when an object is made, copied, shown or deleted, and not when a function computes with it;
# and descriptions of a class.
NOT_CALLED = {
    "__dataclass_fields__", "__dataclass_params__", "__orig_bases__", "__parameters__", "__type_params__",
    "__init__", "__new__", "__init_subclass__", "__repr__", "__str__", "__del__", "__reduce__", "__reduce_ex__",
    "__getstate__", "__setstate__", "__copy__", "__deepcopy__",
}  # fmt: skip


class NamesInCode(NamedTuple):
    """`words` are all names and texts in a code object and in those inside it, `globals` the variables of the module
    that it names, `imports` the modules that it imports, with their levels. `new_attributes` are those of the words
    that it only uses to set an attribute of its first argument. `reads_all`: it may read attributes whose names are not
    among the words."""

    words: frozenset[str]
    globals: frozenset[str]
    imports: frozenset[tuple[str, int]]
    new_attributes: frozenset[str]
    reads_all: bool


@functools.cache
def names_in(code: types.CodeType) -> NamesInCode:
    instructions = list(dis.get_instructions(code))
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    words = {*code.co_names, *_texts(code.co_consts), *_implied(code, instructions)}
    used = {each.argval for each in instructions if each.opname in _GLOBALS}
    imports = {
        (each.argval, instructions[n - 2].argval or 0)
        for n, each in enumerate(instructions)
        if each.opname == "IMPORT_NAME"
    }
    reads_all = not words.isdisjoint(_READ_ALL) or any(
        each.argval in _READ_ONE and not _is_literal(instructions[n + 1 :])
        for n, each in enumerate(instructions)
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
    return NamesInCode(
        frozenset(words).union(*[each.words for each in inner]),
        frozenset(used).union(*[each.globals for each in inner]),
        frozenset(imports).union(*[each.imports for each in inner]),
        _new_attributes(code, instructions).difference(*[each.words for each in inner]),
        reads_all or any(each.reads_all for each in inner),
    )


def _implied(code: types.CodeType, instructions: list[dis.Instruction]) -> Iterator[str]:
    """Special names that instructions use: of the texts of objects, and of the attributes in patterns of classes. Texts
    of errors do not count: the call does not go on."""
    has_format = any("%" in text for text in _texts(code.co_consts))
    for number, each in enumerate(instructions):
        is_operator = has_format and each.opname == "BINARY_OP" and each.argrepr in ("%", "%=")
        is_method = each.opname in ("LOAD_ATTR", "LOAD_METHOD") and each.argval in _FORMAT_METHODS
        if is_operator or is_method or each.opname in _FORMATS:
            yield from () if _is_for_error(instructions[number:]) else SHOWING
        elif each.opname == "MATCH_CLASS":
            yield "__match_args__"


def _is_for_error(following: list[dis.Instruction]) -> bool:
    """Whether an error is raised next, before anything else is done with a value."""
    ends = (each.opname for each in following if each.opname.startswith(_ENDS))
    return next(ends, "") == "RAISE_VARARGS"


def _new_attributes(code: types.CodeType, instructions: list[dis.Instruction]) -> frozenset[str]:
    first = code.co_varnames[:1]
    used: set[str] = set(_texts(code.co_consts))
    stored: set[str] = set()
    for before, each in zip([None, *instructions], instructions, strict=False):
        if each.opname == "STORE_ATTR" and before is not None and (before.argval,) == first:
            stored.add(each.argval)
        elif isinstance(each.argval, str):
            used.add(each.argval)
    return frozenset(stored - used)


def _texts(constants: tuple[object, ...]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from _texts(constant)


def _is_literal(following: list[dis.Instruction]) -> bool:
    """Whether the second argument of a call, whose arguments are loaded by the following instructions, is a text in
    the code: `getattr(model, "scale")`."""
    loaded = 0
    for each in following:
        if each.opname in ("LOAD_ATTR", "PUSH_NULL", "CACHE"):
            continue
        if each.opname not in _LOADS:
            return False
        loaded += 1
        if loaded == 2:
            return each.opname == "LOAD_CONST" and isinstance(each.argval, str)
    return False


def absolute_name(module: str, level: int, variables: dict[str, Any]) -> str:
    """The full name of a module that a function with these globals imports."""
    if not level:
        return module
    package = variables.get("__package__") or variables.get("__name__", "").rpartition(".")[0]
    parent = package.rsplit(".", level - 1)[0]
    return f"{parent}.{module}" if module else parent


def is_implicit(name: str, is_class: bool) -> bool:
    """Whether an entry of a class, or else an attribute of an object or a module, may be called without being named.
    Python calls the special methods of classes, and of modules `__getattr__` only."""
    if is_class and name.startswith("__"):
        return name not in NOT_CALLED
    return name in ("forward", "__getattr__")
