"""Rules of reductions, layer norms and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gt.client.shape_rules.shape_rule import Results, ShapeRule, are_row_major, dims_of, has_shape, row_major, table
from gt.client.storage import Geometry


def _reduce_dims(tensor: Geometry, dims: Any = None, keepdim: bool = False, **_: Any) -> Results:
    found = dims_of(dims, len(tensor.shape))
    if found is None or 0 in tensor.shape:
        return None
    sizes = [1 if dim in found else size for dim, size in enumerate(tensor.shape) if keepdim or dim not in found]
    return [row_major(sizes)]


def _reduce_all(tensor: Geometry, **_: Any) -> Results:
    return None if 0 in tensor.shape else [row_major(())]


def _layer_norm(
    tensor: Geometry, normalized: Sequence[int], weight: Geometry | None, bias: Geometry | None, eps: float
) -> Results:
    outer = len(tensor.shape) - len(normalized)
    fits = outer >= 0 and tuple(tensor.shape[outer:]) == tuple(normalized)
    if not (
        fits and has_shape(weight, normalized) and has_shape(bias, normalized) and are_row_major(tensor, weight, bias)
    ):
        return None
    statistics = row_major((*tensor.shape[:outer], *[1] * len(normalized)))
    return [row_major(tensor.shape), statistics, statistics]


def _layer_norm_backward(
    gradient: Geometry,
    tensor: Geometry,
    normalized: Sequence[int],
    mean: Geometry,
    rstd: Geometry,
    weight: Geometry | None,
    bias: Geometry | None,
    mask: Sequence[bool],
) -> Results:
    operands = (gradient, tensor, mean, rstd, weight, bias)
    forward = _layer_norm(tensor, normalized, weight, bias, 0.0)
    if forward is None or gradient.shape != tensor.shape or not are_row_major(*operands) or weight is None:
        return None
    statistics = forward[1]
    if statistics is None or not (has_shape(mean, statistics.shape) and has_shape(rstd, statistics.shape)):
        return None
    shapes = (tensor.shape, normalized, normalized)
    return [row_major(shape) if asked else None for shape, asked in zip(shapes, mask, strict=True)]


def _nll_loss(
    tensor: Geometry, target: Geometry, weight: Geometry | None, reduction: int, ignore_index: int
) -> Results:
    if not _is_class_loss(tensor, target, weight):
        return None
    return [row_major(() if reduction else target.shape), row_major(())]


def _nll_loss_backward(
    gradient: Geometry,
    tensor: Geometry,
    target: Geometry,
    weight: Geometry | None,
    reduction: int,
    ignore_index: int,
    total_weight: Geometry,
) -> Results:
    fits = has_shape(gradient, () if reduction else target.shape) and has_shape(total_weight, ())
    return [row_major(tensor.shape)] if fits and _is_class_loss(tensor, target, weight) else None


def _is_class_loss(tensor: Geometry, target: Geometry, weight: Geometry | None) -> bool:
    if len(tensor.shape) != 2 or not are_row_major(tensor, target, weight):
        return False
    return has_shape(target, tensor.shape[:1]) and has_shape(weight, tensor.shape[1:])


def _mse_loss(tensor: Geometry, target: Geometry, reduction: int = 1) -> Results:
    if tensor.shape != target.shape or not reduction or not are_row_major(tensor, target):
        return None
    return [row_major(())]


def _mse_loss_backward(gradient: Geometry, tensor: Geometry, target: Geometry, reduction: int) -> Results:
    if not reduction or gradient.shape or not are_row_major(tensor, target) or tensor.shape != target.shape:
        return None
    return [row_major(tensor.shape)]


REDUCTIONS = table(
    (
        ShapeRule(_reduce_dims),
        (
            "sum.dim_IntList", "mean.dim", "amax.default", "amin.default", "any.dim", "all.dim", "argmax.default",
            "argmin.default", "prod.dim_int",
        ),
    ),
    (
        ShapeRule(_reduce_all),
        (
            "sum.default", "mean.default", "any.default", "all.default", "max.default", "min.default", "prod.default",
        ),
    ),
    (ShapeRule(_layer_norm), ("native_layer_norm.default",)),
    (ShapeRule(_layer_norm_backward), ("native_layer_norm_backward.default",)),
    (ShapeRule(_nll_loss), ("nll_loss_forward.default",)),
    (ShapeRule(_nll_loss_backward), ("nll_loss_backward.default",)),
    (ShapeRule(_mse_loss), ("mse_loss.default",)),
    (ShapeRule(_mse_loss_backward), ("mse_loss_backward.default",)),
)  # fmt: skip
