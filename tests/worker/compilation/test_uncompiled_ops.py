"""Ops that are not compiled."""

import pytest

from gt.core.meta import TensorMeta
from gt.core.signatures import Input, Signature
from gt.worker.compilation.compilable_spans import reason_to_stay_eager


def reason(op: str, dtype: str = "float32", size: int = 4, random: bool = False) -> str | None:
    signature = Signature(op, (Input(0),), {}, (), (), (), (), random)
    return reason_to_stay_eager(signature, [TensorMeta((size,), (1,), 0, dtype)])


@pytest.mark.parametrize(
    "op",
    [
        "aten.mm.default",
        "aten.add_.Tensor",
        "aten.div.Tensor",
        "aten._softmax.default",
        "aten.pow_.Scalar",
        "aten.threshold_backward.default",
        "aten.binary_cross_entropy_with_logits.default",
    ],
)
def test_most_ops_are_compiled(op: str) -> None:
    assert reason(op) is None


@pytest.mark.parametrize(
    ("op", "options", "why"),
    [
        ("aten.embedding.default", {}, "indices"),
        ("aten.index_put_.default", {}, "indices"),
        ("aten.div.Tensor", {"dtype": "int64"}, "integers"),
        ("aten.normal_.default", {"random": True}, "random"),
        ("aten.rand_like.default", {}, "nondeterministic_seeded"),
        ("aten.nonzero.default", {}, "dynamic_output_shape"),
        ("aten.empty_like.default", {}, "memory"),
        ("aten.linalg_inv_ex.default", {}, "values"),
        ("aten._fused_adamw_.default", {}, "fused"),
        ("aten.remainder.Tensor", {}, "another formula"),
        ("aten.floor_divide_.Tensor", {}, "another formula"),
        ("aten.div_.Tensor_mode", {}, "another formula"),
        ("aten.pow.Scalar", {}, "another formula"),
        ("aten.special_i1.default", {}, "another formula"),
        ("aten.threshold_backward.default", {"dtype": "int64"}, "another formula"),
        ("aten.median.dim", {}, "no code"),
        ("aten.binary_cross_entropy.default", {}, "values"),
        ("aten.neg.default", {"size": 0}, "empty"),
        ("aten.neg.default", {"dtype": "complex64"}, "no code"),
    ],
)
def test_ops_that_stay_eager(op: str, options: dict[str, object], why: str) -> None:
    assert why in str(reason(op, **options))
