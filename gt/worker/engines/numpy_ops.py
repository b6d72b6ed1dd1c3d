"""Aten ops on arrays: a table from the names of overloads to small functions with the same arguments.

Results never share memory with arguments, and are arrays even if NumPy would return a number. Random ops take a
`RandomSource` first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from gt.worker.engines.numpy_factories import FACTORIES
from gt.worker.engines.numpy_random import RANDOM
from gt.worker.engines.numpy_reductions import REDUCTIONS
from gt.worker.engines.numpy_types import (
    BOOL,
    INT64,
    UINT8,
    Array,
    DTypeRule,
    NumPyDType,
    Operand,
    cast,
    floating_dtype,
    result_dtype,
    store,
    wide,
)
from gt.worker.engines.numpy_views import VIEWS

Op: TypeAlias = Callable[..., Any]


# Elementwise


def _elementwise(ufunc: Callable[..., Any], rule: DTypeRule = result_dtype) -> Op:
    """A function of operands that are first cast to one dtype, which a rule chooses."""

    def run(*operands: Operand) -> Array:
        dtype = rule(*operands)
        return np.asarray(ufunc(*[cast(operand, dtype) for operand in operands]))

    return run


def _scaled(ufunc: np.ufunc) -> Op:
    """The ops `add` and `sub`, whose second operand has a factor."""

    def run(left: Operand, right: Operand, alpha: Operand = 1) -> Array:
        dtype = result_dtype(left, right)
        return np.asarray(ufunc(cast(left, dtype), cast(alpha, dtype) * cast(right, dtype)))

    return run


_add, _sub = _scaled(np.add), _scaled(np.subtract)


def _clamp(value: Array, low: Operand | None = None, high: Operand | None = None) -> Array:
    dtype = result_dtype(*[operand for operand in (value, low, high) if operand is not None])
    result = np.array(value, dtype)
    if low is not None:
        result = np.maximum(result, cast(low, dtype))
    return np.asarray(result if high is None else np.minimum(result, cast(high, dtype)))


def _where(condition: Array, chosen: Operand, other: Operand) -> Array:
    dtype = result_dtype(chosen, other)
    return np.where(cast(condition, BOOL), cast(chosen, dtype), cast(other, dtype))


def _masked_fill(array: Array, mask: Array, value: Operand) -> Array:
    return np.where(mask, cast(value, array.dtype), array)


_ERF = np.vectorize(math.erf, otypes=[np.float64])
_TANH_SCALE, _TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715


def _gelu(array: Array, approximate: str = "none") -> Array:
    x = array.astype(np.float64)
    inner = np.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x**3)) if approximate == "tanh" else _ERF(x / math.sqrt(2))
    return cast(0.5 * x * (1 + inner), array.dtype)


def _gelu_backward(grad: Array, array: Array, approximate: str = "none") -> Array:
    x = array.astype(np.float64)
    if approximate == "tanh":
        inner = np.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x**3))
        slope = (1 - inner**2) * _TANH_SCALE * (1 + 3 * _TANH_CUBIC * x**2)
    else:
        inner, slope = _ERF(x / math.sqrt(2)), np.exp(-0.5 * x**2) * math.sqrt(2 / math.pi)
    return cast(grad * 0.5 * (1 + inner + x * slope), array.dtype)


def _threshold_backward(grad: Array, array: Array, threshold: Operand) -> Array:
    return np.where(array <= threshold, cast(0, grad.dtype), grad)


# Matrix products


def _product(left_dims: int, right_dims: int) -> Op:
    """A matrix product of operands with these dims. Checked, because NumPy broadcasts where torch raises."""

    def run(left: Array, right: Array) -> Array:
        if (left.ndim, right.ndim) != (left_dims, right_dims) or left.shape[:-2] != right.shape[:-2]:
            raise RuntimeError(f"cannot multiply shapes {left.shape} and {right.shape}")
        if left.dtype != right.dtype:
            raise RuntimeError(f"expected operands to have the same dtype, but got: {left.dtype} != {right.dtype}")
        return cast(np.matmul(wide(left), wide(right)), left.dtype)

    return run


_mm = _product(2, 2)


def _addmm(bias: Array, left: Array, right: Array, beta: Operand = 1, alpha: Operand = 1) -> Array:
    product = cast(alpha, left.dtype) * _mm(left, right)
    return np.asarray(product if beta == 0 else cast(beta, bias.dtype) * bias + product)


# Copies, joins and indices


def _clone(array: Array, memory_format: str | None = None) -> Array:
    return np.array(array, order="C" if memory_format == "contiguous_format" else "K")


def _to_copy(array: Array, dtype: NumPyDType | None = None, **_: object) -> Array:
    return array.astype(dtype or array.dtype)


def _copy_(target: Array, source: Operand, non_blocking: bool = False) -> Array:
    np.copyto(target, cast(source, target.dtype))
    return target


def _cat(arrays: Sequence[Array], dim: int = 0) -> Array:
    # torch skips tensors of shape [0], whatever the shape of the others
    dtype, filled = result_dtype(*arrays), [array for array in arrays if array.shape != (0,)]
    return np.concatenate([cast(array, dtype) for array in filled or arrays], axis=dim)


def _stack(arrays: Sequence[Array], dim: int = 0) -> Array:
    return np.stack([cast(array, result_dtype(*arrays)) for array in arrays], axis=dim)


def _numpy_indices(indices: Sequence[Array | None]) -> tuple[Array | slice, ...]:
    """Indices as NumPy takes them: None is a whole dim, and torch reads uint8 as a mask."""
    masks = [index.astype(BOOL) if index is not None and index.dtype == UINT8 else index for index in indices]
    return tuple(slice(None) if index is None else index for index in masks)


def _index(array: Array, indices: Sequence[Array | None]) -> Array:
    return np.asarray(array[_numpy_indices(indices)])


def _index_put_(target: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    if accumulate:
        np.add.at(target, _numpy_indices(indices), values)  # type: ignore[arg-type]
    else:
        target[_numpy_indices(indices)] = values
    return target


def _index_fill_(target: Array, dim: int, index: Array, value: Operand) -> Array:
    np.moveaxis(target, dim, 0)[_check_range(index, target.shape[dim])] = cast(value, target.dtype)
    return target


def _check_range(index: Array, size: int) -> Array:
    """Raise for negative indices as torch does, where NumPy would count from the end."""
    if index.size and (index.min() < 0 or index.max() >= size):
        raise IndexError(f"index out of range: found {index.min()} to {index.max()}, of {size}")
    return index


def _index_select(array: Array, dim: int, index: Array) -> Array:
    return np.take(array, np.atleast_1d(_check_range(index, array.shape[dim])), axis=dim)


def _gather(array: Array, dim: int, index: Array, sparse_grad: bool = False) -> Array:
    places = [slice(None) if axis == dim % array.ndim else slice(size) for axis, size in enumerate(index.shape)]
    return np.take_along_axis(array[tuple(places)], _check_range(index, array.shape[dim]), axis=dim)


def _embedding(weight: Array, index: Array, *_: object) -> Array:
    return np.take(weight, _check_range(index, len(weight)), axis=0)


def _masked_select(array: Array, mask: Array) -> Array:
    values, places = np.broadcast_arrays(array, mask)
    return np.asarray(values[places])


def _view(array: Array, shape: Sequence[int]) -> Array:
    result = array.reshape(shape)
    if array.size and not np.may_share_memory(result, array):
        raise RuntimeError(f"view size {shape} is not compatible with input tensor's size and stride")
    return result


def _in_place(op: Op) -> Op:
    def run(target: Array, *args: Any, **kwargs: Any) -> Array:
        return store(target, op(target, *args, **kwargs))

    return run


_UNARY: dict[str, Op] = {
    "neg": _elementwise(np.negative),
    "abs": _elementwise(np.abs),
    "relu": _elementwise(lambda x: np.maximum(x, cast(0, x.dtype))),
    "sqrt": _elementwise(np.sqrt, floating_dtype),
    "rsqrt": _elementwise(lambda x: 1 / np.sqrt(x), floating_dtype),
    "reciprocal": _elementwise(lambda x: 1 / x, floating_dtype),
    "exp": _elementwise(np.exp, floating_dtype),
    "log": _elementwise(np.log, floating_dtype),
    "sin": _elementwise(np.sin, floating_dtype),
    "cos": _elementwise(np.cos, floating_dtype),
    "tanh": _elementwise(np.tanh, floating_dtype),
    "sigmoid": _elementwise(lambda x: 1 / (1 + np.exp(-x)), floating_dtype),
}

_BINARY: dict[str, Op] = {
    "maximum": _elementwise(np.maximum),
    "minimum": _elementwise(np.minimum),
    "logical_and": lambda x, y: np.asarray(np.logical_and(x, y)),
    "logical_or": lambda x, y: np.asarray(np.logical_or(x, y)),
}

_WITH_SCALAR: dict[str, Op] = {
    "eq": _elementwise(np.equal),
    "ne": _elementwise(np.not_equal),
    "lt": _elementwise(np.less),
    "le": _elementwise(np.less_equal),
    "gt": _elementwise(np.greater),
    "ge": _elementwise(np.greater_equal),
    "bitwise_and": _elementwise(np.bitwise_and),
    "bitwise_or": _elementwise(np.bitwise_or),
}

_ARITHMETIC: dict[str, Op] = {
    "add": _add,
    "sub": _sub,
    "mul": _elementwise(np.multiply),
    "div": _elementwise(np.true_divide, floating_dtype),
}
_POW = _elementwise(np.power)

OPS: dict[str, Op] = {
    **FACTORIES,
    **RANDOM,
    **REDUCTIONS,
    **{f"aten.{name}.default": op for name, op in (_UNARY | _BINARY).items()},
    **{f"aten.{name}_.default": _in_place(op) for name, op in _UNARY.items()},
    **{f"aten.{name}.{kind}": op for name, op in (_WITH_SCALAR | _ARITHMETIC).items() for kind in ("Tensor", "Scalar")},
    **{f"aten.{name}_.{kind}": _in_place(op) for name, op in _ARITHMETIC.items() for kind in ("Tensor", "Scalar")},
    "aten.logical_not.default": lambda x: np.asarray(np.logical_not(x)),
    "aten.bitwise_not.default": _elementwise(np.invert),
    "aten.rsub.Scalar": lambda x, number, alpha=1: _sub(number, x, alpha),
    "aten.pow.Tensor_Scalar": _POW,
    "aten.pow.Tensor_Tensor": _POW,
    "aten.pow.Scalar": _POW,
    "aten.clamp.default": _clamp,
    "aten.clamp_.default": _in_place(_clamp),
    "aten.clamp_min.default": _clamp,
    "aten.where.self": _where,
    "aten.masked_fill.Scalar": _masked_fill,
    "aten.masked_fill_.Scalar": _in_place(_masked_fill),
    "aten.gelu.default": _gelu,
    "aten.gelu_backward.default": _gelu_backward,
    "aten.threshold_backward.default": _threshold_backward,
    "aten.sigmoid_backward.default": _elementwise(lambda grad, out: grad * out * (1 - out)),
    "aten.tanh_backward.default": _elementwise(lambda grad, out: grad * (1 - out * out)),
    "aten.mm.default": _mm,
    "aten.bmm.default": _product(3, 3),
    "aten.mv.default": _product(2, 1),
    "aten.dot.default": _product(1, 1),
    "aten.addmm.default": _addmm,
    "aten.clone.default": _clone,
    "aten._to_copy.default": _to_copy,
    "aten.copy_.default": _copy_,
    "aten.fill_.Scalar": _copy_,
    "aten.fill_.Tensor": _copy_,
    "aten.zero_.default": lambda target: _copy_(target, 0),
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.index.Tensor": _index,
    "aten.index_put_.default": _index_put_,
    "aten.index_fill_.int_Scalar": _index_fill_,
    "aten.index_select.default": _index_select,
    "aten.gather.default": _gather,
    "aten.embedding.default": _embedding,
    "aten.nonzero.default": lambda array: np.argwhere(array).astype(INT64),
    "aten.masked_select.default": _masked_select,
    # a view op is a command only if torch's shape function raises, and must raise here too
    **VIEWS,
    "aten.view.default": _view,
}


def on_lists(op: str) -> Op | None:
    """An op on lists of arrays, as the op on their elements, one position after another; None for any other op."""
    _, listed, name = op.partition("aten._foreach_")
    base = name.partition(".")[0]
    single = next((OPS[found] for kind in _SINGLE if (found := f"aten.{base}.{kind}") in OPS), None)
    if not listed or single is None:
        return None

    def run(first: Sequence[Array], *args: Any, **kwargs: Any) -> list[Any]:
        def at(position: int, value: Any) -> Any:
            return value[position] if isinstance(value, list | tuple) else value

        return [
            single(own, *[at(n, arg) for arg in args], **{name: at(n, value) for name, value in kwargs.items()})
            for n, own in enumerate(first)
        ]

    return run


_SINGLE = ("Tensor", "default", "Scalar")  # overloads on single tensors, the first that exists
