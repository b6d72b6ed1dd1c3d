"""Shapes and strides of the results of torch's `TensorIterator`, with which pointwise kernels iterate over operands.

They are computed from the shapes and strides of the operands. Torch's shape functions give the same results, but need
tensors and some hundred microseconds. Each function follows the C++ function that its docstring names; tests compare
them with torch's kernels on random shapes and strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from gt.core.meta import contiguous_strides, is_dense

Ints: TypeAlias = tuple[int, ...]

_CHANNELS_LAST = (0, 2, 3, 1)  # dims of an image from the outermost to the innermost


def broadcast(shapes: Sequence[Ints]) -> Ints | None:
    """The shape to which all shapes expand, or None if they do not fit."""
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
