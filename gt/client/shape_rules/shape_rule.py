"""`ShapeRule`: computes the shapes and strides of an op's results; and the functions that rules share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from gt.client.storage import Geometry
from gt.client.torch_strides import Ints
from gt.core.meta import contiguous_strides


class Strided(NamedTuple):
    """The shape and strides of a result, and the offset of a view in its storage."""

    shape: Ints
    stride: Ints
    offset: int = 0


Results: TypeAlias = Sequence[Strided | None] | None
"""The results of an op, with None in place of a result that the op omits; None if the rule does not know them."""


class ShapeRule(NamedTuple):
    """A rule for an op. `apply` takes the arguments of a call, with geometries in place of tensors.

    With `takes_sizes` the rule holds for any integers among the constants of a call, such as the sizes of a view.
    Otherwise calls with other constants belong to another family (`rule_inference.py`)."""

    apply: Callable[..., Results]
    takes_sizes: bool = False


def table(*rows: tuple[ShapeRule, Sequence[str]]) -> dict[str, ShapeRule]:
    """Rules by the names of their aten overloads."""
    return {f"aten.{name}": rule for rule, names in rows for name in names}


def row_major(shape: Sequence[int]) -> Strided:
    """A row-major result."""
    shape = tuple(shape)
    return Strided(shape, contiguous_strides(shape))


def are_row_major(*tensors: Geometry | None) -> bool:
    """Whether tensors are row-major and not empty. An absent tensor counts as row-major."""
    return all(t is None or (t.stride == t.row_major and 0 not in t.shape) for t in tensors)


def has_shape(tensor: Geometry | None, shape: Sequence[int]) -> bool:
    """Whether a tensor has a shape. An absent tensor has any shape."""
    return tensor is None or tuple(tensor.shape) == tuple(shape)


def dims_of(dims: int | Sequence[int] | None, rank: int) -> set[int] | None:
    """The dims that an argument names, counted from 0: all dims if it names none, None if one is out of range."""
    given = [dims] if isinstance(dims, int) else list(dims or range(rank))
    found = {dim % rank for dim in given if rank and -rank <= dim < rank}
    return found if len(found) == len(given) else None
