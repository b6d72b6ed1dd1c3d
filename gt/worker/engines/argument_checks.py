"""Checks of arguments: what must hold for them, and what is used instead of them. `checked_ops.py` is the table.

Checks of shapes and memory are words: lines, divided by semicolons, about arguments by their names. Missing ones match.

    input: batch size ...       a shape: the same name is the same size, `_` any size, `...` any dims at the end
    weight bias: size           of several tensors; the name of an integer argument is its value
    same shape: self out        of tensors, or of lists of them item by item
    same dtype: self out        of tensors and of all in lists; `same length` is of lists
    compact: weight bias        copies, in the same memory format, in place of tensors with gaps or overlaps
    contiguous: weight bias     row-major copies; `unit stride` are those whose last dim must have stride 1

The others are functions of arguments, and of sizes that earlier lines have found, by their names; what an overload does
not have is None.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from gt.core.meta import memory_span
from gt.worker.engines.op_family_checks import compact, contiguous, forward_shape, listed, with_unit_stride

NamedArguments: TypeAlias = dict[str, Any]
Check: TypeAlias = Callable[[NamedArguments], None]
"""Raises IndexError or ValueError for arguments that do not fit. It may replace some, and add sizes."""
Function: TypeAlias = Callable[..., Any]


def parse_checks(words: str) -> list[Check]:
    checks = []
    for line in words.split(";"):
        kind, _, rest = line.strip().partition(": ")
        checks.append(_OF_NAMES[kind](rest.split()) if kind in _OF_NAMES else _shapes(kind.split(), rest.split()))
    return checks


class _Call:
    """A function of arguments: by the names of its parameters, or by those that are given."""

    def __init__(self, function: Function, names: str = "") -> None:
        self.names = names.split() or list(inspect.signature(function).parameters)
        self._function = function

    def __call__(self, given: NamedArguments) -> Any:
        return self._function(*[given.get(name) for name in self.names])


def rule(holds: Function, why: str = "they do not fit", names: str = "") -> Check:
    """Arguments for which a function is true."""
    call = _Call(holds, names)

    def check(given: NamedArguments) -> None:
        if not call(given):
            raise ValueError(f"{', '.join([f'{name} {_describe(given.get(name))}' for name in call.names])}: {why}")

    return check


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"has shape {list(value.shape)}"
    return f"has {len(value)} tensors" if isinstance(value, list) and listed(value) else f"is {value}"


def put(name: str, value: Function, names: str = "") -> Check:
    """A value to use instead of an argument, or in the checks that follow."""
    call = _Call(value, names)
    return lambda given: given.update({name: call(given)})


def in_range(values: str | Function, bound: Function, lowest: int = 0, names: str = "") -> Check:
    """Numbers, which are an argument or are made of it, that are at least `lowest` and below a bound."""
    read = _Call(lambda value: value, values) if isinstance(values, str) else _Call(values)
    end = _Call(bound, names)

    def check(given: NamedArguments) -> None:
        found, stop = read(given), end(given)
        if isinstance(found, torch.Tensor):
            found = torch.stack(found.aminmax()).tolist() if found.numel() else []
        numbers = [int(number) for number in ([found] if isinstance(found, int) else found or ())]
        if numbers and not lowest <= min(numbers) <= max(numbers) < stop:
            raise IndexError(
                f"{read.names[0]} has values from {min(numbers)} to {max(numbers)}, out of range: they must be from "
                f"{lowest} to {stop - 1}"
            )

    return check


def has_shape(tensors: str, shape: Function, names: str = "") -> Check:
    """Tensors of a shape that other arguments decide. Missing ones match."""
    call = _Call(shape, names)

    def check(given: NamedArguments) -> None:
        expected = list(call(given))
        for name in tensors.split():
            if given.get(name) is not None and list(given[name].shape) != expected:
                raise ValueError(
                    f"{name} has shape {list(given[name].shape)}, but must have {expected}, which follows from "
                    f"{', '.join(call.names)}"
                )

    return check


def shape_of(op: str, arguments: str, tensor: str) -> Check:
    """A tensor of the shape that torch's shape function gives for the op of these arguments."""
    return has_shape(tensor, functools.partial(forward_shape, op), arguments)


def _shapes(names: Sequence[str], dims: Sequence[str]) -> Check:
    named = [dim for dim in dims if dim != "..."]

    def fits(shape: torch.Size, given: NamedArguments) -> bool:
        if len(shape) != len(dims) and (dims == named or len(shape) < len(named)):
            return False
        for dim, size in zip(named, shape, strict=False):
            if given.get(dim) is None and dim != "_":
                given[dim] = size
            if given.get(dim, size) != size:
                return False
        return True

    def check(given: NamedArguments) -> None:
        for name in names:
            if given.get(name) is not None and not fits(given[name].shape, given):
                sizes = [f"{dim} is {given[dim]}" for dim in named if given.get(dim) is not None]
                raise ValueError(
                    f"{name} has shape {list(given[name].shape)}, which does not fit ({', '.join(dims)}) "
                    f"where {', '.join(sizes)}"
                )

    return check


def _same_shape(names: Sequence[str]) -> Check:
    def check(given: NamedArguments) -> None:
        found = [(name, [list(tensor.shape) for tensor in listed(given.get(name))]) for name in names]
        present = [(name, shapes) for name, shapes in found if shapes]
        for name, shapes in present[1:]:
            if shapes != present[0][1]:
                first, expected = present[0]
                raise ValueError(
                    f"{name} has shapes {', '.join(map(str, shapes))}, but {first} has shapes "
                    f"{', '.join(map(str, expected))}; they must be the same"
                )

    return check


def _same_length(names: Sequence[str]) -> Check:
    def check(given: NamedArguments) -> None:
        lengths = {name: len(given[name]) for name in names if given.get(name) is not None}
        if len({*lengths.values()}) > 1:
            raise ValueError(f"lists have different lengths: {lengths}")

    return check


def _same_dtype(names: Sequence[str]) -> Check:
    def check(given: NamedArguments) -> None:
        found = {tensor.dtype: name for name in names for tensor in listed(given.get(name))}
        if len(found) > 1:
            raise ValueError(f"{', '.join(found.values())} are of {', '.join(map(str, found))}; they must be the same")

    return check


def no_overlap(written: Sequence[str]) -> Check:
    """For kernels that write to a given tensor: each element has its own memory."""

    def check(given: NamedArguments) -> None:
        for name in written:
            for tensor in listed(given.get(name)):
                if memory_span(tensor.shape, tensor.stride()) < tensor.numel():
                    raise ValueError(
                        f"argument {name} of strides {tensor.stride()} has several elements at one address of memory, "
                        f"so it cannot be written to; clone() it first"
                    )

    return check


def _each_replaced(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Sequence[str]], Check]:
    return lambda names: lambda given: given.update({
        name: function(given[name]) for name in names if given.get(name) is not None
    })  # fmt: skip


_OF_NAMES: dict[str, Callable[[Sequence[str]], Check]] = {
    "same shape": _same_shape,
    "same dtype": _same_dtype,
    "same length": _same_length,
    "compact": _each_replaced(compact),
    "contiguous": _each_replaced(contiguous),
    "unit stride": _each_replaced(with_unit_stride),
}
