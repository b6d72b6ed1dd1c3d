"""Sorting and topk, shard by shard."""

from __future__ import annotations

import math

import pytest
import torch

from gt.core.signatures import Input
from gt.sharding.op_calls import OpCall
from gt.sharding.rules import TABLE
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
    assert TABLE[f"aten.{op}"].expand(call, [parse_spec(spec, mesh)]) is None
