"""Softmax, shard by shard."""

from __future__ import annotations

import math

import pytest
import torch

from tests.sharding.expansions import check_expansion
from tests.sharding.simulate import check

INF = math.inf
SOFTMAX = ["aten._softmax.default", "aten._log_softmax.default", "aten._safe_softmax.default"]


def softmax_args(op, dim):
    return (dim,) if "safe" in op else (dim, False)


@pytest.mark.parametrize("op", SOFTMAX)
def test_softmax_passes_other_dims(op):
    check(op, torch.randn(5, 3, 2), *softmax_args(op, 1))
    check(op, torch.randn(5, 1), *softmax_args(op, -1))


@pytest.mark.parametrize("op", SOFTMAX)
def test_softmax_over_a_cut_dim(op):
    x = torch.randn(5, 4) * 50
    check_expansion(op, x, *softmax_args(op, 0), cut=["x, -"])
    check_expansion(op, x, *softmax_args(op, -1), cut=["x, y"])
    check_expansion(op, x, *softmax_args(op, -1), cut=["-, x y"])
    odd = torch.tensor([[1, INF, -INF, 0], [2, -INF, -INF, 1e30], [3, 0, -INF, -1e30]])
    check_expansion(op, odd, *softmax_args(op, 0), cut=["x, -"])
    check_expansion(op, x.bfloat16(), *softmax_args(op, 0), cut=["x, -"], tolerance=1e-2)


def test_safe_softmax_to_another_dtype():
    check_expansion("aten._safe_softmax.default", torch.randn(5, 4), 0, torch.float64, cut=["x, -"])


@pytest.mark.parametrize("op", ["aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default"])
def test_softmax_backward(op):
    gradient, x = torch.randn(5, 4), torch.randn(5, 4)
    output = x.softmax(0) if "log" not in op else x.log_softmax(0)
    check(op, gradient, output, 0, torch.float32)
    check_expansion(op, gradient, output, 0, torch.float32, cut=["x, -", "x, -"])
    check_expansion(op, gradient, output, -2, torch.float32, cut=["x, y", "x, y"])


def test_softmax_moves_statistics_only():
    x = torch.randn(30, 100)
    assert check_expansion("aten._softmax.default", x, 0, False, cut=["x, -"]) <= 2 * 4 * 100 * 4
