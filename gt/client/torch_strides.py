"""Strides of results as functions of torch's C++ library give them: by memory format, by `TensorIterator`, with which
pointwise kernels iterate over operands, and by convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from gt.client.torch_patches.conv_backend import computes_groups_apart, conv_memory_format, select_conv_backend
from gt.client.torch_patches.dispatch import DispatchKey, kernel_of
from gt.core.meta import contiguous_strides, dense_strides, is_dense

# They are computed from the shapes and strides of the operands. Torch's shape functions give the same results, but
# need tensors and some hundred microseconds. Each function follows the C++ function that its docstring names; tests
# compare them with torch's kernels on random shapes and strides.


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


Strides: TypeAlias = tuple[int, ...]

_CHANNELS_LAST_DIMS = {4: torch.channels_last, 5: torch.channels_last_3d}  # formats by number of dims


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """The memory format that torch's kernels infer from a tensor: `suggest_memory_format` of C++."""
    format_ = _CHANNELS_LAST_DIMS.get(tensor.dim())
    return format_ if format_ is not None and _has_channels_last_strides(tensor) else torch.contiguous_format


def _has_channels_last_strides(tensor: torch.Tensor) -> bool:
    """Whether strides are channels-last, as in C++'s `is_channels_last_strides`: dims of one element count too."""
    shape, stride = tensor.shape, tensor.stride()
    least = 0
    if stride[1] == 0:
        return False
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        if shape[dim] == 0 or stride[dim] < least or (dim == 0 and least == stride[1]):
            return False
        least = stride[dim] * (shape[dim] if shape[dim] > 1 else 1)
    return True


def dense_format(tensor: torch.Tensor) -> torch.memory_format | None:
    """The first memory format in which a tensor is dense: `suggest_memory_format_contig` of C++."""
    formats = (torch.contiguous_format, _CHANNELS_LAST_DIMS.get(tensor.dim(), torch.contiguous_format))
    return next((format_ for format_ in formats if tensor.is_contiguous(memory_format=format_)), None)


def strides_in_format(tensor: torch.Tensor, format_: torch.memory_format) -> Strides:
    """Dense strides of a tensor's shape in a memory format."""
    if format_ is torch.contiguous_format:
        return contiguous_strides(tuple(tensor.shape))
    order = (0, *range(2, tensor.dim()), 1)
    ranks = [-order.index(dim) for dim in range(tensor.dim())]
    return dense_strides(tensor.shape, ranks)


def strides_without_gaps(tensor: torch.Tensor) -> Strides:
    """The strides of a tensor without gaps, or dense ones with the dims in the same order, as `clone` gives them:
    `infer_dense_strides` of C++."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    return stride if is_dense(shape, stride) else iterated_strides(shape, [(shape, stride)])


def column_major_strides(matrices: torch.Tensor) -> Strides:
    """Dense strides of matrices with contiguous columns."""
    *batch, rows, columns = range(matrices.dim())
    ranks = [0] * matrices.dim()
    for rank, dim in enumerate((*batch, columns, rows)):
        ranks[dim] = -rank
    return dense_strides(matrices.shape, ranks)


_NEUTRAL = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}
_concatenate = kernel_of(torch.ops.aten.cat.default, DispatchKey.CompositeExplicitAutogradNonFunctional)


class _Part(NamedTuple):
    """A part of a convolution that a kernel computes at once, one of `parts` along the channels. `format_` is the
    memory format of its images, `weight_format` that of its weights. `is_row`: one-dimensional images, computed as
    images of one row."""

    parts: int
    format_: torch.memory_format
    weight_format: torch.memory_format
    is_row: bool


def convolution(arguments: Mapping[str, Any], results: Sequence[torch.Tensor | None]) -> list[Strides | None]:
    part = _part(arguments)
    return [None if result is None else _strides(part, result, 1, part.format_) for result in results]


def convolution_gradients(arguments: Mapping[str, Any], results: Sequence[torch.Tensor | None]) -> list[Strides | None]:
    """For an empty batch the gradients are zeros with the operands' strides."""
    source, weight = arguments["input"], arguments["weight"]
    if not source.numel() and weight.dim() != 3:
        return [strides_without_gaps(source), strides_without_gaps(weight), None]
    part = _part(arguments)
    of_source, of_weight, _ = results
    return [
        None if of_source is None else _strides(part, of_source, 1, part.format_),
        None if of_weight is None else _strides(part, of_weight, 0, part.weight_format),
        None,
    ]


def _part(arguments: Mapping[str, Any]) -> _Part:
    source, weight = arguments["input"], arguments["weight"]
    given = {name: arguments.get(name) for name in _NEUTRAL}
    is_row = weight.dim() == 3
    if is_row:
        source, weight = source.contiguous().unsqueeze(2), weight.unsqueeze(2)
        given = {name: [_NEUTRAL[name], *(value or [])] for name, value in given.items()}
    backend = select_conv_backend(
        source,
        weight,
        arguments.get("bias"),
        given["stride"],
        given["padding"],
        given["dilation"],
        arguments["transposed"],
        given["output_padding"],
        arguments["groups"],
        arguments.get("bias_sizes"),
    )
    format_ = conv_memory_format(source, weight, backend)
    if not computes_groups_apart(backend):
        return _Part(1, format_, format_, is_row)
    count = arguments["groups"]
    if count > 1:
        source, weight = _cut(source, 1, count, format_), _cut(weight, 0, count, format_)
        format_ = conv_memory_format(source, weight, backend)
    return _Part(count, format_, suggested_format(weight.contiguous(memory_format=format_)), is_row)


def _cut(operand: torch.Tensor, dim: int, count: int, format_: torch.memory_format) -> torch.Tensor:
    """The part of an operand for the first of several groups: `subtensor` of C++."""
    whole = operand.contiguous(memory_format=format_)
    part = whole.narrow(dim, 0, whole.shape[dim] // count)
    return part.contiguous(memory_format=suggested_format(whole))


def _strides(part: _Part, result: torch.Tensor, dim: int, format_: torch.memory_format) -> Strides:
    """The strides of a result whose parts are in a memory format and lie along a dim."""
    images = result.unsqueeze(2) if part.is_row else result
    stride = strides_in_format(images, format_)
    if part.parts > 1 and images.numel():
        piece = images.narrow(dim, 0, images.shape[dim] // part.parts)
        piece = torch.empty_strided(piece.shape, strides_in_format(piece, format_), dtype=piece.dtype, device="meta")
        stride = _concatenate([piece] * part.parts, dim).stride()
    return (*stride[:2], stride[3]) if part.is_row else stride
