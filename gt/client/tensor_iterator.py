"""Strides of results as torch's C++ gives them, from shapes and strides alone: of kernels that iterate over operands
(`TensorIterator`), and of views.

Torch's shape functions give the same, but need tensors and some hundred microseconds. Each function follows the C++
function that it names; tests compare them on random shapes and strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from gt.core.meta import contiguous_strides, is_dense

Ints: TypeAlias = tuple[int, ...]

_CHANNELS_LAST = (0, 2, 3, 1)  # dims of an image from the outermost to the innermost


def broadcast(shapes: Sequence[Ints]) -> Ints | None:
    """The shape to which all shapes expand, or None if there is none."""
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return tuple(first)
    rank = max(map(len, shapes))
    result = [1] * rank
    for shape in shapes:
        for dim, size in enumerate(shape, rank - len(shape)):
            if size == 1 or size == result[dim]:
                continue
            if result[dim] != 1:
                return None
            result[dim] = size
    return tuple(result)


def iterated_strides(shape: Ints, operands: Sequence[tuple[Ints, Ints]]) -> Ints:
    """The strides of a new result of `TensorIterator`, for the shapes and strides of its operands, none of which is
    empty: `fast_set_up`, else `reorder_dimensions` and `allocate_or_resize_outputs`."""
    if all(size == shape for size, _ in operands):
        if all(_is_contiguous(shape, stride, range(len(shape))) for _, stride in operands):
            return contiguous_strides(shape)
        if len(shape) == 4 and all(_is_contiguous(shape, stride, _CHANNELS_LAST) for _, stride in operands):
            return _strides_in_order(shape, _CHANNELS_LAST)
        first = operands[0][1]
        if all(stride == first for _, stride in operands) and is_dense(shape, first):
            return first
    order = _sorted_dims(shape, [_broadcast_strides(shape, *operand) for operand in operands])
    return _strides_in_order(shape, order[::-1])


def _is_contiguous(shape: Ints, stride: Ints, order: Sequence[int]) -> bool:
    """Whether the dims lie in memory in this order, the outermost first, without gaps. Strides of dims of one element
    do not count."""
    expected = 1
    for dim in reversed(order):
        if shape[dim] != 1:
            if stride[dim] != expected:
                return False
            expected *= shape[dim]
    return True


def _strides_in_order(shape: Ints, order: Sequence[int]) -> Ints:
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def _broadcast_strides(shape: Ints, own: Ints, stride: Ints) -> Ints:
    """The strides of an operand over the dims of the result: 0 where it is broadcast (`compute_strides`)."""
    offset = len(shape) - len(own)
    moved = [0 if size == 1 != shape[offset + dim] else stride[dim] for dim, size in enumerate(own)]
    return (0,) * offset + tuple(moved)


def _sorted_dims(shape: Ints, strides: Sequence[Ints]) -> list[int]:
    """The dims from the innermost to the outermost, in the order of the operands' strides: `reorder_dimensions`."""
    order = list(reversed(range(len(shape))))
    for start in range(1, len(order)):
        place = start
        for other in reversed(range(start)):
            compared = _compare(order[other], order[place], shape, strides)
            if compared > 0:
                order[other], order[place] = order[place], order[other]
                place = other
            elif compared < 0:
                break
    return order


def _compare(left: int, right: int, shape: Ints, strides: Sequence[Ints]) -> int:
    for stride in strides:
        if stride[left] == 0 or stride[right] == 0:
            continue
        if stride[left] != stride[right]:
            return 1 if stride[left] > stride[right] else -1
        if shape[left] > shape[right]:
            return 1
    return 0


def view_strides(shape: Ints, stride: Ints, new: Ints) -> Ints | None:
    """The strides of `tensor.view(new)` for a tensor with elements and as many as `new` has; None if there is no such
    view: `computeStride`."""
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
