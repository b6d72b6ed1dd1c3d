"""Direct calls: an op as one function of the tensors and then the scalars of a command.

Most ops take their tensors in order, perhaps some scalars and constants, and give one tensor. Their function, bound to
the constants, is called for every command without building lists of arguments and results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from gt.core.signatures import Arg, Input, ListArg, Scalar

DirectCall: TypeAlias = Callable[..., Any]


def is_in_order(args: Sequence[Arg], kwargs: Mapping[str, Arg], tensors: int, scalars: int) -> bool:
    """Whether the arguments of an op are the tensors of a command, in order, and then its scalars, in order."""
    return not kwargs and [_source(arg, tensors) for arg in args] == list(range(tensors + scalars))


def bind_arguments(
    function: Callable[..., Any],
    args: Sequence[Arg],
    kwargs: Mapping[str, Arg],
    tensors: int,
    scalars: int,
    literal: Callable[[Arg], Any],
) -> DirectCall | None:
    """The function of an op as a direct call for commands with `tensors` and `scalars` inputs, some of which may not be
    arguments of the op. None if a list among its arguments contains tensors or scalars."""
    if any(map(_is_mixed, (*args, *kwargs.values()))):
        return None
    sources = [_source(arg, tensors) for arg in args]
    named = {name: source for name, arg in kwargs.items() if (source := _source(arg, tensors)) is not None}
    constants = {name: literal(arg) for name, arg in kwargs.items() if name not in named}
    leading = sources.index(None) if None in sources else len(sources)
    rest = [literal(arg) if source is None else None for arg, source in zip(args, sources, strict=True)][leading:]
    if not named and sources == [*range(tensors + scalars), *[None] * len(rest)]:
        if not rest:
            return partial(function, **constants) if constants else function
        return lambda *given: function(*given, *rest, **constants)
    template = [literal(arg) if source is None else None for arg, source in zip(args, sources, strict=True)]
    places = [(place, source) for place, source in enumerate(sources) if source is not None]

    def call(*given: Any) -> Any:
        values = template.copy()
        for place, source in places:
            values[place] = given[source]
        return function(*values, **constants, **{name: given[source] for name, source in named.items()})

    return call


def _source(arg: Arg, tensors: int) -> int | None:
    """The position of an argument among the tensors and scalars of a command; None for a constant."""
    if isinstance(arg, Input):
        return arg.index
    return tensors + arg.index if isinstance(arg, Scalar) else None


def _is_mixed(arg: Arg) -> bool:
    """Whether an argument is a list that contains tensors or scalars."""
    return isinstance(arg, ListArg) and any(isinstance(item, Input | Scalar) or _is_mixed(item) for item in arg.values)
