"""Objects that only refer to others, such as bound methods: the objects behind them."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gt.client.compilation.static_reads import entries_of, is_instance, module_of

_LRU_CACHE: Any = type(functools.lru_cache(len))
_DESCRIPTORS = (staticmethod, classmethod, property)
_EMPTY: dict[str, Any] = {}
_VIEWS: Any = (types.MappingProxyType, type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))


def referred_objects(value: Any) -> Sequence[object] | None:
    """The objects behind an object that has no other state, or None. The results that an `lru_cache` holds are among
    those behind it."""
    for kinds, read in _REFERRING:
        if is_instance(value, kinds):
            return read(value)
    return None


def methods_of(kind: type) -> Iterator[types.FunctionType]:
    """The functions of a class: its methods, those of its properties, and those that decorators have wrapped."""
    pending = [*entries_of(kind).values()]
    for value in pending:
        if is_instance(value, types.FunctionType):
            yield value
            pending.append(vars(value).get("__wrapped__"))
        elif is_instance(value, _DESCRIPTORS):
            pending.extend(referred_objects(value) or ())


def _owner(function: Any) -> Sequence[object]:
    """The object whose method a function written in C is."""
    owner = function.__self__
    is_trusted = is_instance(owner, (type, types.ModuleType)) or module_of(type(owner)).startswith(
        ("torch._C", "torch._ops")
    )
    return () if is_trusted else (owner,)


_REFERRING: tuple[tuple[Any, Callable[[Any], Sequence[object]]], ...] = (
    (types.MethodType, lambda value: (value.__self__, value.__func__)),
    (functools.partial, lambda value: (value.func, value.args, value.keywords, vars(value))),
    ((_LRU_CACHE, *_VIEWS), gc.get_referents),
    ((staticmethod, classmethod), lambda value: (value.__func__,)),
    (property, lambda value: (value.fget, value.fset)),
    ((types.BuiltinFunctionType, types.MethodWrapperType), _owner),
)
