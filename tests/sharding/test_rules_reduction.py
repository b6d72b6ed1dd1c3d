"""Reductions, shard by shard."""

from __future__ import annotations

import math

import pytest
import torch

from tests.sharding.expansions import check_expansion
from tests.sharding.simulate import check

INF, NAN = math.inf, math.nan


def ints(*shape):
    return torch.randint(-9, 10, shape)


@pytest.mark.parametrize("op", ["sum", "nansum", "mean", "amax", "amin"])
@pytest.mark.parametrize(("dims", "keepdim"), [([1], False), ([-1, 0], True), ([], False), ([0, 1], False)])
def test_reduces_dims_of_uneven_shards(op, dims, keepdim):
    overload = {"sum": "dim_IntList", "mean": "dim"}.get(op, "default")
    check(f"aten.{op}.{overload}", torch.randn(5, 3), dims, keepdim)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "prod", "any", "all"])
def test_reduces_all_dims(op):
    check(f"aten.{op}.default", torch.randn(5, 2))


@pytest.mark.parametrize("op", ["sum", "prod", "amax", "amin", "any", "all", "count_nonzero"])
def test_reduces_integers_and_bools(op):
    for x in (ints(5, 2), ints(4) > 0, ints(5).to(torch.uint8), ints(1, 2).to(torch.int8)):
        check(f"aten.{op}.default", x)


def test_a_size_smaller_than_the_axis_leaves_some_workers_with_the_identity():
    for x in (torch.randn(1), -torch.rand(2), -1 - ints(1, 2).abs()):
        check("aten.amax.default", x)
        check("aten.max.default", x)
        check("aten.amin.default", -x)
        check("aten.min.default", -x)


def test_a_dtype_may_be_asked_for():
    check("aten.sum.dim_IntList", torch.randn(5, 2), [0], dtype=torch.float64)
    check("aten.sum.default", ints(5), dtype=torch.float32)
    check("aten.mean.dim", ints(5, 2), [0], dtype=torch.float32)
    check("aten.prod.dim_int", torch.randn(5, 2), -2, True, dtype=torch.float64)


def test_halves_are_added_up_as_floats():
    x = torch.ones(300, 2, dtype=torch.bfloat16)
    check("aten.sum.dim_IntList", x, [0], tolerance=5e-2)
    check("aten.mean.dim", x, [0], tolerance=5e-2)


def test_complex_numbers_add_up():
    x = torch.randn(5, 2, dtype=torch.complex64)
    check("aten.sum.dim_IntList", x, [0])
    check("aten.mean.default", x)
    check("aten.prod.dim_int", x, 0)


def test_any_and_all_of_dims():
    x = torch.tensor([[0, 1, 0], [0, 0, 0], [1, 1, 1.0], [NAN, 0, 1], [0, 0, 1]])
    for op in ("aten.any", "aten.all"):
        check(f"{op}.dim", x, -1, True)
        check(f"{op}.dims", x, [0])
        check(f"{op}.dims", x, [])
        check(f"{op}.dims", x > 0, None)
        check(f"{op}.dim", x.nan_to_num().to(torch.uint8), 0)


def test_a_nan_is_the_largest():
    x = torch.tensor([1.0, 2, NAN, -INF, INF])
    check("aten.amax.default", x)
    check("aten.min.default", x)


@pytest.mark.parametrize("op", ["var", "std", "var_mean", "std_mean"])
def test_variance_of_cut_dims(op):
    name = f"aten.{op}.correction"
    x = 100 + torch.randn(5, 4, 2)
    check(name, x, [1])
    check_expansion(name, x, [0], correction=0, cut=["x, -, -"])
    check_expansion(name, x, [-1, 0], keepdim=True, cut=["x, -, y"])
    check_expansion(name, x, cut=["-, x, -"])
    check_expansion(name, x, [0, 1], correction=25, cut=["-, x, -"])
    check_expansion(name, torch.randn(5, dtype=torch.complex64), cut=["x"])
    check_expansion(name, torch.randn(40).bfloat16(), cut=["x"], tolerance=1e-2)


def test_logsumexp_of_cut_dims():
    x = torch.tensor([[1.0, 1000, -INF, -INF], [2, 1000, -INF, INF], [3, -1000, -INF, 0], [NAN, 0, -INF, 0]])
    check("aten.logsumexp.default", x, [1])
    check_expansion("aten.logsumexp.default", x, [0], cut=["x, -"])
    check_expansion("aten.logsumexp.default", x, [0, 1], cut=["x, y"])
    check_expansion("aten.logsumexp.default", x, [-1], True, cut=["-, x"])
    check_expansion("aten.logsumexp.default", ints(5), [0], cut=["x"])
    check("aten.logsumexp.default", torch.randn(5, 3, dtype=torch.complex64), [1])
    with pytest.raises(AssertionError, match="does not expand"):
        check_expansion("aten.logsumexp.default", torch.randn(5, dtype=torch.complex64), [0], cut=["x"])


def test_aminmax_of_cut_dims():
    check("aten.aminmax.default", ints(5, 4), dim=1, keepdim=True)
    check_expansion("aten.aminmax.default", ints(5, 4), dim=0, cut=["x, -"])
    check_expansion("aten.aminmax.default", torch.randn(5, 4), cut=["x, y"])


@pytest.mark.parametrize("op", ["max.dim", "min.dim", "argmax.default", "argmin.default"])
def test_of_equal_extremes_the_first_index_is_returned(op):
    name = f"aten.{op}"
    ties = torch.tensor([[3, 1, 1], [3, 7, 1], [2, 7, 1], [3, 7, 1], [2, 7, 1.0]])
    nans = torch.tensor([[3, 1], [NAN, 7], [3, NAN], [NAN, -INF], [NAN, INF]])
    for x in (ties, nans, ties.long(), -ties, torch.tensor([[1], [1]]), torch.full((4, 2), -INF)):
        check(name, x.t().contiguous(), 1)
        check_expansion(name, x, 0, cut=["x, -"])
        check_expansion(name, x, 0, True, cut=["x, y"])
        check_expansion(name, x.t().contiguous(), -1, cut=["-, x"])


@pytest.mark.parametrize("op", ["argmax", "argmin"])
def test_the_extreme_of_all_elements_has_a_flat_index(op):
    name = f"aten.{op}.default"
    for x in (torch.randn(5, 3, 2), ints(5, 3, 2) % 2, torch.zeros(4, 1, 2)):
        check_expansion(name, x, cut=["x, -, -"])
        check_expansion(name, x, None, True, cut=["-, x, y"])
    check_expansion(name, ints(7), cut=["x"])


@pytest.mark.parametrize("op", ["aten.median.dim", "aten.nanmedian.dim", "aten.mode.default"])
def test_order_statistics_need_their_dim_whole(op):
    check(op, torch.randn(5, 4), -1)
    check(op, torch.randn(5, 4), 0, True)
    check("aten.kthvalue.default", torch.randn(5, 4), 2)


def test_tensors_without_dims_have_nothing_to_cut():
    for op in ("max.dim", "argmax.default", "logsumexp.default", "median.default", "mode.default"):
        with pytest.raises(AssertionError, match="cuts anything"):
            check(f"aten.{op}", torch.tensor(2.0), *([0] if op == "max.dim" else [[0]] if "log" in op else []))


def test_expansions_move_statistics_only():
    x = torch.randn(60, 100)
    bytes_of_a_row = 100 * 4
    for op in ("var_mean.correction", "logsumexp.default", "linalg_vector_norm.default"):
        args = (2, [0]) if "norm" in op else ([0],)
        assert check_expansion(f"aten.{op}", x, *args, cut=["x, -"]) <= 4 * 4 * bytes_of_a_row
    assert check_expansion("aten.max.dim", x, 0, cut=["x, -"]) <= 4 * 3 * bytes_of_a_row


def test_histc_with_given_ends():
    check("aten.histc.default", torch.randn(5, 4), 6, -1, 1)
    check("aten.histc.default", torch.tensor([NAN, 0.0, 1.0, INF, -INF, 3.0, 3.0]), 3, 0, 3)
    with pytest.raises(AssertionError, match="has no rule"):
        check("aten.histc.default", torch.randn(5), 6)
