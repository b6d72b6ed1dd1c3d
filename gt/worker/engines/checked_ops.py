"""The ops whose kernels trust their arguments, and the checks that run before them.

Most of torch's kernels compare their arguments with each other, and raise. Those in `CHECKS` do not compare all of
them: with an index out of range, or with tensors whose sizes do not match, they read and write foreign memory and crash
the process. Torch has these checks elsewhere (in the function that the user calls, in autograd), which a client may
bypass. `make crash-detector` finds such ops.

A check of sizes costs microseconds. A check of values reads an index tensor once more; on CUDA it also waits for the
device, where the alternative is an assertion of a kernel that makes the whole context unusable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gt.worker.engines import op_family_checks as family
from gt.worker.engines.argument_checks import (
    Check,
    NamedArguments,
    as_forward_gives,
    compact,
    contiguous,
    dense,
    in_range,
    length,
    no_overlap,
    require_shape,
    same_dtype,
    same_shape,
    shapes,
)
from gt.worker.engines.torch_private import find_schema

_MOST_ELEMENTS = 1 << 48  # more than any tensor has

# Ops and their checks. The name of an op stands for all its overloads and its in-place variant; a name with an overload
# stands for that one only.
_BATCH_NORM = (
    shapes("input: N C ...; weight: C; bias: C; running_mean: C; running_var: C"),
    family.has_running_statistics,
    compact("weight", "bias"),
)
_BATCH_NORM_EVALUATED = (*_BATCH_NORM, lambda given: family.has_running_statistics({**given, "training": False}))
_BATCH_NORM_GRADIENT = (
    *_BATCH_NORM,
    same_shape("input", "grad_out"),
    family.saved_statistics,
)
_SOFTMAX_GRADIENT = (same_shape("output", "grad_output"),)
_FUSED_STEP = (
    family.valid_fused_step,
    same_shape("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_sums", "momentum_buffer_list"),
    same_dtype("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_sums", "momentum_buffer_list"),
    family.same_strides,
)
_CTC = (shapes("log_probs: T N C"), family.valid_ctc, contiguous("targets"))
_BAGS = (family.valid_bags, contiguous("weight", "indices", "offsets", "per_sample_weights"))


def _pool_gradient(forward: str, arguments: str, spatial: int) -> tuple[Check, ...]:
    lists = [name for name in ("kernel_size", "padding", "dilation") if name in arguments.split()]
    return (*[length(name, 1, spatial) for name in lists], as_forward_gives(forward, arguments, "grad_output"))


def _padding(name: str) -> Check:
    """Kernels add padding to a size without a check of overflow, and then read beyond the tensor."""
    return in_range(name, lambda _: _MOST_ELEMENTS, lowest=-_MOST_ELEMENTS)


def _pad_gradient(kind: str, spatial: int) -> tuple[Check, ...]:
    forward = as_forward_gives(f"aten.{kind}_pad{spatial}d.default", "self padding", "grad_output")
    return (_padding("padding"), length("padding", 2 * spatial), forward)


def _margin_gradient(forward: str, arguments: str, batch_rank: int) -> Check:
    """The gradient of a loss that is one number for targets of fewer dims, where torch's shape function gives it a
    dim."""
    of_batch = as_forward_gives(f"aten.{forward}.default", arguments, "grad_output")

    def check(given: NamedArguments) -> None:
        if given["target"].dim() < batch_rank:
            require_shape(given, ("grad_output",), (), "the loss of an input without a batch is one number")
        else:
            of_batch(given)

    return check


_PADS = [(kind, spatial) for kind in ("reflection", "replication") for spatial in (1, 2, 3)]

_MAX_POOL = "self kernel_size stride padding dilation ceil_mode"
_AVG_POOL = "self kernel_size stride padding ceil_mode count_include_pad divisor_override"
_GRID = "input grid interpolation_mode padding_mode align_corners"

CHECKS: dict[str, tuple[Check, ...]] = {
    "_batch_norm_with_update": _BATCH_NORM,
    "_batch_norm_with_update_functional": _BATCH_NORM,
    "_batch_norm_no_update": _BATCH_NORM_EVALUATED,
    "_native_batch_norm_legit": _BATCH_NORM,
    "_native_batch_norm_legit_functional": _BATCH_NORM,
    "_native_batch_norm_legit_no_training": (
        *_BATCH_NORM,
        lambda given: family.has_running_statistics({**given, "training": False}),
    ),
    "native_batch_norm": _BATCH_NORM,
    "native_batch_norm_backward": _BATCH_NORM_GRADIENT,
    "batch_norm_backward": _BATCH_NORM_GRADIENT,
    "batch_norm_update_stats": _BATCH_NORM,
    "native_group_norm": (family.valid_group_norm, compact("input", "weight", "bias")),
    "native_group_norm_backward": (
        family.valid_group_norm,
        same_shape("input", "grad_out"),
        compact("grad_out", "input", "mean", "rstd", "weight"),
        family.group_norm_in_rows,
    ),
    "native_layer_norm_backward": (
        same_shape("input", "grad_out"),
        family.valid_norm_gradient,
        compact("mean", "rstd"),
    ),
    "_cdist_backward": (as_forward_gives("aten._cdist_forward.default", "x1 x2 p compute_mode", "grad", "cdist"),),
    "_ctc_loss": _CTC,
    "_ctc_loss_backward": (*_CTC, family.valid_ctc_backward),
    "_embedding_bag": _BAGS,
    "_embedding_bag_forward_only": _BAGS,
    "_fft_c2c": (family.dims_exist,),
    "_fft_c2r": (family.dims_exist,),
    "_fft_r2c": (family.dims_exist,),
    "_fused_adam": _FUSED_STEP,
    "_fused_adamw": _FUSED_STEP,
    "_fused_sgd": _FUSED_STEP,
    "_fused_adagrad": _FUSED_STEP,
    "_log_softmax_backward_data": _SOFTMAX_GRADIENT,
    "_softmax_backward_data": _SOFTMAX_GRADIENT,
    "_scaled_dot_product_flash_attention_for_cpu": (
        family.valid_attention,
        family.last_dims_contiguous("query", "key", "value"),
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        family.valid_attention,
        family.valid_attention_backward,
        family.last_dims_contiguous("query", "key", "value", "out", "grad_out", "logsumexp"),
    ),
    "segment_reduce": (family.valid_segments,),
    "_segment_reduce_backward": (family.valid_segments, family.valid_segments_backward),
    "_upsample_bilinear2d_aa.default": (length("output_size", 2), family.scales_fit),
    "_upsample_bilinear2d_aa.out": (length("output_size", 2), family.scales_fit),
    "_weight_norm_interface": (family.valid_weight_norm, same_dtype("v", "g"), contiguous("v", "g")),
    "_weight_norm_interface_backward": (
        family.valid_weight_norm_gradient,
        same_dtype("saved_v", "saved_g", "grad_w"),
        contiguous("grad_w", "saved_v", "saved_g", "saved_norms"),
    ),
    "adaptive_max_pool2d_backward": (family.pooled(2), compact("indices")),
    "adaptive_max_pool3d_backward": (family.pooled(3), compact("indices")),
    "fractional_max_pool2d_backward": (family.pooled(2), compact("indices")),
    "fractional_max_pool3d_backward": (family.pooled(3), compact("indices")),
    "max_pool2d_with_indices_backward": (
        *_pool_gradient("aten.max_pool2d_with_indices.default", _MAX_POOL, 2),
        family.pooled(2),
        compact("indices"),
    ),
    "max_pool3d_with_indices_backward": (
        *_pool_gradient("aten.max_pool3d_with_indices.default", _MAX_POOL, 3),
        family.pooled(3),
        compact("indices"),
    ),
    "avg_pool2d_backward": _pool_gradient("aten.avg_pool2d.default", _AVG_POOL, 2),
    "avg_pool3d_backward": _pool_gradient("aten.avg_pool3d.default", _AVG_POOL, 3),
    "grid_sampler_2d_backward": (
        as_forward_gives("aten.grid_sampler_2d.default", _GRID, "grad_output"),
        family.grid_has_no_nan,
    ),
    "grid_sampler_3d_backward": (
        as_forward_gives("aten.grid_sampler_3d.default", _GRID, "grad_output"),
        family.grid_has_no_nan,
    ),
    **{f"{kind}_pad{spatial}d": (_padding("padding"),) for kind, spatial in _PADS},
    **{f"{kind}_pad{spatial}d_backward": _pad_gradient(kind, spatial) for kind, spatial in _PADS},
    "pad": (_padding("pad"),),
    "_pad_enum": (_padding("pad"),),
    "unfold_backward": (family.valid_unfold_gradient,),
    "median.dim": (compact("self"),),  # torch copies the wrong memory of an expanded tensor
    "median.dim_values": (compact("self"),),
    "nanmedian.dim": (compact("self"),),
    "nanmedian.dim_values": (compact("self"),),
    "multi_margin_loss_backward": (
        _margin_gradient("multi_margin_loss", "self target p margin weight reduction", batch_rank=1),
    ),
    "multilabel_margin_loss_backward": (
        _margin_gradient("multilabel_margin_loss_forward", "self target reduction", batch_rank=2),
    ),
    "_convert_indices_from_coo_to_csr": (in_range("self", lambda given: given["size"]), contiguous("self")),
    "nll_loss_backward": (family.valid_class_indices,),
    "rrelu_with_noise": (same_shape("self", "noise", "out"), dense("noise")),
    "mkldnn_rnn_layer": (
        family.valid_rnn,
        contiguous("input", "weight0", "weight1", "weight2", "weight3", "hx_", "cx_"),
    ),
    "mkldnn_rnn_layer_backward": (
        family.valid_rnn_gradient,
        contiguous("input", "weight1", "weight2", "weight3", "weight4", "hx_", "cx_tmp", "workspace"),
        contiguous("output", "hy_", "cy_", "grad_output", "grad_hy", "grad_cy"),
    ),
    "linalg_ldl_solve": (family.valid_pivots,),
    "lu_unpack": (family.valid_lu_pivots,),
    "linalg_eigvals": (family.is_finite,),
    "linalg_matrix_power": (family.power_exists,),
    "lcm": (family.multiple_exists,),
    "div.Tensor_mode": (family.quotient_exists,),
    "div.Scalar_mode": (family.quotient_exists,),
    "div.out_mode": (family.quotient_exists,),
    "divide.Tensor_mode": (family.quotient_exists,),
    "divide.Scalar_mode": (family.quotient_exists,),
    "divide.out_mode": (family.quotient_exists,),
    "range.out": (family.steps_advance,),
    "range.step": (family.steps_advance,),
    "stack.out": (family.result_has_strides,),
    "_foreach_copy": (family.same_length,),
}


# Ops whose kernels find the matrices of an `out=` by one stride for all batch dims, and so write outside of a permuted
# one. They write to a row-major copy, which is then copied to it.
WRITES_ROW_MAJOR = frozenset({"linalg_lu", "lu_unpack", "tril", "triu"})


def has_checks(op: str) -> bool:
    name, overload = op.split(".")[1:]
    plain = name.removesuffix("_")
    return plain in CHECKS or f"{plain}.{overload}" in CHECKS


def checked(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of an op with the checks of its arguments before it; the same function if it has none."""
    _, name, overload = op.split(".")
    parameters = find_schema(op).arguments
    written = [parameter.name for parameter in parameters if parameter.is_out]
    plain = name.removesuffix("_")
    checks = (
        *CHECKS.get(plain, ()),
        *CHECKS.get(f"{plain}.{overload}", ()),
        *([no_overlap(*written)] if written else ()),
    )
    if not checks:
        return function
    if name in WRITES_ROW_MAJOR and written:
        function = _writing_row_major(function, written)
    names = [parameter.name for parameter in parameters]
    defaults = {parameter.name: parameter.default_value for parameter in parameters if parameter.has_default_value()}

    def run(*args: Any, **kwargs: Any) -> Any:
        given = defaults | dict(zip(names, args, strict=False)) | kwargs
        try:
            for check in checks:
                given |= check(given) or {}
        except (IndexError, ValueError) as error:
            raise type(error)(f"{op}: {error}") from None
        return function(*[given[name] for name in names[: len(args)]], **{name: given[name] for name in kwargs})

    return run


def _writing_row_major(function: Callable[..., Any], written: Sequence[str]) -> Callable[..., Any]:
    """The function of an op with a detour for its `out=` arguments, whose names are `written`: where one is not
    contiguous the op writes to a row-major copy, which is then copied to it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        copies = {name: kwargs[name].contiguous() for name in written if not kwargs[name].is_contiguous()}
        results = function(*args, **(kwargs | copies))
        for name, copy in copies.items():
            kwargs[name].resize_(copy.shape).copy_(copy)
        return kwargs[written[0]] if len(written) == 1 else type(results)([kwargs[name] for name in written])

    return run
