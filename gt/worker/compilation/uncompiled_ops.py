"""The ops that are not compiled, with the reason."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.meta import TensorMeta
from gt.core.signatures import Signature
from gt.worker.engines.cleared_memory import leaves_unwritten
from gt.worker.engines.torch_private import find_tags

# Compiled code would check indices inside of a loop over elements: an exception there ends the process if the loop runs
# in several threads, and may leave results half written.
_INDEXING = frozenset([
    "_embedding_bag", "_embedding_bag_forward_only", "_index_put_impl", "_segment_reduce_backward", "_unsafe_index",
    "_unsafe_index_put", "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "bincount", "embedding",
    "embedding_dense_backward", "embedding_renorm", "gather", "index", "index_add", "index_copy", "index_fill",
    "index_put", "index_reduce", "index_select", "masked_scatter", "max_unpool2d", "max_unpool3d", "multi_margin_loss",
    "multi_margin_loss_backward", "multilabel_margin_loss_forward", "multilabel_margin_loss_backward", "one_hot", "put",
    "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward", "scatter", "scatter_add",
    "scatter_reduce", "segment_reduce", "take", "take_along_dim", "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward",
    "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward",
])  # fmt: skip

# Torch raises an error for a divisor of 0; compiled code ends the process.
_DIVIDING = frozenset(["div", "divide", "floor_divide", "remainder", "fmod", "gcd", "lcm", "pow"])

# Torch raises an error for a matrix that is singular.
_SOLVING = ("linalg_", "_linalg_", "cholesky", "lu_", "ormqr", "triangular_solve", "_ctc_loss", "_assert")

# Torch raises an error for values out of the domain.
_CHECKING = frozenset(["binary_cross_entropy"])

# Inductor's formula gives other results than torch's kernel: off by whole units, NaN in place of numbers or numbers in
# place of NaN. The slow test test_op_survey.py finds such ops.
_OTHER_FORMULA = frozenset([
    "acosh", "elu_backward", "erfinv", "floor_divide", "fmod", "hardswish_backward", "hardtanh_backward", "isin",
    "logit", "mvlgamma", "nextafter", "prod", "remainder", "smooth_l1_loss_backward", "soft_margin_loss_backward",
    "softshrink",
])  # fmt: skip
_OTHER_FORMULA_OVERLOADS = frozenset([
    "aten.div.Scalar_mode", "aten.div.Tensor_mode", "aten.div_.Scalar_mode", "aten.div_.Tensor_mode", "aten.pow.Scalar",
])  # fmt: skip
_OTHER_FORMULA_FOR_INTEGERS = frozenset(["mse_loss_backward", "threshold", "threshold_backward"])

# Inductor calls torch's kernel through an executor that AOTInductor does not give to workers.
_WITHOUT_CODE = frozenset(["_conj_physical", "hardshrink_backward", "median", "nanmedian", "softshrink_backward"])

_FUSED = frozenset(["_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"])


def reason_to_stay_eager(signature: Signature, inputs: Sequence[TensorMeta]) -> str | None:
    """Why an op on such tensors is not compiled; None if it may be."""
    name = signature.op.split(".")[1].removesuffix("_")
    has_floats = any(meta.dtype.startswith(("float", "bfloat")) for meta in inputs)
    if signature.random:
        return "it draws random numbers"
    if name in _INDEXING:
        return "it checks the values of indices"
    if name in _DIVIDING and not has_floats:
        return "it divides integers"
    is_other = name in _OTHER_FORMULA or signature.op in _OTHER_FORMULA_OVERLOADS or name.startswith("special_")
    if is_other or (name in _OTHER_FORMULA_FOR_INTEGERS and not has_floats):
        return "Inductor computes it by another formula"
    if name in _WITHOUT_CODE:
        return "Inductor has no code for it"
    if name in _CHECKING or name.startswith(_SOLVING):
        return "it checks values"
    if name in _FUSED:
        return "it is a fused kernel already"
    if leaves_unwritten(signature.op):
        return "it makes memory without writing it"
    if any(meta.dtype.startswith("complex") or meta.dtype.startswith("float8") for meta in inputs):
        return "it computes with numbers that Inductor has no code for"
    if not all(meta.elements for meta in inputs):
        return "a tensor is empty"
    tags = find_tags(signature.op) & {"data_dependent_output", "dynamic_output_shape", "nondeterministic_seeded"}
    return f"its result depends on values ({', '.join(sorted(tags))})" if tags else None
