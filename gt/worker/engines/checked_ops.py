"""The ops whose kernels trust their arguments, and the checks that run before them.

Most of torch's kernels compare their arguments with each other, and raise. Those of `CHECKS` do not compare all of
them: with an index out of range, or with tensors whose sizes do not match, they read and write foreign memory and crash
the process. Torch has these checks elsewhere (in the function that the user calls, in autograd), which a client may
bypass. `make crash-detector` finds such ops.

A check of sizes costs microseconds. A check of values reads an index tensor once more; on CUDA it also waits for the
device, where the alternative is an assertion of a kernel that makes the whole context unusable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, TypeAlias

import torch

from gt.worker.engines.argument_checks import (
    Check,
    has_shape,
    in_range,
    no_overlap,
    parse_checks,
    put,
    rule,
    shape_of,
)
from gt.worker.engines.op_family_checks import (
    are_gates,
    are_single,
    are_statistics,
    broadcasts,
    come_in_pairs,
    dims_exist,
    forward_shape,
    has_lowest,
    have_equal_strides,
    in_rows,
    margin_shape,
    norms_shape,
    numbers,
    reaches,
    used_targets,
    with_strides_of,
    workspace_bytes,
)
from gt.worker.engines.torch_private import find_schema

Checks: TypeAlias = tuple[str | Check, ...]

_BATCH_NORM = "input: batch channels ...; weight bias running_mean running_var: channels; compact: weight bias"
_STATISTICS = rule(
    lambda running_mean, running_var, training, train: (
        training or train or (running_mean is not None and running_var is not None)
    ),
    "the statistics are needed if training is False",
)
_GROUP_NORM = (
    rule(
        lambda input_, n, c, hw, groups: (
            min(n, c, hw) >= 0 < groups and c % groups == 0 and input_.numel() == n * c * hw
        ),
        names="input N C HxW group",
    ),
    "input: N C ...; weight bias: C; mean rstd: N group; compact: grad_out input weight bias mean rstd",
)
_CTC = (
    "log_probs: steps batch classes",
    rule(lambda input_lengths, batch: len(numbers(input_lengths)) == batch),
    rule(lambda target_lengths, batch: len(numbers(target_lengths)) == batch),
    in_range("input_lengths", lambda steps: steps + 1),
    in_range("target_lengths", lambda targets: (targets.shape[1] if targets.dim() == 2 else targets.numel()) + 1),
    rule(lambda targets, batch: targets.dim() == 1 or (targets.dim() == 2 and len(targets) == batch)),
    rule(lambda targets, target_lengths: targets.dim() == 2 or len(targets) == sum(numbers(target_lengths))),
    in_range(used_targets, lambda classes: classes),
    in_range("blank", lambda classes: classes),
    "contiguous: targets",
)
_SEGMENTS = (  # no negative lengths, ascending offsets, no end after the last row
    put("segments", lambda lengths, offsets: offsets if lengths is None else lengths),
    rule(lambda segments, data, axis: segments is not None and 0 <= axis < data.dim() and segments.dim() == axis + 1),
    rule(lambda segments, data, axis: segments.shape[:-1] == data.shape[:axis]),
    put("steps", lambda segments, lengths: segments.diff(dim=-1) if lengths is None else segments),
    put("ends", lambda segments, lengths: segments if lengths is None else segments.sum(-1)),
    in_range("steps", lambda data, axis: data.shape[axis] + 1),
    in_range("ends", lambda data, axis: data.shape[axis] + 1),
)
_STATE = "exp_avgs exp_avg_sqs max_exp_avg_sqs state_sums momentum_buffer_list"
_FUSED_STEP = (
    "same length: self grads exp_avgs exp_avg_sqs state_sums state_steps",
    rule(lambda self, amsgrad, max_exp_avg_sqs: not amsgrad or len(max_exp_avg_sqs) == len(self)),
    rule(lambda self, momentum, momentum_buffer_list: not momentum or len(momentum_buffer_list) == len(self)),
    rule(are_single, "tensors must have one number", "state_steps lr grad_scale found_inf"),
    f"same shape: self grads {_STATE}; same dtype: self grads {_STATE}",
    rule(have_equal_strides, "the state must have the strides of self", f"self {_STATE}"),
    put("grads", with_strides_of, "grads self grad_scale"),
)
_LSTM = (
    rule(
        lambda mode, hidden_size, batch_sizes: mode == 2 and hidden_size > 0 and not batch_sizes,
        "only a layer of an LSTM (mode 2) over padded sequences (no batch_sizes) can be run",
    ),
    rule(lambda input_: input_.numel() > 0, names="input"),
    "input: T N I; hx_ cx_ cx_tmp hy_ cy_ grad_hy grad_cy: N hidden_size; output grad_output: T N hidden_size",
)
_MOST = 1 << 48  # elements: kernels add padding to a size without a check of overflow, and then read beyond the tensor


def _pooled(spatial: int) -> Checks:
    """For the gradient of pooling over `spatial` dims: an index into a plane of `self` per element of the result."""
    return (
        "same shape: grad_output indices",
        rule(lambda self, grad_output: self.dim() == grad_output.dim() >= spatial),
        rule(lambda self, grad_output: self.shape[:-spatial] == grad_output.shape[:-spatial]),
        rule(lambda output_size, grad_output: output_size is None or [*output_size] == [*grad_output.shape[-spatial:]]),
        in_range("indices", lambda self: prod(self.shape[-spatial:])),
        "compact: indices",
    )


def _pool_gradient(op: str, spatial: int, arguments: str) -> Checks:
    def are_sizes(*lists: Sequence[int] | None) -> bool:
        return all(each is None or len(each) in (1, spatial) for each in lists)

    return (
        rule(are_sizes, f"lists must have 1 or {spatial} sizes", "kernel_size padding dilation"),
        shape_of(op, f"self kernel_size stride padding {arguments}", "grad_output"),
    )


def _grid_gradient(op: str) -> Checks:
    """Paddings other than zeros clip coordinates to the border, which does not work for nan."""
    return (
        shape_of(op, "input grid interpolation_mode padding_mode align_corners", "grad_output"),
        rule(lambda grid, padding_mode: padding_mode == 0 or not bool(grid.isnan().any()), "nan is no place"),
    )


def _pad_gradient(kind: str, spatial: int) -> Checks:
    return (
        in_range("padding", lambda: _MOST, -_MOST),
        rule(lambda padding: len(padding) == 2 * spatial),
        shape_of(f"{kind}_pad{spatial}d.default", "self padding", "grad_output"),
    )


_PADS = [(kind, spatial) for kind in ("reflection", "replication") for spatial in (1, 2, 3)]

# Ops and their checks. The name of an op stands for all its overloads and its in-place variant; a name with an overload
# stands for that one only.
_TABLE: dict[str, Checks] = {
    "_batch_norm_with_update _batch_norm_with_update_functional batch_norm_update_stats": (_BATCH_NORM,),
    "_native_batch_norm_legit _native_batch_norm_legit_functional native_batch_norm": (_BATCH_NORM, _STATISTICS),
    "_batch_norm_no_update _native_batch_norm_legit_no_training": (_BATCH_NORM, _STATISTICS),
    "native_batch_norm_backward": (
        f"{_BATCH_NORM}; same shape: input grad_out",
        _STATISTICS,
        rule(
            lambda channels, train, *saved: not train or are_statistics(channels, *saved),
            names="channels train save_mean save_invstd",
        ),
    ),
    "batch_norm_backward": (
        f"{_BATCH_NORM}; same shape: input grad_out",
        rule(
            lambda channels, update, *saved: not update or are_statistics(channels, *saved),
            names="channels update save_mean save_var",
        ),
    ),
    "native_group_norm": _GROUP_NORM,
    "native_group_norm_backward": (
        *_GROUP_NORM,
        "same shape: input grad_out",
        put("grad_out", in_rows, "grad_out output_mask"),
        put("input", in_rows, "input output_mask"),
    ),
    "native_layer_norm_backward": (
        "same shape: input grad_out",
        rule(lambda rows, sizes: sizes and [*rows.shape[-len(sizes) :]] == [*sizes], names="input normalized_shape"),
        has_shape("weight bias", lambda normalized_shape: normalized_shape),
        put("rows", lambda rows, sizes: prod(rows.shape[: -len(sizes)]), "input normalized_shape"),
        rule(lambda mean, rstd, rows: mean.numel() == rstd.numel() == rows, "there must be a number for each row"),
        "compact: mean rstd",
    ),
    "_weight_norm_interface": (has_shape("g", norms_shape, "v dim"), "same dtype: v g; contiguous: v g"),
    "_weight_norm_interface_backward": (
        has_shape("saved_g saved_norms", norms_shape, "saved_v dim"),
        "same shape: saved_v grad_w; same dtype: saved_v saved_g grad_w",
        "contiguous: grad_w saved_v saved_g saved_norms",
    ),
    "_log_softmax_backward_data _softmax_backward_data": ("same shape: output grad_output",),
    "_cdist_backward": (
        has_shape("grad cdist", lambda *given: forward_shape("_cdist_forward.default", *given, None), "x1 x2 p"),
    ),
    "_ctc_loss": _CTC,
    "_ctc_loss_backward": (
        *_CTC,
        put("positions", lambda target_lengths: 2 * max(numbers(target_lengths), default=0) + 1),
        has_shape("log_alpha", lambda batch, steps, positions: (batch, steps, positions)),
        "grad neg_log_likelihood: batch",
    ),
    "nll_loss_backward": (
        in_range(lambda target, ignore_index: target[target != ignore_index], lambda self: self.shape[-1]),
    ),
    "multi_margin_loss_backward": (
        has_shape(
            "grad_output", partial(margin_shape, "multi_margin_loss", 1), "self target p margin weight reduction"
        ),
    ),
    "multilabel_margin_loss_backward": (
        has_shape("grad_output", partial(margin_shape, "multilabel_margin_loss_forward", 2), "self target reduction"),
    ),
    "_embedding_bag _embedding_bag_forward_only": (
        rule(lambda offsets, indices: offsets.numel() > 0 or indices.numel() == 0),
        in_range("offsets", lambda indices: indices.numel() + 1),
        rule(lambda offsets: not bool((offsets.diff() < 0).any()), "it must ascend"),
        "contiguous: weight indices offsets per_sample_weights",
    ),
    "segment_reduce": _SEGMENTS,
    "_segment_reduce_backward": (
        *_SEGMENTS,
        has_shape(
            "grad output", lambda data, axis, steps: (*data.shape[:axis], steps.shape[-1], *data.shape[axis + 1 :])
        ),
    ),
    "_convert_indices_from_coo_to_csr": (in_range("self", lambda size: size), "contiguous: self"),
    "_fft_c2c _fft_c2r _fft_r2c": (rule(dims_exist, "the same dim twice"),),
    "_fused_adam _fused_adamw _fused_sgd _fused_adagrad": _FUSED_STEP,
    "_foreach_copy": ("same length: self src",),
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward": (
        "query: B H L E; key value: B G S E; out grad_out: B H L E; logsumexp: B H L",
        rule(lambda query, key: 0 not in (*query.shape, *key.shape) and query.shape[1] % key.shape[1] == 0),
        rule(lambda attn_mask, query, key: broadcasts(attn_mask, (*query.shape[:3], key.shape[2]))),
        "unit stride: query key value out grad_out logsumexp",
    ),
    "mkldnn_rnn_layer": (
        *_LSTM,
        "weight0: G I; weight1: G hidden_size; same dtype: input weight0 weight1 weight2 weight3 hx_ cx_",
        rule(are_gates, names="weight1 weight2 weight3 has_biases"),
        "contiguous: input weight0 weight1 weight2 weight3 hx_ cx_",
    ),
    "mkldnn_rnn_layer_backward": (
        *_LSTM,
        "weight1: G I; weight2: G hidden_size; same dtype: input weight1 weight2 weight3 weight4 hx_ cx_tmp",
        "same dtype: input output hy_ cy_ grad_output grad_hy grad_cy",
        rule(are_gates, names="weight2 weight3 weight4 has_biases"),
        put("nbytes", workspace_bytes, "input hidden_size num_layers reverse bidirectional"),
        rule(lambda workspace, nbytes: workspace.nbytes == nbytes, "the forward op gives that number of bytes"),
        "contiguous: input weight1 weight2 weight3 weight4 hx_ cx_tmp workspace",
        "contiguous: output hy_ cy_ grad_output grad_hy grad_cy",
    ),
    "adaptive_max_pool2d_backward fractional_max_pool2d_backward": _pooled(2),
    "adaptive_max_pool3d_backward fractional_max_pool3d_backward": _pooled(3),
    **{
        f"max_pool{n}d_with_indices_backward": (
            *_pool_gradient(f"max_pool{n}d_with_indices.default", n, "dilation ceil_mode"),
            *_pooled(n),
        )
        for n in (2, 3)
    },
    "avg_pool2d_backward": _pool_gradient("avg_pool2d.default", 2, "ceil_mode count_include_pad divisor_override"),
    "avg_pool3d_backward": _pool_gradient("avg_pool3d.default", 3, "ceil_mode count_include_pad divisor_override"),
    "grid_sampler_2d_backward": _grid_gradient("grid_sampler_2d.default"),
    "grid_sampler_3d_backward": _grid_gradient("grid_sampler_3d.default"),
    " ".join([f"{kind}_pad{n}d" for kind, n in _PADS]): (in_range("padding", lambda: _MOST, -_MOST),),
    **{f"{kind}_pad{n}d_backward": _pad_gradient(kind, n) for kind, n in _PADS},
    "pad _pad_enum": (in_range("pad", lambda: _MOST, -_MOST),),
    "unfold_backward": (
        has_shape(
            "grad_in",
            lambda input_sizes, *cut: torch.empty(input_sizes, device="meta").unfold(*cut).shape,
            "input_sizes dim size step",
        ),
    ),
    "_upsample_bilinear2d_aa.default _upsample_bilinear2d_aa.out": (
        rule(lambda output_size: len(output_size) == 2),
        rule(lambda self, output_size, scales_h: reaches(scales_h, self.shape[-2], output_size[0])),
        rule(lambda self, output_size, scales_w: reaches(scales_w, self.shape[-1], output_size[1])),
    ),
    # torch copies the wrong memory of an expanded tensor
    "median.dim median.dim_values nanmedian.dim nanmedian.dim_values": ("compact: self",),
    "rrelu_with_noise": (
        "same shape: self noise out",
        rule(lambda noise: noise.is_contiguous(), "it must be contiguous to be written to"),
    ),
    "linalg_ldl_solve": (
        rule(lambda ld, pivots: ld.dim() >= 2 and ld.shape[:-1] == pivots.shape, names="LD pivots"),
        rule(lambda ld: ld.shape[-2] == ld.shape[-1], names="LD"),
        in_range(lambda pivots: pivots.abs(), lambda ld: ld.shape[-1] + 1, 1, "LD"),
        rule(come_in_pairs, "negative ones are 2 x 2 blocks, and come in pairs"),
    ),
    "lu_unpack": (
        has_shape("LU_pivots", lambda lu: (*lu.shape[:-2], min(lu.shape[-2:])), "LU_data"),
        in_range("LU_pivots", lambda lu: lu.shape[-2] + 1, 1, "LU_data"),
    ),
    "linalg_eigvals": (rule(lambda self: bool(self.isfinite().all()), "it must not contain infs or nans"),),
    "linalg_matrix_power": (rule(lambda n: n > -(1 << 63), "it has no positive counterpart in 64 bits"),),
    "lcm": (
        rule(
            lambda self, other: not has_lowest(self) and not has_lowest(other), "an absolute value is not in its range"
        ),
    ),
    "div.Tensor_mode div.Scalar_mode div.out_mode divide.Tensor_mode divide.Scalar_mode divide.out_mode": (
        put("at_risk", lambda self, rounding_mode: rounding_mode == "trunc" and has_lowest(self)),
        rule(
            lambda at_risk, other: not at_risk or not bool((torch.as_tensor(other) == -1).any()),
            "the lowest integer divided by -1 is not in the range of its dtype",
        ),
    ),
    "range.out range.step": (
        put("made", lambda out, dtype: dtype if out is None else out.dtype),
        rule(lambda step, made: made is None or made.is_floating_point or made.is_complex or int(step) != 0),
    ),
    "stack.out": (rule(lambda out: 0 not in out.stride(), "it has strides of 0, so it cannot be written to"),),
}
CHECKS: dict[str, list[Check]] = {
    name: [check for each in checks for check in (parse_checks(each) if isinstance(each, str) else [each])]
    for names, checks in _TABLE.items()
    for name in names.split()
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
        *([no_overlap(written)] if written else ()),
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
                check(given)
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
