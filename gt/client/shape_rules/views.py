"""Rules of views: their shapes, strides and offsets in the storage of the viewed tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gt.client.shape_rules.shape_rule import Results, ShapeRule, Strided, are_row_major, dims_of, row_major, table
from gt.client.storage import Geometry
from gt.client.torch_strides import Ints
from gt.core.meta import contiguous_strides


def _view(tensor: Geometry, size: Sequence[int]) -> Results:
    shape = _view_sizes(tensor.shape, size)
    if shape is None:
        return None
    if tensor.stride == tensor.row_major:
        return [Strided(shape, contiguous_strides(shape), tensor.offset)]
    stride = view_strides(tuple(tensor.shape), tensor.stride, shape)
    return None if stride is None else [Strided(shape, stride, tensor.offset)]


def _unsafe_view(tensor: Geometry, size: Sequence[int]) -> Results:
    shape = _view_sizes(tensor.shape, size)
    return None if shape is None or not are_row_major(tensor) else [row_major(shape)]


def _view_sizes(shape: Sequence[int], size: Sequence[int]) -> Ints | None:
    """The sizes of a view, with the right number in place of -1; None for an empty tensor, or if they do not fit."""
    count, known = math.prod(shape), math.prod([number for number in size if number != -1])
    if count == 0 or known <= 0 or list(size).count(-1) > 1 or min(size, default=1) < -1 or count % known:
        return None
    found = tuple([count // known if number == -1 else number for number in size])
    return found if math.prod(found) == count else None


def view_strides(shape: Ints, stride: Ints, new: Ints) -> Ints | None:
    """The strides of `tensor.view(new)`, for a tensor that is not empty; None if no view has this shape. Follows
    `computeStride` of torch's C++."""
    if not shape:
        return (1,) * len(new)
    strides = [0] * len(new)
    at, step, old_count, new_count = len(new) - 1, stride[-1], 1, 1
    for dim in reversed(range(len(shape))):
        old_count *= shape[dim]
        if dim and (shape[dim - 1] == 1 or stride[dim - 1] == old_count * step):
            continue  # the next dim continues this one in memory
        while at >= 0 and (new_count < old_count or new[at] == 1):
            strides[at] = new_count * step
            new_count *= new[at]
            at -= 1
        if new_count != old_count:
            return None
        step, old_count, new_count = stride[dim - 1], 1, 1
    return tuple(strides) if at < 0 else None


def _transpose(tensor: Geometry, first: int = 0, second: int = 1) -> Results:
    rank = len(tensor.shape)
    if not (-rank <= first < rank and -rank <= second < rank):
        return None
    order = list(range(rank))
    order[first], order[second] = order[second], order[first]
    return _permute(tensor, order)


def _t(tensor: Geometry) -> Results:
    return _transpose(tensor) if len(tensor.shape) == 2 else None


def _permute(tensor: Geometry, order: Sequence[int]) -> Results:
    rank = len(tensor.shape)
    if sorted([dim % rank for dim in order if -rank <= dim < rank]) != list(range(rank)) or len(order) != rank:
        return None
    shape, stride = tensor.shape, tensor.stride
    return [Strided(tuple([shape[dim] for dim in order]), tuple([stride[dim] for dim in order]), tensor.offset)]


def _unsqueeze(tensor: Geometry, dim: int) -> Results:
    rank = len(tensor.shape)
    if not -rank - 1 <= dim <= rank:
        return None
    at, shape, stride = dim % (rank + 1), tuple(tensor.shape), tensor.stride
    step = 1 if at == rank else shape[at] * stride[at]
    return [Strided((*shape[:at], 1, *shape[at:]), (*stride[:at], step, *stride[at:]), tensor.offset)]


def _squeeze(tensor: Geometry, dims: int | Sequence[int] | None = None) -> Results:
    found = None if dims in ([], ()) else dims_of(dims, len(tensor.shape))
    if found is None:
        return None
    kept = [dim for dim, size in enumerate(tensor.shape) if size != 1 or dim not in found]
    shape, stride = tensor.shape, tensor.stride
    return [Strided(tuple([shape[dim] for dim in kept]), tuple([stride[dim] for dim in kept]), tensor.offset)]


def _expand(tensor: Geometry, size: Sequence[int], *, implicit: bool = False) -> Results:
    new = len(size) - len(tensor.shape)
    if new < 0:
        return None
    shape, stride = [0] * len(size), [0] * len(size)
    for dim in reversed(range(len(size))):
        own, wanted = tensor.shape[dim - new] if dim >= new else 1, size[dim]
        if dim >= new:
            step = tensor.stride[dim - new]
        else:
            step = shape[dim + 1] * stride[dim + 1] if dim + 1 < len(size) else 1
        if wanted == -1 and dim >= new:
            wanted = own
        if wanted < 0 or own not in (1, wanted):
            return None
        shape[dim], stride[dim] = wanted, step if wanted == own else 0
    if not tensor.shape:
        stride = [0] * len(size)
    return [Strided(tuple(shape), tuple(stride), tensor.offset)]


def _slice(tensor: Geometry, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Results:
    found = slice_sizes(tensor.shape, dim, start, end, step)
    if found is None:
        return None
    shape, first = found
    at = dim % len(shape)
    stride = tuple([own * step if number == at else own for number, own in enumerate(tensor.stride)])
    return [Strided(shape, stride, tensor.offset + first * tensor.stride[at])]


def slice_sizes(
    shape: Sequence[int], dim: int, start: int | None, end: int | None, step: int
) -> tuple[Ints, int] | None:
    """The shape of a slice, and its start along the dim; None for arguments that torch refuses."""
    rank = len(shape)
    if not -rank <= dim < rank or step <= 0:
        return None
    size = shape[dim]
    first = 0 if start is None else start + size if start < 0 else start
    last = size if end is None else end + size if end < 0 else end
    first = min(max(first, 0), size)
    last = min(max(last, first), size)
    count = (last - first + step - 1) // step
    return tuple([count if at == dim % rank else own for at, own in enumerate(shape)]), first


def _select(tensor: Geometry, dim: int, index: int) -> Results:
    rank = len(tensor.shape)
    if not -rank <= dim < rank or not -tensor.shape[dim] <= index < tensor.shape[dim]:
        return None
    return [_select_at(tensor, dim % rank, index % tensor.shape[dim])]


def _select_at(tensor: Geometry, at: int, index: int) -> Strided:
    shape, stride = tuple(tensor.shape), tensor.stride
    offset = tensor.offset + index * stride[at]
    return Strided((*shape[:at], *shape[at + 1 :]), (*stride[:at], *stride[at + 1 :]), offset)


def _unbind(tensor: Geometry, dim: int = 0) -> Results:
    rank = len(tensor.shape)
    if not -rank <= dim < rank or not tensor.shape[dim]:
        return None
    return [_select_at(tensor, dim % rank, index) for index in range(tensor.shape[dim])]


def _split(tensor: Geometry, size: int, dim: int = 0) -> Results:
    rank = len(tensor.shape)
    if not -rank <= dim < rank or size <= 0 or not tensor.shape[dim]:
        return None
    length = tensor.shape[dim]
    return _split_with_sizes(tensor, [min(size, length - start) for start in range(0, length, size)], dim)


def _split_with_sizes(tensor: Geometry, sizes: Sequence[int], dim: int = 0) -> Results:
    rank = len(tensor.shape)
    if not -rank <= dim < rank or min(sizes, default=-1) < 0 or sum(sizes) != tensor.shape[dim]:
        return None
    at, first, parts = dim % rank, 0, []
    for size in sizes:
        shape = (*tensor.shape[:at], size, *tensor.shape[at + 1 :])
        parts.append(Strided(shape, tensor.stride, tensor.offset + first * tensor.stride[at]))
        first += size
    return parts


def _alias(tensor: Geometry) -> Results:
    return [Strided(tuple(tensor.shape), tensor.stride, tensor.offset)]


VIEWS = table(
    (ShapeRule(_view, takes_sizes=True), ("view.default",)),
    (ShapeRule(_unsafe_view, takes_sizes=True), ("_unsafe_view.default",)),
    (ShapeRule(_expand, takes_sizes=True), ("expand.default",)),
    (ShapeRule(_slice, takes_sizes=True), ("slice.Tensor",)),
    (ShapeRule(_select, takes_sizes=True), ("select.int",)),
    (ShapeRule(_split, takes_sizes=True), ("split.Tensor",)),
    (ShapeRule(_split_with_sizes, takes_sizes=True), ("split_with_sizes.default",)),
    (ShapeRule(_unbind), ("unbind.int",)),
    (ShapeRule(_transpose), ("transpose.int",)),
    (ShapeRule(_t), ("t.default",)),
    (ShapeRule(_permute), ("permute.default",)),
    (ShapeRule(_unsqueeze), ("unsqueeze.default",)),
    (ShapeRule(_squeeze), ("squeeze.default", "squeeze.dim", "squeeze.dims")),
    (ShapeRule(_alias), ("alias.default",)),
)
