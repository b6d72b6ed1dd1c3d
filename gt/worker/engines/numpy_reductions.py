"""Reductions of arrays, and softmaxes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from gt.worker.engines.numpy_types import (
    BOOL,
    FLOAT16,
    FLOAT32,
    UINT8,
    Array,
    NumPyDType,
    cast,
    category,
    summed_dtype,
    wide,
)

Reduction: TypeAlias = Callable[..., Any]
TorchDims: TypeAlias = int | Sequence[int] | None
"""The argument `dim` of a reduction."""


def _axes(array: Array, dims: TorchDims) -> tuple[int, ...] | None:
    """NumPy's axes of torch's dims. No dims means all of them, and so does any dim of a 0-d tensor."""
    if dims is None or array.ndim == 0:
        return None
    return (dims,) if isinstance(dims, int) else tuple(dims) or None


def _count(array: Array, dims: TorchDims) -> int:
    return math.prod([array.shape[axis] for axis in _axes(array, dims) or range(array.ndim)])


def _sum(array: Array, dims: TorchDims = None, keepdim: bool = False, dtype: NumPyDType | None = None) -> Array:
    dtype = dtype or summed_dtype(array)
    return cast(wide(cast(array, dtype)).sum(_axes(array, dims), keepdims=keepdim), dtype)


def _prod(array: Array, dim: TorchDims = None, keepdim: bool = False, dtype: NumPyDType | None = None) -> Array:
    dtype = dtype or summed_dtype(array)
    return cast(wide(cast(array, dtype)).prod(_axes(array, dim), keepdims=keepdim), dtype)


def _mean(array: Array, dims: TorchDims = None, keepdim: bool = False, dtype: NumPyDType | None = None) -> Array:
    dtype = dtype or array.dtype
    if category(dtype) < category(FLOAT16):
        raise RuntimeError(f"mean(): the dtype must be floating point or complex, not {dtype}; pass dtype=")
    return cast(_sum(wide(cast(array, dtype)), dims, keepdim) / _count(array, dims), dtype)


def _var(array: Array, dims: TorchDims = None, correction: float | None = None, keepdim: bool = False) -> Array:
    # not np.var, which warns where torch returns nan
    if category(array.dtype) < category(FLOAT16):
        raise RuntimeError(f"std and var only support floating point dtypes, not {array.dtype}")
    deviation = wide(array) - _mean(wide(array), dims, keepdim=True)
    freedom = max(_count(array, dims) - (1 if correction is None else correction), 0)
    return cast(_sum(deviation * deviation, dims, keepdim) / np.asarray(freedom, deviation.dtype), array.dtype)


def _std(array: Array, dims: TorchDims = None, correction: float | None = None, keepdim: bool = False) -> Array:
    return np.asarray(np.sqrt(_var(array, dims, correction, keepdim)))


def _extreme(function: Callable[..., Any]) -> Reduction:
    def run(array: Array, dims: TorchDims = None, keepdim: bool = False) -> Array:
        return np.asarray(function(array, axis=_axes(array, dims), keepdims=keepdim))

    return run


def _where_extreme(function: Callable[..., Any]) -> Reduction:
    def run(array: Array, dim: int | None = None, keepdim: bool = False) -> Array:
        return np.asarray(function(array, axis=dim if array.ndim else None, keepdims=keepdim))

    return run


def _truth(function: Callable[..., Any]) -> Reduction:
    def run(array: Array, dims: TorchDims = None, keepdim: bool = False) -> Array:
        found = function(array, axis=_axes(array, dims), keepdims=keepdim)
        return cast(found, UINT8 if array.dtype == UINT8 else BOOL)

    return run


_amax, _amin = _extreme(np.max), _extreme(np.min)
_argmax, _argmin = _where_extreme(np.argmax), _where_extreme(np.argmin)
_any, _all = _truth(np.any), _truth(np.all)


def _max_dim(array: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return _amax(array, dim, keepdim), _argmax(array, dim, keepdim)


def _min_dim(array: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return _amin(array, dim, keepdim), _argmin(array, dim, keepdim)


def _log_softmax(array: Array, dim: int, half_to_float: bool = False) -> Array:
    shifted = wide(array) - _amax(wide(array), dim, keepdim=True)
    result = shifted - np.log(_sum(np.exp(shifted), dim, keepdim=True))
    return cast(result, FLOAT32 if half_to_float else array.dtype)


def _softmax(array: Array, dim: int, half_to_float: bool = False) -> Array:
    return cast(np.exp(_log_softmax(wide(array), dim)), FLOAT32 if half_to_float else array.dtype)


def _softmax_backward(grad: Array, output: Array, dim: int, input_dtype: NumPyDType) -> Array:
    return cast(output * (grad - _sum(grad * output, dim, keepdim=True)), input_dtype)


def _log_softmax_backward(grad: Array, output: Array, dim: int, input_dtype: NumPyDType) -> Array:
    return cast(grad - np.exp(output) * _sum(grad, dim, keepdim=True), input_dtype)


REDUCTIONS: dict[str, Reduction] = {
    "aten.sum.default": _sum,
    "aten.sum.dim_IntList": _sum,
    "aten.mean.default": _mean,
    "aten.mean.dim": _mean,
    "aten.prod.default": _prod,
    "aten.prod.dim_int": _prod,
    "aten.var.correction": _var,
    "aten.std.correction": _std,
    "aten.amax.default": _amax,
    "aten.amin.default": _amin,
    "aten.max.default": _amax,
    "aten.min.default": _amin,
    "aten.max.dim": _max_dim,
    "aten.min.dim": _min_dim,
    "aten.argmax.default": _argmax,
    "aten.argmin.default": _argmin,
    "aten.any.default": _any,
    "aten.any.dim": _any,
    "aten.any.dims": _any,
    "aten.all.default": _all,
    "aten.all.dim": _all,
    "aten.all.dims": _all,
    "aten._softmax.default": _softmax,
    "aten._log_softmax.default": _log_softmax,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten._log_softmax_backward_data.default": _log_softmax_backward,
}
