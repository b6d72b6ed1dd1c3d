"""Checks for wrong calls that torch's shape functions accept and its kernels refuse.

If a check raises, the call becomes a query: a worker runs it while the client waits, and torch's own error is raised on
the user's line before anything is written. So a check may be too strict, which costs a wait, and its message is never
seen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from gt.client.op_schema import OpSchema
from gt.client.storage import Geometry, TensorRef
from gt.client.torch_patches.dispatch import disable_current_modes, packet_name, schema_of, tree_leaves, tree_map
from gt.core.meta import is_dense, memory_span

# Made by `python -m tests.conformance.kernel_dtypes`; a test compares it with torch.


TORCH_VERSION = "2.13.0"  # the version that the table was made with
# Names of dtypes, and the ops that refuse them.
_OPS = {
    "bool uint8 int8 int16 int32 int64 complex64 complex128": (
        "_adaptive_avg_pool2d _adaptive_avg_pool3d _batch_norm_with_update _log_softmax _native_batch_norm_legit "
        "_prelu_kernel _safe_softmax _scaled_dot_product_flash_attention_for_cpu _softmax _softmax_backward_data "
        "adaptive_max_pool2d adaptive_max_pool3d bernoulli binary_cross_entropy binary_cross_entropy_with_logits "
        "fractional_max_pool2d fractional_max_pool3d gelu_ glu grid_sampler_2d grid_sampler_3d hardswish hardswish_ "
        "histc huber_loss log_sigmoid_forward max_pool2d_with_indices_backward max_unpool2d max_unpool3d mish_ "
        "mse_loss native_batch_norm native_group_norm nll_loss2d_forward nll_loss_forward rrelu_with_noise "
        "rrelu_with_noise_ segment_reduce smooth_l1_loss upsample_linear1d upsample_trilinear3d"
    ),
    "bool uint8 int8 int16 int32 int64 float16 bfloat16 complex64 complex128": (
        "_cdist_forward _fft_r2c multi_margin_loss multilabel_margin_loss_forward"
    ),
    "float16 bfloat16": (
        "_linalg_det _linalg_solve_ex _linalg_svd linalg_cholesky_ex linalg_eig linalg_ldl_factor_ex linalg_ldl_solve "
        "linalg_lu_solve linalg_qr"
    ),
    "bool uint8 int8 int16 int32 int64 float16 bfloat16": (
        "_linalg_eigh cholesky cholesky_inverse cholesky_solve linalg_householder_product linalg_lu "
        "linalg_lu_factor_ex linalg_solve_triangular ormqr triangular_solve"
    ),
    "bool": (
        "_trilinear addbmm addbmm_ addmm addmv baddbmm bmm cumprod_ cumsum_ dot linalg_cross mm mv reflection_pad1d "
        "reflection_pad2d reflection_pad3d trace vdot"
    ),
    "bool int8 int16 int32 int64 float16 bfloat16 complex64 complex128": "_upsample_bilinear2d_aa",
    "bool int8 int16 int32 int64 complex64 complex128": (
        "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_bicubic2d "
        "upsample_bilinear2d upsample_nearest1d upsample_nearest2d upsample_nearest3d"
    ),
    "bool complex64 complex128": (
        "abs_ bucketize kthvalue max_pool2d_with_indices max_pool3d_with_indices median nanmedian searchsorted "
        "threshold_"
    ),
    "complex64 complex128": ("amax amin aminmax bernoulli_ cummax cummin hash_tensor le_ lt_ max min mode nansum sort"),
    "bool uint8 int8 int16 int32 complex64 complex128": "avg_pool2d convolution",
    "bool uint8 int8 int16 int32 float16 bfloat16 complex64 complex128": "avg_pool3d",
    "bool uint8 int8 int16 int32 int64": ("embedding_renorm_ logcumsumexp normal soft_margin_loss std uniform_ var"),
    "uint8 int8 int16 int32 int64": "im2col",
    "float16": "polar",
    "bool uint8 int8 int16 float16 bfloat16 float32 float64 complex64 complex128": "repeat_interleave",
}
REFUSED_DTYPES: dict[str, frozenset[torch.dtype]] = {
    op: frozenset([getattr(torch, dtype) for dtype in dtypes.split()])
    for dtypes, ops in _OPS.items()
    for op in ops.split()
}


_MOST_CATEGORIES = 1 << 24  # categories of `multinomial`
_MASKS = (torch.bool, torch.uint8)
# Ops whose kernels take tensors of one dtype only. Others promote, or have shape functions that refuse.
_ONE_DTYPE = frozenset(
    f"{name}{suffix}"
    for name in (
        "mm", "bmm", "mv", "dot", "vdot", "addmm", "addmv", "addbmm", "baddbmm", "addr", "linear", "_addmm_activation",
        "convolution", "convolution_backward", "binary_cross_entropy", "_prelu_kernel", "grid_sampler_2d",
        "grid_sampler_3d", "linalg_cross", "complex", "polar", "rrelu_with_noise", "_cdist_forward",
    )
    for suffix in ("", "_")
)  # fmt: skip


class MayBeRefused(Exception):
    """Torch's kernel refuses the call, or may."""


def check_arguments(op: OpSchema, args: Sequence[Any], kwargs: dict[str, Any], result: Any, on_cpu: bool) -> None:
    """Raise MayBeRefused if a kernel may refuse a call for which torch's shape function gave `result`."""
    check_special_cases(op, args, kwargs, result, on_cpu)
    refused = REFUSED_DTYPES.get(packet_name(op.func)) if on_cpu else None
    first = args[0] if args else None
    if refused is not None and isinstance(first, torch.Tensor) and first.dim() and first.dtype in refused:
        raise MayBeRefused


def check_special_cases(op: OpSchema, args: Sequence[Any], kwargs: dict[str, Any], result: Any, on_cpu: bool) -> None:
    """The checks without those of the table of refused dtypes."""
    special = _CHECKS.get(schema_of(op.func).name)
    if special is not None:
        special(*args, **kwargs)
    if op.random:
        return
    if on_cpu and torch.Tag.pointwise in op.func.tags:
        _try_on_one_element(op, args, kwargs, result)
    elif packet_name(op.func) in _ONE_DTYPE and len(_dtypes_of((args, kwargs))) > 1:
        raise MayBeRefused


def check_overlaps(op: OpSchema, refs: Sequence[TensorRef], written: Collection[int]) -> None:
    """Raise MayBeRefused if the elements of a written tensor share memory, or if an input shares some of it. These are
    the cases that torch finds without comparing all addresses. `written` are the positions of written tensors."""
    for position in written:
        target, geometry = refs[position], refs[position].geometry
        if any(step == 0 and size > 1 for size, step in zip(geometry.shape, geometry.stride, strict=True)):
            raise MayBeRefused
        others = [ref for place, ref in enumerate(refs) if place != position and ref.storage is target.storage]
        if any(_overlaps(op, geometry, other.geometry) for other in others):
            raise MayBeRefused


def _overlaps(op: OpSchema, target: Geometry, other: Geometry) -> bool:
    """Whether a tensor without gaps shares memory with another one. Pointwise ops may read what they write, if both are
    the same elements."""
    if not (is_dense(target.shape, target.stride) and is_dense(other.shape, other.stride)):
        return False
    (start, end), (first, last) = _bytes_of(target), _bytes_of(other)
    if (start, end) == (first, last) and target.stride == other.stride:
        return torch.Tag.pointwise not in op.func.tags and packet_name(op.func) != "copy_"
    return start < last and first < end


def _bytes_of(tensor: Geometry) -> tuple[int, int]:
    start = tensor.offset * tensor.dtype.itemsize
    return start, start + tensor.nbytes


def _try_on_one_element(op: OpSchema, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    """Run a pointwise op on one element: only its kernel knows which dtypes it takes."""
    with disable_current_modes():
        given, named = tree_map(_one_element, (tuple(args), kwargs))
        made = op.func(*given, **named)
    if [_dtype_of(leaf) for leaf in tree_leaves(made)] != [_dtype_of(leaf) for leaf in tree_leaves(result)]:
        raise MayBeRefused


def _one_element(value: Any) -> Any:
    return torch.ones([1] * value.dim(), dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def _dtypes_of(arguments: Any) -> set[torch.dtype]:
    return {leaf.dtype for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)}


def _dtype_of(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else None


def _check_values_fit(
    target: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, *_: Any
) -> None:
    """The values must have the target's dtype, and expand to its indexed part, whose size is known unless an index is a
    mask."""
    if values.dtype is not target.dtype:
        raise MayBeRefused
    if not any(index is not None and index.dtype in _MASKS for index in indices):
        values.expand(torch.ops.aten.index.Tensor(target, indices).shape)


def _check_not_empty(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    if tensor.numel() == 0:
        raise MayBeRefused


def _check_transposed_convolution(
    source: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> None:
    """The output padding must be smaller than the stride or the dilation. Kernels differ in whether they give an empty
    result, by the size of the batch too."""
    if not transposed:
        return
    sizes = [(source.shape[dim] - 1) * stride[dim - 2] + dilation[dim - 2] * (weight.shape[dim] - 1) + 1
             - 2 * padding[dim - 2] + output_padding[dim - 2] for dim in range(2, source.dim())]  # fmt: skip
    limits = zip(output_padding, stride, dilation, strict=True)
    if min(sizes) < 1 or any(extra >= max(step, gap) for extra, step, gap in limits):
        raise MayBeRefused


def _check_mask(tensor: torch.Tensor, mask: torch.Tensor, *_: Any) -> None:
    if mask.dtype is not torch.bool:
        raise MayBeRefused


def _check_put(tensor: torch.Tensor, index: torch.Tensor, source: torch.Tensor, *_: Any, **__: Any) -> None:
    if index.dtype is not torch.int64 or source.dtype is not tensor.dtype:
        raise MayBeRefused


def _check_dim(tensor: torch.Tensor, dim: int, *_: Any, **__: Any) -> None:
    rank = max(tensor.dim(), 1)
    if not -rank <= dim < rank:
        raise MayBeRefused


def _check_sort(tensor: torch.Tensor, *rest: Any, dim: int = -1, **_: Any) -> None:
    """The dim, which is the last of the positional arguments; `stable` comes by name."""
    _check_dim(tensor, next((each for each in rest if type(each) is int), dim))


def _check_index_of_dim(tensor: torch.Tensor, dim: int, index: torch.Tensor, *_: Any, **__: Any) -> None:
    _check_dim(tensor, dim)
    if index.dtype not in (torch.int32, torch.int64):
        raise MayBeRefused


def _check_filled_index(tensor: torch.Tensor, dim: int, index: torch.Tensor, *_: Any) -> None:
    if index.dtype is not torch.int64:
        raise MayBeRefused


def _check_norm(tensor: torch.Tensor, *rest: Any, **named: Any) -> None:
    """Weights and statistics have the dtype of the tensor, or are floats if that is of half precision."""
    others = {torch.float32} if tensor.dtype in (torch.float16, torch.bfloat16) else set()
    if _dtypes_of((rest, named)) - {tensor.dtype, *others}:
        raise MayBeRefused


def _check_no_bool(tensor: torch.Tensor, other: Any, *_: Any, **__: Any) -> None:
    if torch.bool in _dtypes_of((tensor, other)):
        raise MayBeRefused


def _check_boundaries(tensor: torch.Tensor, boundaries: torch.Tensor, *_: Any, **__: Any) -> None:
    if boundaries.dim() != 1:
        raise MayBeRefused


def _check_samples(
    weights: torch.Tensor, count: int, replacement: bool = False, *, out: torch.Tensor | None = None, **_: Any
) -> None:
    """The dtypes of the weights and of the samples, and the number of samples."""
    most = _MOST_CATEGORIES if replacement else weights.shape[-1]
    if out is not None and out.dtype is not torch.int64:
        raise MayBeRefused
    if not weights.is_floating_point() or not 0 < count <= most or weights.shape[-1] > _MOST_CATEGORIES:
        raise MayBeRefused


def _check_fits_storage(
    tensor: torch.Tensor, source: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> None:
    """A copy of the tensor must have all elements of the view."""
    if (offset or 0) + memory_span(size, stride) > tensor.numel():
        raise MayBeRefused


_CHECKS: dict[str, Callable[..., None]] = {
    "aten::index_put": _check_values_fit,
    "aten::index_put_": _check_values_fit,
    "aten::_index_put_impl_": _check_values_fit,
    "aten::_unsafe_index_put": _check_values_fit,
    "aten::max": _check_not_empty,
    "aten::min": _check_not_empty,
    "aten::aminmax": _check_not_empty,
    "aten::argmax": _check_not_empty,
    "aten::argmin": _check_not_empty,
    "aten::median": _check_not_empty,
    "aten::nanmedian": _check_not_empty,
    "aten::mode": _check_not_empty,
    "aten::kthvalue": _check_not_empty,
    "aten::_fft_c2c": _check_not_empty,
    "aten::_fft_c2r": _check_not_empty,
    "aten::_fft_r2c": _check_not_empty,
    "aten::cummax": _check_dim,
    "aten::cummin": _check_dim,
    "aten::dist": _check_no_bool,
    "aten::index_fill": _check_filled_index,
    "aten::index_fill_": _check_filled_index,
    "aten::index_select": _check_index_of_dim,
    "aten::masked_fill": _check_mask,
    "aten::masked_fill_": _check_mask,
    "aten::native_layer_norm": _check_norm,
    "aten::native_group_norm": _check_norm,
    "aten::native_batch_norm": _check_norm,
    "aten::_native_batch_norm_legit": _check_norm,
    "aten::_batch_norm_with_update": _check_norm,
    "aten::put": _check_put,
    "aten::put_": _check_put,
    "aten::rsub": _check_no_bool,
    "aten::sort": _check_sort,
    "aten::masked_scatter": _check_mask,
    "aten::masked_scatter_": _check_mask,
    "aten::bucketize": _check_boundaries,
    "aten::multinomial": _check_samples,
    "aten::as_strided_scatter": _check_fits_storage,
    "aten::convolution": _check_transposed_convolution,
}
