"""Rules of ops that pick parts of tensors or join tensors, and of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gt.client.shape_rules.shape_rule import Results, ShapeRule, are_row_major, has_shape, row_major, table
from gt.client.shape_rules.views import slice_sizes
from gt.client.storage import Geometry

_MAX_DIMS = 3  # dims of joined tensors: with more dims the memory format may be ambiguous


def _embedding(weight: Geometry, indices: Geometry, *_: Any) -> Results:
    if len(weight.shape) != 2 or not are_row_major(weight, indices):
        return None
    return [row_major((*indices.shape, weight.shape[1]))]


def _embedding_backward(gradient: Geometry, indices: Geometry, rows: int, *_: Any) -> Results:
    if not gradient.shape or gradient.shape[:-1] != indices.shape or not are_row_major(gradient, indices):
        return None
    return [row_major((rows, gradient.shape[-1]))]


def _gather(tensor: Geometry, dim: int, index: Geometry, **_: Any) -> Results:
    rank = len(tensor.shape)
    if not rank or rank != len(index.shape) or not -rank <= dim < rank or not are_row_major(tensor, index):
        return None
    pairs = enumerate(zip(tensor.shape, index.shape, strict=True))
    return [row_major(index.shape)] if all(at == dim % rank or size >= own for at, (size, own) in pairs) else None


def _index_select(tensor: Geometry, dim: int, index: Geometry) -> Results:
    rank = len(tensor.shape)
    if len(index.shape) != 1 or not -rank <= dim < rank or not are_row_major(tensor, index):
        return None
    return [row_major([index.shape[0] if at == dim % rank else size for at, size in enumerate(tensor.shape)])]


def _cat(tensors: Sequence[Geometry], dim: int = 0) -> Results:
    rank = len(tensors[0].shape)
    if not 0 < rank <= _MAX_DIMS or not -rank <= dim < rank or not are_row_major(*tensors):
        return None
    at = dim % rank
    others = {(*tensor.shape[:at], *tensor.shape[at + 1 :]) for tensor in tensors}
    if len(others) > 1 or any(len(tensor.shape) != rank for tensor in tensors):
        return None
    length = sum(tensor.shape[at] for tensor in tensors)
    return [row_major((*tensors[0].shape[:at], length, *tensors[0].shape[at + 1 :]))]


def _stack(tensors: Sequence[Geometry], dim: int = 0) -> Results:
    shape, rank = tensors[0].shape, len(tensors[0].shape) + 1
    if rank > _MAX_DIMS or not -rank <= dim < rank or not are_row_major(*tensors):
        return None
    if any(tensor.shape != shape for tensor in tensors):
        return None
    return [row_major((*shape[: dim % rank], len(tensors), *shape[dim % rank :]))]


def _slice_backward(gradient: Geometry, size: Sequence[int], dim: int, start: int, end: int, step: int) -> Results:
    found = slice_sizes(size, dim, start, end, step)
    if found is None or 0 in size or not are_row_major(gradient):
        return None
    return [row_major(size)] if has_shape(gradient, found[0]) else None


def _select_backward(gradient: Geometry, size: Sequence[int], dim: int, index: int) -> Results:
    rank = len(size)
    if not -rank <= dim < rank or not -size[dim] <= index < size[dim] or not are_row_major(gradient):
        return None
    rest = [count for at, count in enumerate(size) if at != dim % rank]
    return [row_major(size)] if has_shape(gradient, rest) else None


INDEXING = table(
    (ShapeRule(_embedding), ("embedding.default",)),
    (ShapeRule(_embedding_backward), ("embedding_dense_backward.default",)),
    (ShapeRule(_gather), ("gather.default",)),
    (ShapeRule(_index_select), ("index_select.default",)),
    (ShapeRule(_cat), ("cat.default",)),
    (ShapeRule(_stack), ("stack.default",)),
    (ShapeRule(_slice_backward, takes_sizes=True), ("slice_backward.default",)),
    (ShapeRule(_select_backward, takes_sizes=True), ("select_backward.default",)),
)
