"""Shapes, dtypes and strides of an op's results, as torch's CPU kernels give them, from tensors without bytes.

Many of torch's shape functions are Python functions that hide the C++ ones which CPU kernels share. Both agree on
shapes and dtypes, but not always on strides, by which autograd and kernels lay out their results. So the C++ function
is called if there is one; for other ops the table at the end has the strides of the kernel's results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from gt.client.torch_patches.dispatch import (
    DispatchKey,
    OpOverload,
    has_kernel,
    kernel_of,
    packet_name,
    schema_of,
    tree_flatten,
    tree_unflatten,
)
from gt.client.torch_strides import (
    Strides,
    broadcast,
    column_major_strides,
    convolution,
    convolution_gradients,
    dense_format,
    iterated_strides,
    strides_in_format,
    strides_without_gaps,
    suggested_format,
)
from gt.core.meta import contiguous_strides, dense_strides, is_dense, memory_order

NamedArguments: TypeAlias = dict[str, Any]
StrideRule: TypeAlias = Callable[[NamedArguments, Sequence[torch.Tensor | None]], Sequence[Strides | None]]
"""Gives the strides of an op's results from its arguments by name and the results of the shape function; None if the
latter have the right strides."""

aten = torch.ops.aten
_STRUCTURED = DispatchKey.CompositeExplicitAutogradNonFunctional
_COMPOSITE = DispatchKey.CompositeExplicitAutograd


def run_shape_function(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an op for tensors without bytes. Raises the errors of torch's shape function."""
    shape_function, rule = _functions(func)
    result = shape_function(*args, **kwargs)
    if torch.Tag.pointwise in func.tags and packet_name(func) not in _NOT_CAST:
        args, was_cast = _cast(args, result)
        result = shape_function(*args, **kwargs) if was_cast else result
    if rule is None:
        return result
    leaves, spec = tree_flatten(result)
    names = [argument.name for argument in schema_of(func).arguments]
    strides = rule(dict(zip(names, args, strict=False)) | kwargs, leaves)
    return tree_unflatten([_restrided(*pair) for pair in zip(leaves, strides, strict=True)], spec)


@functools.cache
def _functions(func: OpOverload) -> tuple[Callable[..., Any], StrideRule | None]:
    """The best shape function of an op, and the rule for the strides of its results, if it needs one."""
    rule = _RULES.get(schema_of(func).name.removeprefix("aten::"))
    if schema_of(func).is_mutable:
        return func, rule
    if has_kernel(func, _STRUCTURED):
        return kernel_of(func, _STRUCTURED), rule
    if rule is not None or torch.Tag.pointwise not in func.tags or packet_name(func) in _NOT_ITERATED:
        return func, rule
    return func, _iterated_with_numbers if _wraps_numbers(func) else _iterated


def has_own_strides(func: OpOverload) -> bool:
    """Whether an op has its own rule for the strides of its results, or is pointwise and does not iterate over its
    operands."""
    return schema_of(func).name.removeprefix("aten::") in _RULES or packet_name(func) in _NOT_ITERATED


def _wraps_numbers(func: OpOverload) -> bool:
    """Whether a pointwise op calls another one on the CPU, with tensors in place of its numbers."""
    return has_kernel(func, _COMPOSITE) and not has_kernel(func, DispatchKey.CPU)


def _cast(args: Sequence[Any], result: Any) -> tuple[list[Any], bool]:
    """The operands of a pointwise op, and whether one was replaced. On the CPU such an op first copies operands of
    other dtypes than the one that it computes in, and a copy has no gaps."""
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if not isinstance(result, torch.Tensor) or not tensors:
        return list(args), False
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    dtype = result.dtype if torch.promote_types(dtype, result.dtype) is result.dtype else dtype
    cast = [_copied(value, dtype) if isinstance(value, torch.Tensor) else value for value in args]
    return cast, any(after is not before for after, before in zip(cast, args, strict=True))


def _copied(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype is dtype or is_dense(tensor.shape, tensor.stride()):
        return tensor
    return tensor.to(dtype).to(tensor.dtype)


def _restrided(tensor: Any, stride: Strides | None) -> Any:
    if stride is None or not isinstance(tensor, torch.Tensor) or tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="meta")


def _iterated(arguments: NamedArguments, results: Sequence[torch.Tensor | None]) -> list[Strides | None]:
    """A kernel that iterates over its operands gives its result strides like theirs."""
    return _iterate([value for value in arguments.values() if isinstance(value, torch.Tensor)], 0, results)


def _iterated_with_numbers(arguments: NamedArguments, results: Sequence[torch.Tensor | None]) -> list[Strides | None]:
    """As `_iterated`, with a tensor for each number that is an operand. It changes the order of dims with the same
    stride."""
    operands = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    numbers = [name for name in ("self", "other") if isinstance(arguments.get(name), int | float | complex)]
    return _iterate(operands, len(numbers), results)


def _iterate(
    operands: Sequence[torch.Tensor], numbers: int, results: Sequence[torch.Tensor | None]
) -> list[Strides | None]:
    strided = [(tuple(operand.shape), operand.stride()) for operand in operands]
    shape = broadcast([own for own, _ in strided]) if strided else None
    if shape is None or 0 in shape:
        return [None for _ in results]
    stride = iterated_strides(shape, [*strided, *[((), ())] * numbers])
    return [stride if result is not None and result.shape == shape else None for result in results]


# Pointwise ops that do not iterate over their operands as they are; their shape functions are right.
_NOT_ITERATED = ("mvlgamma",)
_NOT_CAST = ("where",)  # pointwise ops that take operands of several dtypes as they are


def _scaled(arguments: NamedArguments, results: Sequence[torch.Tensor | None]) -> list[Strides | None]:
    """Strides of `ldexp`, which multiplies by a contiguous power."""
    power = run_shape_function(aten.pow.Scalar, (2.0, arguments["other"]), {})
    return _iterated({"self": arguments["self"], "other": power}, results)


def _contiguous(arguments: NamedArguments, results: Sequence[torch.Tensor | None]) -> list[Strides | None]:
    return [None if result is None else contiguous_strides(tuple(result.shape)) for result in results]


def _like(name: str) -> StrideRule:
    """The memory format of an argument, if it is a channels-last one; otherwise contiguous."""

    def rule(arguments: NamedArguments, results: Sequence[torch.Tensor | None]) -> list[Strides | None]:
        format_ = suggested_format(arguments[name])
        return [None if result is None else strides_in_format(result, format_) for result in results]

    return rule


def _group_norm_backward(arguments: NamedArguments, results: Sequence[torch.Tensor | None]) -> list[Strides | None]:
    """As `_like`; since torch 2.15 an input that is contiguous in its memory format keeps its own strides, which may be
    others in dims of one element."""
    found = list(_like("input")(arguments, results))
    given = arguments["input"]
    if _GROUP_NORM_KEEPS_STRIDES and given.is_contiguous(memory_format=suggested_format(given)):
        found[0] = given.stride() if results[0] is not None else None
    return found


def _group_norm_keeps_strides() -> bool:
    given, mean = torch.empty_strided((1, 2, 1), (1, 1, 1), device="cpu"), torch.empty(1, 1, device="cpu")
    backward = torch.ops.aten.native_group_norm_backward
    return bool(backward(given, given, mean, mean, None, 1, 2, 1, 1, [True, False, False])[0].stride() == (1, 1, 1))


_GROUP_NORM_KEEPS_STRIDES = _group_norm_keeps_strides()


def _preserved(name: str = "self") -> StrideRule:
    """The strides of an argument, as `empty_like` keeps them; a tensor with gaps or overlaps keeps the order of its
    dims. `memory_format` asks for other strides."""

    def rule(arguments: NamedArguments, results: Sequence[torch.Tensor | None]) -> list[Strides | None]:
        source, format_ = arguments[name], arguments.get("memory_format")
        keeps = format_ in (None, torch.preserve_format)
        stride = strides_without_gaps(source) if keeps else strides_in_format(source, format_)
        return [stride if result is not None and result.shape == source.shape else None for result in results]

    return rule


def _absolute(arguments: NamedArguments, results: Sequence[torch.Tensor | None]) -> Sequence[Strides | None]:
    """Absolute values of complex numbers have another dtype: torch makes a tensor like the argument and fills it."""
    rule = _preserved() if arguments["self"].is_complex() else _iterated
    return rule(arguments, results)


def _attention(arguments: NamedArguments, results: Sequence[torch.Tensor | None]) -> list[Strides | None]:
    """The kernel makes a tensor like the query with heads and rows exchanged, which is in order for most queries."""
    batch, rows, heads, width = strides_without_gaps(arguments["query"].transpose(1, 2))
    return [(batch, heads, rows, width), *[None] * (len(results) - 1)]


def _batch_norm(arguments: NamedArguments, results: Sequence[torch.Tensor | None]) -> list[Strides | None]:
    """Strides as of C++'s `batch_norm_cpu`."""
    format_ = _batch_norm_format(arguments["input"])
    return [None if result is None else strides_in_format(result, format_) for result in results]


def _batch_norm_backward(arguments: NamedArguments, results: Sequence[torch.Tensor | None]) -> list[Strides | None]:
    """Strides as of C++'s `batch_norm_backward_cpu_template`. Its fast kernel needs an input and a gradient in the same
    format. The other one takes the format from all strides of the input, also from those of dims of one element."""
    source, gradient = arguments["input"], arguments["grad_out"]
    format_ = suggested_format(source)
    if format_ is suggested_format(gradient) and dense_format(gradient) is not None:
        format_ = _batch_norm_format(source)
    return [None if result is None else strides_in_format(result, format_) for result in results]


def _batch_norm_format(source: torch.Tensor) -> torch.memory_format:
    """Images that are row-major stay so, also those of one channel or pixel, which are channels-last too."""
    return dense_format(source) or suggested_format(source)


def _rolled(arguments: NamedArguments, results: Sequence[torch.Tensor | None]) -> Sequence[Strides | None]:
    """Torch rolls a tensor dim by dim, by concatenating its two parts; without dims as if it were flat."""
    source, dims = arguments["self"], arguments.get("dims")
    if not dims or not source.numel():
        return _contiguous(arguments, results)
    for shift, dim in zip(arguments["shifts"], dims, strict=True):
        size = source.shape[dim]
        parts = source.split([shift % size, size - shift % size], dim)[::-1]
        source = run_shape_function(aten.cat.default, (parts, dim), {})
    return [source.stride()]


def _rotated(arguments: NamedArguments, results: Sequence[torch.Tensor | None]) -> Sequence[Strides | None]:
    """Torch flips one or two dims, and exchanges them."""
    source, turns = arguments["self"], arguments.get("k", 1) % 4
    stride = list(strides_without_gaps(source))
    if turns == 0:
        return _contiguous(arguments, results)
    if turns != 2:
        first, second = arguments.get("dims", (0, 1))
        stride[first], stride[second] = stride[second], stride[first]
    return [tuple(stride)]


def _prelu_gradients(arguments: NamedArguments, results: Sequence[torch.Tensor | None]) -> list[Strides | None]:
    return _iterate([arguments[name] for name in ("self", "weight", "grad_output")], 0, results)


def _angle(arguments: NamedArguments, results: Sequence[torch.Tensor | None]) -> Sequence[Strides | None]:
    return (_contiguous if arguments["self"].is_complex() else _iterated)(arguments, results)


def _infinite(arguments: NamedArguments, results: Sequence[torch.Tensor | None]) -> list[Strides | None]:
    """Of complex numbers, torch tells it from their real and imaginary parts, which are views with gaps."""
    tensor = arguments["self"]
    return _iterated({"self": torch.view_as_real(tensor).select(-1, 0) if tensor.is_complex() else tensor}, results)


def _columns(*positions: int) -> StrideRule:
    """Matrices with contiguous columns, as LAPACK gives them, at these positions of the results."""

    def rule(arguments: NamedArguments, results: Sequence[torch.Tensor | None]) -> list[Strides | None]:
        return [
            column_major_strides(result) if position in positions and result is not None else None
            for position, result in enumerate(results)
        ]

    return rule


def _fourier(arguments: NamedArguments, results: Sequence[torch.Tensor | None]) -> list[Strides | None]:
    """MKL transforms the last dims of memory: the dims of the batch lie around them, in the order of their strides."""
    source, dims = arguments["self"], [dim % arguments["self"].dim() for dim in arguments["dim"]]
    (result,) = results
    if result is None or not torch.backends.mkl.is_available():
        return _contiguous(arguments, results)
    if not dims:
        return [None]
    if "last_dim_size" in arguments and len(dims) > 1:  # the other dims are transformed first
        source = run_shape_function(aten._fft_c2c.default, (source, dims[:-1], 0, False), {})
        dims = dims[-1:]
    last = [] if "forward" in arguments else dims[-1:]  # a dim of real numbers is the innermost
    by_stride = memory_order(source.stride())
    batch = [dim for dim in by_stride if dim not in dims]
    inner = [dim for dim in by_stride if dim in dims and dim not in last]
    order = (*batch, *inner, *last)
    return [dense_strides(result.shape, [-order.index(dim) for dim in range(result.dim())])]


def _stacked(arguments: NamedArguments, results: Sequence[torch.Tensor | None]) -> list[Strides | None]:
    """Torch's kernel concatenates; the Python shape function of torch 2.10 gives other strides."""
    tensors, (result,) = arguments["tensors"], results
    if result is None or any(tensor.shape != tensors[0].shape for tensor in tensors):
        return [None]
    dim = arguments.get("dim", 0) % result.dim()
    is_last = dim == result.dim() - 1
    parts = [tensor.unsqueeze(dim) for tensor in tensors] if is_last else list(tensors)
    joined = run_shape_function(aten.cat.default, (parts, dim), {})
    return [(joined if is_last else joined.view(result.shape)).stride()]


_RULES: dict[str, StrideRule] = {
    "_batch_norm_no_update": _batch_norm,
    "_batch_norm_with_update": _batch_norm,
    "_batch_norm_with_update_functional": _batch_norm,
    "_conj_physical": _preserved(),
    "deg2rad": _preserved(),
    "rad2deg": _preserved(),
    "_fft_c2c": _fourier,
    "_fft_c2r": _fourier,
    "_fft_r2c": _fourier,
    "_native_batch_norm_legit": _batch_norm,
    "_native_batch_norm_legit_functional": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_prelu_kernel": _preserved(),
    "_prelu_kernel_backward": _prelu_gradients,
    "_to_copy": _preserved(),
    "_unsafe_index_put": _preserved(),
    "_unsafe_masked_index_put_accumulate": _preserved(),
    "abs": _absolute,
    "angle": _angle,
    "isinf": _infinite,
    "batch_norm_backward": _batch_norm_backward,
    "binary_cross_entropy": _preserved(),
    "binary_cross_entropy_backward": _preserved(),
    "channel_shuffle": _like("self"),
    "clone": _preserved(),
    "convolution": convolution,
    "convolution_backward": convolution_gradients,
    "empty_like": _preserved(),
    "flip": _preserved(),
    "floor_divide": _iterated,
    "full_like": _preserved(),
    "glu_backward": _contiguous,
    "hardswish_backward": _iterated,
    "hardtanh": _preserved(),
    "hardtanh_backward": _iterated,
    "huber_loss": _preserved(),
    "huber_loss_backward": _contiguous,
    "index_fill": _preserved(),
    "index_put": _preserved(),
    "ldexp": _scaled,
    "linalg_eig": _columns(1),
    "log_sigmoid_forward": _contiguous,
    "masked_fill": _contiguous,
    "masked_scatter": _contiguous,
    "max_unpool2d": _like("self"),
    "mse_loss_backward": _contiguous,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "native_channel_shuffle": _like("self"),
    "native_dropout_backward": _iterated,
    "native_group_norm": _like("input"),
    "native_group_norm_backward": _group_norm_backward,
    "native_layer_norm": _contiguous,
    "native_layer_norm_backward": _contiguous,
    "nonzero_static": _contiguous,
    "normal": _contiguous,
    "ones_like": _preserved(),
    "pixel_shuffle": _like("self"),
    "pixel_unshuffle": _like("self"),
    "put": _preserved(),
    "rand_like": _preserved(),
    "randint_like": _preserved(),
    "randn_like": _preserved(),
    "reflection_pad2d": _like("self"),
    "reflection_pad2d_backward": _like("self"),
    "reflection_pad3d": _like("self"),
    "reflection_pad3d_backward": _like("self"),
    "replication_pad2d": _like("self"),
    "replication_pad2d_backward": _like("self"),
    "replication_pad3d": _like("self"),
    "replication_pad3d_backward": _like("self"),
    "roll": _rolled,
    "rot90": _rotated,
    "rrelu_with_noise": _contiguous,
    "smooth_l1_loss_backward": _contiguous,
    "sort": _preserved(),
    "stack": _stacked,
    "zeros_like": _preserved(),
}
