"""Aten ops on arrays: a table from the names of overloads to small functions with the same arguments.

Results never share memory with arguments, and are arrays even if NumPy would return a number. Random ops take a
`RandomSource` first. Layouts, devices and memory formats of new tensors are ignored, and empty ones are zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from gt.worker.engines.numpy_arrays import (
    BOOL,
    FLOAT32,
    INT64,
    UINT8,
    VIEWS,
    Array,
    NumPyDType,
    Operand,
    Sizes,
    cast,
    empty_strided,
    floating_dtype,
    is_floating,
    result_dtype,
    store,
    wide,
)
from gt.worker.engines.numpy_random import RANDOM

Op: TypeAlias = Callable[..., Any]
Dims: TypeAlias = int | Sequence[int] | None
"""The argument `dim` of a reduction."""


# New tensors


def _full(size: Sizes, value: Operand, *, dtype: NumPyDType | None = None, **_: object) -> Array:
    return np.full(size, cast(value, dtype or result_dtype(value)))


def _constant(value: int) -> Op:
    return lambda size, dtype=None, **_: _full(size, value, dtype=dtype or FLOAT32)


def _like(make: Op) -> Op:
    """A factory that takes the shape and the dtype of a tensor."""
    return lambda like, *args, dtype=None, **_: make(like.shape, *args, dtype=dtype or like.dtype)


def _new(make: Op) -> Op:
    """A factory that takes the dtype of a tensor."""
    return lambda like, *args, dtype=None, **_: make(*args, dtype=dtype or like.dtype)


def _arange(start: float, end: float, step: float = 1, dtype: NumPyDType | None = None, **_: object) -> Array:
    count = math.ceil((end - start) / step)
    return (np.arange(count) * step + start).astype(dtype or result_dtype(start, end, step))


def _eye(rows: int, columns: int | None = None, *, dtype: NumPyDType | None = None, **_: object) -> Array:
    return np.eye(rows, columns, dtype=dtype or FLOAT32)


# Elementwise ops


def _promoted(operands: Sequence[Operand], rule: Callable[..., NumPyDType] = result_dtype) -> list[Array]:
    """Operands of one dtype, which a rule chooses."""
    dtype = rule(*operands)
    return [cast(operand, dtype) for operand in operands]


def _elementwise(function: Op, rule: Callable[..., NumPyDType] = result_dtype) -> Op:
    return lambda *operands: np.asarray(function(*_promoted(operands, rule)))


def _scaled(function: Op) -> Op:
    """The ops `add` and `sub`, whose second operand has a factor."""

    def run(left: Operand, right: Operand, alpha: Operand = 1) -> Array:
        first, second = _promoted((left, right))
        return np.asarray(function(first, cast(alpha, first.dtype) * second))

    return run


def _plain(function: Op) -> Op:
    """A function of operands of any dtypes."""
    return lambda *operands: np.asarray(function(*operands))


def _in_place(op: Op) -> Op:
    return lambda target, *args, **kwargs: store(target, op(target, *args, **kwargs))


def _clamp(value: Array, low: Operand | None = None, high: Operand | None = None) -> Array:
    dtype = result_dtype(*[operand for operand in (value, low, high) if operand is not None])
    bounds: list[Any] = [None if bound is None else cast(bound, dtype) for bound in (low, high)]
    return np.asarray(np.clip(cast(value, dtype), *bounds))


_ERF = np.vectorize(math.erf, otypes=[np.float64])
_GELU_SCALE, _GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715


def _gelu_factor(x: Array, approximate: str) -> tuple[Array, Array]:
    """The function g of gelu(x) = x (1 + g(x)) / 2, and its slope."""
    if approximate == "tanh":
        factor = np.tanh(_GELU_SCALE * (x + _GELU_CUBIC * x**3))
        return factor, (1 - factor**2) * _GELU_SCALE * (1 + 3 * _GELU_CUBIC * x**2)
    return _ERF(x / math.sqrt(2)), np.exp(-0.5 * x**2) * _GELU_SCALE


def _gelu(array: Array, approximate: str = "none") -> Array:
    x = array.astype(np.float64)
    return cast(0.5 * x * (1 + _gelu_factor(x, approximate)[0]), array.dtype)


def _gelu_backward(grad: Array, array: Array, approximate: str = "none") -> Array:
    x = array.astype(np.float64)
    factor, slope = _gelu_factor(x, approximate)
    return cast(grad * 0.5 * (1 + factor + x * slope), array.dtype)


# Reductions


def _reduction(function: Op) -> Op:
    """No dims mean all of them, and so does any dim of a 0-d tensor."""

    def run(array: Array, dims: Dims = None, keepdim: bool = False) -> Array:
        axis = dims if isinstance(dims, int) else tuple(dims or ()) or None
        return np.asarray(function(array, axis=axis if array.ndim else None, keepdims=keepdim))

    return run


def _accumulated(function: Op) -> Op:
    """A reduction of integers in int64, and of float16 in float32."""
    reduce = _reduction(function)

    def run(array: Array, dims: Dims = None, keepdim: bool = False, dtype: NumPyDType | None = None) -> Array:
        dtype = dtype or (array.dtype if is_floating(array.dtype) else INT64)
        return cast(reduce(wide(cast(array, dtype)), dims, keepdim), dtype)

    return run


def _of_bits(function: Op) -> Op:
    """The ops `any` and `all`, which give uint8 for uint8."""
    reduce = _reduction(function)
    return lambda array, *args, **options: cast(
        reduce(array, *args, **options), UINT8 if array.dtype == UINT8 else BOOL
    )


_sum, _amax, _amin = _accumulated(np.sum), _reduction(np.max), _reduction(np.min)
_argmax, _argmin = _reduction(np.argmax), _reduction(np.argmin)


def _mean(array: Array, dims: Dims = None, keepdim: bool = False, dtype: NumPyDType | None = None) -> Array:
    dtype = dtype or array.dtype
    if not is_floating(dtype):
        raise RuntimeError(f"mean(): the dtype must be floating point or complex, not {dtype}; pass dtype=")
    total = _sum(wide(cast(array, dtype)), dims, keepdim)
    return cast(total / (array.size // max(total.size, 1)), dtype)


def _var(array: Array, dims: Dims = None, correction: float | None = None, keepdim: bool = False) -> Array:
    # not np.var, which warns where torch returns nan
    if not is_floating(array.dtype):
        raise RuntimeError(f"std and var only support floating point dtypes, not {array.dtype}")
    total = _sum((wide(array) - _mean(wide(array), dims, keepdim=True)) ** 2, dims, keepdim)
    freedom = array.size // max(total.size, 1) - (1 if correction is None else correction)
    return cast(total / np.asarray(max(freedom, 0), total.dtype), array.dtype)


def _log_softmax(array: Array, dim: int, half_to_float: bool = False) -> Array:
    shifted = wide(array) - _amax(wide(array), dim, keepdim=True)
    result = shifted - np.log(_sum(np.exp(shifted), dim, keepdim=True))
    return cast(result, FLOAT32 if half_to_float else array.dtype)


def _softmax(array: Array, dim: int, half_to_float: bool = False) -> Array:
    return cast(np.exp(_log_softmax(wide(array), dim)), FLOAT32 if half_to_float else array.dtype)


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


def _addmm(bias: Array, left: Array, right: Array, beta: Operand = 1, alpha: Operand = 1) -> Array:
    product = cast(alpha, left.dtype) * _product(2, 2)(left, right)
    return np.asarray(product if beta == 0 else cast(beta, bias.dtype) * bias + product)


# Copies, joins and indices


def _clone(array: Array, memory_format: str | None = None) -> Array:
    return np.array(array, order="C" if memory_format == "contiguous_format" else "K")


def _copy_(target: Array, source: Operand, non_blocking: bool = False) -> Array:
    np.copyto(target, cast(source, target.dtype))
    return target


def _cat(arrays: Sequence[Array], dim: int = 0) -> Array:
    # torch skips tensors of shape [0], whatever the shape of the others
    promoted = _promoted(arrays)
    return np.concatenate([array for array in promoted if array.shape != (0,)] or promoted, axis=dim)


def _numpy_indices(indices: Sequence[Array | None]) -> tuple[Any, ...]:
    """Indices as NumPy takes them: None is a whole dim, and torch reads uint8 as a mask."""
    masks = [index.astype(BOOL) if index is not None and index.dtype == UINT8 else index for index in indices]
    return tuple(slice(None) if index is None else index for index in masks)


def _index_put_(target: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    if accumulate:
        np.add.at(target, _numpy_indices(indices), values)
    else:
        target[_numpy_indices(indices)] = values
    return target


def _in_range(index: Array, size: int) -> Array:
    """The index; raises for negative ones as torch does, where NumPy would count from the end."""
    if index.size and (index.min() < 0 or index.max() >= size):
        raise IndexError(f"index out of range: found {index.min()} to {index.max()}, of {size}")
    return index


def _index_fill_(target: Array, dim: int, index: Array, value: Operand) -> Array:
    np.moveaxis(target, dim, 0)[_in_range(index, target.shape[dim])] = cast(value, target.dtype)
    return target


def _gather(array: Array, dim: int, index: Array, sparse_grad: bool = False) -> Array:
    places = [slice(None) if axis == dim % array.ndim else slice(size) for axis, size in enumerate(index.shape)]
    return np.take_along_axis(array[tuple(places)], _in_range(index, array.shape[dim]), axis=dim)


def _masked_select(array: Array, mask: Array) -> Array:
    values, places = np.broadcast_arrays(array, mask)
    return np.asarray(values[places])


def _view(array: Array, shape: Sizes) -> Array:
    result = array.reshape(shape)
    if array.size and not np.may_share_memory(result, array):
        raise RuntimeError(f"view size {shape} is not compatible with input tensor's size and stride")
    return result


# The table, by the names of overloads without "aten."


def _with_in_place(table: dict[str, Op]) -> dict[str, Op]:
    return table | {names.replace(".", "_."): _in_place(op) for names, op in table.items()}


_FACTORIES: dict[str, Op] = {"zeros": _constant(0), "ones": _constant(1), "full": _full}
_COMPARISONS: dict[str, Op] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or,
}  # fmt: skip
_OF_FLOATS = (np.sqrt, np.exp, np.log, np.sin, np.cos, np.tanh)
_UNARY: dict[str, Op] = {
    "neg.default": _elementwise(np.negative),
    "abs.default": _elementwise(np.abs),
    "relu.default": _elementwise(lambda x: np.maximum(x, cast(0, x.dtype))),
    "rsqrt.default": _elementwise(lambda x: 1 / np.sqrt(x), floating_dtype),
    "reciprocal.default": _elementwise(lambda x: 1 / x, floating_dtype),
    "sigmoid.default": _elementwise(lambda x: 1 / (1 + np.exp(-x)), floating_dtype),
    **{f"{function.__name__}.default": _elementwise(function, floating_dtype) for function in _OF_FLOATS},
}
_ARITHMETIC: dict[str, Op] = {
    "add.Tensor add.Scalar": _scaled(np.add),
    "sub.Tensor sub.Scalar": _scaled(np.subtract),
    "mul.Tensor mul.Scalar": _elementwise(np.multiply),
    "div.Tensor div.Scalar": _elementwise(np.true_divide, floating_dtype),
    "clamp.default": _clamp,
    "masked_fill.Scalar": lambda array, mask, value: np.where(mask, cast(value, array.dtype), array),
}
_TABLE: dict[str, Op] = {
    **_with_in_place(_UNARY | _ARITHMETIC),
    **{f"{name}.default": make for name, make in _FACTORIES.items()},
    **{f"{name}_like.default": _like(make) for name, make in _FACTORIES.items()},
    **{f"new_{name}.default": _new(make) for name, make in _FACTORIES.items()},
    "empty.memory_format": _constant(0),
    "empty_like.default": _like(_constant(0)),
    "new_empty.default": _new(_constant(0)),
    "empty_strided.default": lambda size, strides, dtype=None, **_: empty_strided(size, strides, dtype or FLOAT32),
    "scalar_tensor.default": lambda value, dtype=None, **_: _full((), value, dtype=dtype or FLOAT32),
    "arange.default": lambda end, **options: _arange(0, end, **options),
    "arange.start arange.start_step": _arange,
    "eye.default eye.m": _eye,
    "linspace.default": lambda start, end, steps, dtype=None, **_: cast(
        np.linspace(start, end, steps), dtype or FLOAT32
    ),
    "rsub.Scalar": lambda x, number, alpha=1: _scaled(np.subtract)(number, x, alpha),
    "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar": _elementwise(np.power),
    **{f"{function.__name__}.default": _elementwise(function) for function in (np.maximum, np.minimum)},
    "logical_and.default": _plain(np.logical_and),
    "logical_or.default": _plain(np.logical_or),
    "logical_not.default": _plain(np.logical_not),
    **{f"{name}.Tensor {name}.Scalar": _elementwise(function) for name, function in _COMPARISONS.items()},
    "bitwise_not.default": _elementwise(np.invert),
    "clamp_min.default": _clamp,
    "where.self": lambda condition, chosen, other: np.where(cast(condition, BOOL), *_promoted((chosen, other))),
    "gelu.default": _gelu,
    "gelu_backward.default": _gelu_backward,
    "threshold_backward.default": lambda grad, x, threshold: np.where(x <= threshold, cast(0, grad.dtype), grad),
    "sigmoid_backward.default": _elementwise(lambda grad, out: grad * out * (1 - out)),
    "tanh_backward.default": _elementwise(lambda grad, out: grad * (1 - out * out)),
    "sum.default sum.dim_IntList": _sum,
    "prod.default prod.dim_int": _accumulated(np.prod),
    "mean.default mean.dim": _mean,
    "var.correction": _var,
    "std.correction": lambda *args, **options: np.asarray(np.sqrt(_var(*args, **options))),
    "amax.default max.default": _amax,
    "amin.default min.default": _amin,
    "argmax.default": _argmax,
    "argmin.default": _argmin,
    "max.dim": lambda *args, **options: (_amax(*args, **options), _argmax(*args, **options)),
    "min.dim": lambda *args, **options: (_amin(*args, **options), _argmin(*args, **options)),
    "any.default any.dim any.dims": _of_bits(np.any),
    "all.default all.dim all.dims": _of_bits(np.all),
    "_log_softmax.default": _log_softmax,
    "_softmax.default": _softmax,
    "_softmax_backward_data.default": lambda x, out, dim, dtype: cast(out * (x - _sum(x * out, dim, True)), dtype),
    "_log_softmax_backward_data.default": lambda x, out, dim, dtype: cast(x - np.exp(out) * _sum(x, dim, True), dtype),
    "mm.default": _product(2, 2),
    "bmm.default": _product(3, 3),
    "mv.default": _product(2, 1),
    "dot.default": _product(1, 1),
    "addmm.default": _addmm,
    "clone.default": _clone,
    "_to_copy.default": lambda array, dtype=None, **_: array.astype(dtype or array.dtype),
    "copy_.default fill_.Scalar fill_.Tensor": _copy_,
    "zero_.default": lambda target: _copy_(target, 0),
    "cat.default": _cat,
    "stack.default": lambda arrays, dim=0: np.stack(_promoted(arrays), axis=dim),
    "index.Tensor": lambda array, indices: np.asarray(array[_numpy_indices(indices)]),
    "index_put_.default": _index_put_,
    "index_fill_.int_Scalar": _index_fill_,
    "index_select.default": lambda x, dim, index: np.take(x, np.atleast_1d(_in_range(index, x.shape[dim])), axis=dim),
    "gather.default": _gather,
    "embedding.default": lambda weight, index, *_: np.take(weight, _in_range(index, len(weight)), axis=0),
    "nonzero.default": lambda array: np.argwhere(array).astype(INT64),
    "masked_select.default": _masked_select,
}
OPS: dict[str, Op] = {
    **{f"aten.{name}": op for names, op in _TABLE.items() for name in names.split()},
    **RANDOM,
    **VIEWS,  # a view op is a command only if torch's shape function raises, and must raise here too
    "aten.view.default": _view,
}


def on_lists(op: str) -> Op | None:
    """An op on lists of arrays, as the op on their elements, one position after another; None for any other op."""
    _, listed, name = op.partition("aten._foreach_")
    names = [f"aten.{name.partition('.')[0]}.{overload}" for overload in ("Tensor", "default", "Scalar")]
    single = next((OPS[name] for name in names if name in OPS), None)
    if not listed or single is None:
        return None

    def at(position: int, value: Any) -> Any:
        return value[position] if isinstance(value, list | tuple) else value

    def run(first: Sequence[Array], *args: Any, **kwargs: Any) -> list[Any]:
        return [
            single(own, *[at(n, arg) for arg in args], **{name: at(n, value) for name, value in kwargs.items()})
            for n, own in enumerate(first)
        ]

    return run
