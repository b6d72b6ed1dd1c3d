"""Vector norms, shard by shard."""

from __future__ import annotations

import math

import pytest
import torch

from gt.core.meta import TensorMeta
from gt.core.signatures import Input, ListArg, Scalar
from gt.sharding.op_calls import OpCall
from gt.sharding.rules.norms import VECTOR_NORM
from tests.sharding.expansions import check_expansion
from tests.sharding.simulate import check

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("order", [0, 1, INF, -INF])
def test_norms_that_are_partial(order):
    check("aten.linalg_vector_norm.default", torch.randn(5, 3), order, [0])
    check("aten.linalg_vector_norm.default", torch.randn(2, dtype=torch.complex64), order)
    check("aten.norm.ScalarOpt_dim", torch.randn(5, 3), order, [-1], True)


@pytest.mark.parametrize("order", [2, 3, 0.5, -1])
def test_norms_of_powers(order):
    x = torch.randn(5, 3)
    check("aten.linalg_vector_norm.default", x, order, [0])
    check_expansion("aten.linalg_vector_norm.default", x, order, [0], cut=["x, -"])
    check_expansion("aten.linalg_vector_norm.default", x, order, cut=["x, y"])
    check_expansion("aten.norm.ScalarOpt_dim", x, order, [-2], True, cut=["x, -"])
    check_expansion("aten.linalg_vector_norm.default", torch.randn(5, dtype=torch.complex64), order, cut=["x"])
    check_expansion("aten.norm.Scalar", x.double(), order, cut=["-, x"])


def test_a_norm_may_have_another_dtype():
    x = torch.randn(5, 3)
    check_expansion("aten.linalg_vector_norm.default", x, 2, [0], dtype=torch.float64, cut=["x, -"])
    check_expansion("aten.linalg_vector_norm.default", x.bfloat16(), cut=["x, -"], tolerance=1e-2)
    check("aten.linalg_vector_norm.default", x, 1, dtype=torch.float64)


def test_distances_are_norms():
    check_expansion("aten.dist.default", torch.randn(5, 3), torch.randn(3), cut=["x, -", "-"])
    check_expansion("aten.dist.default", torch.randn(5, 3), torch.randn(5, 1), 1, cut=["x, y", "x, -"])


def test_an_order_that_changes_from_call_to_call_needs_whole_dims():
    metas = (TensorMeta((4, 3), (3, 1), 0, "float32"),), (TensorMeta((3,), (1,), 0, "float32"),)
    call = OpCall("aten.linalg_vector_norm.default", (Input(0), Scalar(0), ListArg((0,))), {}, *metas)
    rule = VECTOR_NORM["aten.linalg_vector_norm"].rule(call)
    assert str(rule) == "d0 d1 -> d1 | whole: d0"
