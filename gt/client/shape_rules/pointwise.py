"""Rules of ops that keep the shape of their operands: pointwise ops, copies, softmax and dropout."""

from __future__ import annotations

from typing import Any

import torch

from gt.client.shape_rules.shape_rule import Results, ShapeRule, Strided, are_row_major, row_major, table
from gt.client.storage import Geometry
from gt.client.torch_strides import broadcast, iterated_strides
from gt.core.meta import is_dense

_MAX_OPERANDS = 3  # the number that the stride rule of pointwise ops in kernel_strides.py takes
_NUMBERS = frozenset((bool, int, float, complex))


def iterate_operands(*args: Any, **kwargs: Any) -> Results:
    """The rule of pointwise ops, whose kernels iterate over their operands together."""
    operands = [value for value in (*args, *kwargs.values()) if type(value) is Geometry]
    if not 0 < len(operands) <= _MAX_OPERANDS or any(0 in operand.shape for operand in operands):
        return None
    dtype = operands[0].dtype
    if any(operand.dtype is not dtype for operand in operands) and not all(map(_is_dense, operands)):
        return None  # operands of other dtypes are copied first, without their gaps
    shape = broadcast([operand.shape for operand in operands])
    if shape is None:
        return None
    strided = [(operand.shape, operand.stride) for operand in operands]
    stride = iterated_strides(shape, strided)
    if any(type(value) in _NUMBERS for value in args) and iterated_strides(shape, [*strided, ((), ())]) != stride:
        return None  # some ops make a tensor of a number and iterate over it too, which would change the strides
    return [Strided(shape, stride)]


def _is_dense(tensor: Geometry) -> bool:
    return tensor.stride == tensor.row_major or is_dense(tensor.shape, tensor.stride)


def _preserve_strides(
    tensor: Geometry, *_: Any, memory_format: torch.memory_format | None = None, **__: Any
) -> Results:
    """The rule of `clone`, `zeros_like` and the like, for a tensor without gaps."""
    if 0 in tensor.shape or not _is_dense(tensor):
        return None
    if memory_format is torch.contiguous_format:
        return [row_major(tensor.shape)]
    if memory_format not in (None, torch.preserve_format):
        return None
    return [Strided(tuple(tensor.shape), tensor.stride)]


def _keep_row_major(tensor: Geometry, *_: Any, **__: Any) -> Results:
    return [row_major(tensor.shape)] if are_row_major(tensor) else None


def _softmax(*tensors: Any, **_: Any) -> Results:
    """The result is row-major, whatever the strides of the operands are."""
    shapes = [tensor.shape for tensor in tensors if type(tensor) is Geometry]
    return [row_major(shapes[0])] if 0 not in shapes[0] and all(shape == shapes[0] for shape in shapes) else None


def _dropout_backward(gradient: Geometry, mask: Geometry, *_: Any, **__: Any) -> Results:
    return [row_major(gradient.shape)] if are_row_major(gradient, mask) and gradient.shape == mask.shape else None


def _masked_fill(tensor: Geometry, mask: Geometry, *_: Any) -> Results:
    fits = broadcast([tensor.shape, mask.shape]) == tuple(tensor.shape)
    return [row_major(tensor.shape)] if fits and are_row_major(tensor, mask) else None


def _dropout(tensor: Geometry, *_: Any) -> Results:
    return [row_major(tensor.shape)] * 2 if are_row_major(tensor) else None


POINTWISE = table(
    (
        ShapeRule(_preserve_strides),
        (
            "clone.default", "_to_copy.default", "empty_like.default", "zeros_like.default", "ones_like.default",
            "full_like.default", "rand_like.default", "randn_like.default",
        ),
    ),
    (
        ShapeRule(_softmax),
        (
            "_softmax.default", "_log_softmax.default", "_softmax_backward_data.default",
            "_log_softmax_backward_data.default",
        ),
    ),
    (ShapeRule(_keep_row_major), ("cumsum.default", "tril.default", "triu.default")),
    (ShapeRule(_dropout), ("native_dropout.default",)),
    (ShapeRule(_dropout_backward), ("native_dropout_backward.default",)),
    (ShapeRule(_masked_fill), ("masked_fill.Scalar", "masked_fill.Tensor")),
)  # fmt: skip
