"""The dtypes of first operands that torch's CPU kernels refuse and its shape functions accept, by op.

Made by `python -m tests.conformance.kernel_dtypes`; a test compares it with torch.
"""

from __future__ import annotations

import torch

TORCH_VERSION = "2.13.0"  # with which the table was made
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
