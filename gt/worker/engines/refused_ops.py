"""Ops of aten that the PyTorch engine does not run, each with its reason."""

from __future__ import annotations

_OUT_OF_BOUNDS = "it does not compare its strides with the memory that the tensor has"
_ADDRESSES = "it gives a tensor whose bytes are a C++ object, addresses included"  # ops on such tensors take no others
_PART = "it is a part of another op, which compares the arguments; alone it may read and write outside of memory"
_SPARSE = "GT holds strided tensors, and it trusts indices that may be outside of memory"
_NAMES = "GT's tensors have no names for their dims"  # torch 2.10 has such ops, 2.13 has none
_QUANTIZED = "GT holds no quantized tensors, and it trusts sizes that may be outside of memory"

_REASONS = {
    "it reads and writes files of the worker's machine": "from_file",
    "it writes to the worker's stdout": "_print",
    _OUT_OF_BOUNDS: "_reshape_alias _reshape_alias_copy",
    _ADDRESSES: "fbgemm_pack_gemm_matrix_fp16 fbgemm_pack_quantized_matrix _wrapped_linear_prepack",
    _PART: """
        _batch_norm_impl_index_backward _cholesky_solve_helper _compute_linear_combination _cummax_helper
        _cummin_helper _foreach_powsum _logcumsumexp
        _new_zeros_with_same_feature_meta _nnpack_spatial_convolution _add_batch_dim _remove_batch_dim
        _slow_conv2d_backward _stack _thnn_differentiable_gru_cell_backward _thnn_differentiable_lstm_cell_backward
        _transform_bias_rescale_qkv _sobol_engine_draw _sobol_engine_ff _sobol_engine_ff_
        _sobol_engine_initialize_state _sobol_engine_initialize_state_ _sobol_engine_scramble
        _sobol_engine_scramble_
    """,
    _NAMES: "align_as align_tensors align_to refine_names rename rename_",
    _SPARSE: """
        _convert_indices_from_csr_to_coo _nested_tensor_from_tensor_list
        _sparse_bsr_tensor_unsafe _sparse_bsc_tensor_unsafe _sparse_csc_tensor_unsafe _sparse_csr_tensor_unsafe
        _sparse_compressed_tensor_unsafe _sparse_coo_tensor_unsafe
    """,
    _QUANTIZED: """
        _dyn_quant_matmul_4bit _dyn_quant_pack_4bit_weight _fused_moving_avg_obs_fq_helper
        _fused_moving_avg_obs_fq_helper_functional fused_moving_avg_obs_fake_quant quantized_lstm_cell
        quantized_gru_cell quantized_rnn_relu_cell quantized_rnn_tanh_cell
    """,
}
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}


class OpNotAllowed(NotImplementedError):
    """An op that is not known, or not allowed. Servers count its failures by the name of this class."""


def refusal(name: str, overload: str) -> str | None:
    """Why an op of aten is not run; None if it may be. An overload with "name" in its own name takes names of dims."""
    return REFUSED.get(name) or (_NAMES if "name" in overload.lower() else None)
