from __future__ import annotations

import math

import pytest
import torch

from gt.core.signatures import Input, ListArg
from gt.sharding.op_calls import OpCall
from gt.sharding.propagation import FactorSharding, build_strategy
from gt.sharding.rules.scanning import SCANNING
from gt.sharding.spec import DeviceMesh
from gt.sharding.spec_text import parse_spec
from tests.sharding.expansions import check_expansion
from tests.sharding.simulate import check, meta_of

INF, NAN = math.inf, math.nan


def test_sorting_needs_its_dim_whole():
    x = torch.randint(0, 4, (5, 3, 2))
    check("aten.sort.default", x)
    check("aten.sort.default", x, 1, True)
    check("aten.sort.stable", x, stable=True, dim=0, descending=True)
    check("aten.argsort.stable", x, stable=True, dim=-2)
    check("aten.topk.default", torch.randn(5, 7), 2)
    check("aten.topk.default", torch.randn(5, 7), 3, 0, False, False)


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


@pytest.mark.parametrize("largest", [True, False])
def test_topk_of_shards(largest):
    x = torch.randperm(60).view(3, 20).float()
    for k in (1, 3, 5):
        check_expansion("aten.topk.default", x, k, 1, largest, cut=["-, x"])
        check_expansion("aten.topk.default", x, k, -1, largest, cut=["x, y"])
        check_expansion("aten.topk.default", x.view(60).long(), k, 0, largest, cut=["x y"])
    check_expansion("aten.topk.default", x.view(60), 8, 0, largest, cut=["x[0:5 5:5 5:60]"])


def test_topk_keeps_nan_first():
    x = torch.tensor([1.0, NAN, 3, -INF, INF, 0, 2])
    check_expansion("aten.topk.default", x, 2, cut=["x"])


@pytest.mark.parametrize(
    ("op", "args", "spec"),
    [
        ("topk", (3, 0), "x"),  # all elements would be candidates
        ("topk", (1, 0), "-"),
        ("cumsum", (0,), "-"),
        ("cumsum", (0,), "x y"),  # a total for each element
        ("logcumsumexp", (0,), "x"),  # of complex numbers
    ],
)
def test_does_not_expand_where_that_does_not_help(op, args, spec):
    x = torch.randn(4, dtype=torch.complex64 if op == "logcumsumexp" else torch.float32)
    outputs = tuple(map(meta_of, (x.topk(*args)) if op == "topk" else [x]))
    call = OpCall(f"aten.{op}.default", (Input(0), *args), {}, (meta_of(x),), outputs)
    mesh = DeviceMesh((2, 2), ("x", "y"))
    assert SCANNING[f"aten.{op}"].expand(call, [parse_spec(spec, mesh)]) is None


def test_blocks_may_be_cut_between_them_only():
    x = torch.randn(6)
    blocks = ListArg(tuple([ListArg((start, start + 2)) for start in (0, 2, 4)]))
    total = x.view(3, 2).sum(1)
    call = OpCall("gt.block_totals", (Input(0), 0, "sum", blocks), {}, (meta_of(x),), (meta_of(total),))
    rule = SCANNING["gt.block_totals"].rule(call)
    for workers, given in ((3, "x"), (2, None), (6, None)):
        mesh = DeviceMesh((workers,), ("x",))
        strategy = build_strategy(rule, call.shapes, call.result_shapes, mesh, {"d0": FactorSharding(("x",))})
        assert (strategy and str(strategy.results[0])) == given


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("op", ["cumsum", "cumprod"])
def test_running_totals_may_be_small_integers(op, dtype):
    for x in (torch.randint(9, (7,)), torch.randint(9, (7,)).to(dtype), torch.randint(2, (7,)) > 0, torch.rand(7) * 9):
        check_expansion(f"aten.{op}.default", x, 0, dtype=dtype, cut=["x"])
