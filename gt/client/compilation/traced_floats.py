"""Floats that remember how they were computed from the arguments of a call.

While `gt.compile` records a call, its float arguments are TracedFloats: arithmetic gives other TracedFloats, and a
comparison, a conversion or a hash, on which the code may branch, pins the arguments that the float comes from: the
recording then holds for their values only. A scalar of an op that changes from call to call is looked up among the
traced floats.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Expression: TypeAlias = Callable[[Sequence[float]], Any]


class FloatTrace:
    """The traced floats of one call, in the order in which they were made: first its float arguments. `pinned` are the
    positions of arguments that the code has compared or converted."""

    def __init__(self, arguments: Sequence[float]) -> None:
        self.arguments = tuple(arguments)
        self.pinned: set[int] = set()
        self.values: list[float] = []
        self.expressions: list[Expression] = []
        self.traced = [
            self.add(value, operator.itemgetter(position), frozenset([position]))
            for position, value in enumerate(arguments)
        ]

    def add(self, value: float, expression: Expression, roots: frozenset[int]) -> TracedFloat:
        self.values.append(value)
        self.expressions.append(expression)
        traced = TracedFloat(value)
        traced.trace, traced.expression, traced.roots = self, expression, roots
        return traced


class TracedFloat(float):
    """A float that notes in a FloatTrace how it was computed, and which arguments its value pins."""

    __slots__ = ("expression", "roots", "trace")
    trace: FloatTrace
    expression: Expression
    roots: frozenset[int]

    def pin(self) -> float:
        """The same float, untraced. The recording holds only for the values of the arguments that it comes from."""
        self.trace.pinned |= self.roots
        return float.__neg__(float.__neg__(self))

    def __reduce__(self) -> Any:
        return float, (self.pin(),)


def _expression_of(value: Any) -> Expression:
    return value.expression if isinstance(value, TracedFloat) else lambda _: value


def _arithmetic(name: str) -> Callable[..., Any]:
    """The method of an operator: it traces the result if this is a float."""
    compute = getattr(float, name)

    def method(self: TracedFloat, *others: Any) -> Any:
        value = compute(self, *others)
        if type(value) is not float:  # NotImplemented: the other operand is a tensor, for example
            return value
        own, rest = self.expression, [_expression_of(other) for other in others]
        roots = self.roots.union(*[other.roots for other in others if isinstance(other, TracedFloat)])
        return self.trace.add(value, lambda given: compute(own(given), *[each(given) for each in rest]), roots)

    return method


def _pinning(name: str) -> Callable[..., Any]:
    """The method of an operator whose result the code may branch on: it pins the float's arguments."""

    compute = getattr(float, name)

    def method(self: TracedFloat, *others: Any) -> Any:
        self.pin()
        return compute(self, *others)

    return method


_ARITHMETIC = "add radd sub rsub mul rmul truediv rtruediv pow rpow floordiv rfloordiv mod rmod neg pos abs"
_PINNING = "eq ne lt le gt ge bool int hash trunc floor ceil round divmod rdivmod str repr format"
for _name in _ARITHMETIC.split():
    setattr(TracedFloat, f"__{_name}__", _arithmetic(f"__{_name}__"))
for _name in [*[f"__{name}__" for name in _PINNING.split()], "is_integer", "hex", "as_integer_ratio"]:
    setattr(TracedFloat, _name, _pinning(_name))
