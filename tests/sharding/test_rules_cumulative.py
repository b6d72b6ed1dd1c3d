"""Cumulative sums and the like, shard by shard."""

from __future__ import annotations

import math

import pytest
import torch

from gt.core.signatures import Input, ListArg
from gt.sharding.op_calls import OpCall
from gt.sharding.rules import TABLE
from gt.sharding.spec import DeviceMesh
from gt.sharding.strategies import FactorSharding, build_strategy
from tests.sharding.expansions import check_expansion
from tests.sharding.simulate import check, meta_of

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("op", ["cummax", "cummin", "cumsum", "cumprod", "logcumsumexp"])
def test_running_totals_pass_other_dims(op):
    check(f"aten.{op}.default", torch.randn(5, 3, 2), 1)
    check(f"aten.{op}.default", torch.randn(5, 1), -1)


def test_partial_sums_pass_through_cumsum():
    assert check("aten.cumsum.default", torch.randn(5), 0)
    assert check("aten.cumsum.default", torch.randint(9, (5,)), 0)
    with pytest.raises(AssertionError, match="cuts anything"):
        check("aten.cumsum.default", torch.randn(5), 0, dtype=torch.int64)


@pytest.mark.parametrize("op", ["cumsum", "cumprod", "logcumsumexp"])
def test_running_totals_go_on_from_shard_to_shard(op):
    name = f"aten.{op}.default"
    check_expansion(name, torch.randn(7), 0, cut=["x"])
    check_expansion(name, torch.randn(5, 4, 2), 1, cut=["-, x, -"])
    check_expansion(name, torch.randn(5, 4, 2), -2, cut=["x, y, -"])
    check_expansion(name, torch.randn(3, 9), -1, cut=["-, x y"])
    check_expansion(name, torch.randn(9).bfloat16(), 0, cut=["x[0:4 4:4 4:9]"], tolerance=2e-2)
    check_expansion(name, torch.tensor([1.0, 2, 0, INF, 1, -INF, NAN, 3]), 0, cut=["x"])


def test_running_totals_keep_dtypes():
    for x in (torch.randint(9, (7,)), torch.randint(2, (7,)) > 0, torch.randint(9, (7,), dtype=torch.int8)):
        check_expansion("aten.cumsum.default", x, 0, cut=["x"])
        check_expansion("aten.cumprod.default", x, 0, cut=["x"])
    check_expansion("aten.cumsum.default", torch.randn(7), 0, dtype=torch.float64, cut=["x"])
    check_expansion("aten.cumsum.default", torch.randn(7, dtype=torch.complex64), 0, cut=["x"])
    check_expansion("aten.cumsum.default", torch.randn(7) * 9, 0, dtype=torch.int64, cut=["x"])


def test_cumsum_of_partial_sums_moves_totals_only():
    assert check_expansion("aten.cumsum.default", torch.randn(40, 10), 0, cut=["x, - + y"]) <= 4 * 4 * 10 * 4


def test_blocks_may_be_cut_between_them_only():
    x = torch.randn(6)
    blocks = ListArg(tuple([ListArg((start, start + 2)) for start in (0, 2, 4)]))
    total = x.view(3, 2).sum(1)
    call = OpCall("gt.block_totals", (Input(0), 0, "sum", blocks), {}, (meta_of(x),), (meta_of(total),))
    rule = TABLE["gt.block_totals"].rule(call)
    for workers, given in ((3, "x"), (2, None), (6, None)):
        mesh = DeviceMesh((workers,), ("x",))
        strategy = build_strategy(rule, call.shapes, call.result_shapes, mesh, {"d0": FactorSharding(("x",))})
        assert (strategy and str(strategy.results[0])) == given


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("op", ["cumsum", "cumprod"])
def test_running_totals_may_be_small_integers(op, dtype):
    for x in (torch.randint(9, (7,)), torch.randint(9, (7,)).to(dtype), torch.randint(2, (7,)) > 0, torch.rand(7) * 9):
        check_expansion(f"aten.{op}.default", x, 0, dtype=dtype, cut=["x"])
