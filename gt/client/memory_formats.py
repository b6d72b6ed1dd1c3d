"""Strides of dense tensors by memory format, as functions of torch's C++ library give them."""

from __future__ import annotations

from typing import TypeAlias

import torch

from gt.client.tensor_iterator import iterated_strides
from gt.core.meta import contiguous_strides, dense_strides, is_dense

Strides: TypeAlias = tuple[int, ...]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dims


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """The memory format that torch's kernels infer from a tensor: `suggest_memory_format` of C++."""
    format_ = _CHANNELS_LAST.get(tensor.dim())
    return format_ if format_ is not None and _has_channels_last_strides(tensor) else torch.contiguous_format


def _has_channels_last_strides(tensor: torch.Tensor) -> bool:
    """`is_channels_last_strides` of C++, which reads the strides of dims of one element too."""
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
    formats = (torch.contiguous_format, _CHANNELS_LAST.get(tensor.dim(), torch.contiguous_format))
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
