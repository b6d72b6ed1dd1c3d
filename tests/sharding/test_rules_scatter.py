"""Scatter and index_add, shard by shard."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.samples import indices, numbers
from tests.sharding.simulate import check


@pytest.mark.parametrize("dim", [0, -1])
def test_scatter(dim):
    x = numbers(5, 4)
    index = torch.stack([torch.randperm(4) for _ in range(4)])
    for own in (index, index[:2], index[:, :3], index[:3, :2] if dim == 0 else index[:2, :3]):
        check("aten.scatter.value", x, dim, own.contiguous(), 7.0)
        check("aten.scatter.src", x, dim, own.contiguous(), numbers(6, 5))
        check("aten.scatter_add.default", x, dim, own.contiguous(), numbers(6, 5))
        check("aten.scatter_add.default", x, dim, own.contiguous(), numbers(*own.shape))
    check("aten.scatter.reduce", x, dim, index, numbers(4, 4), reduce="add")
    check("aten.scatter.value_reduce", x, dim, index, 2.0, reduce="multiply")
    check("aten.scatter.value", x > 0, dim, index, True)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("kind", ["sum", "prod", "amax", "amin", "mean"])
def test_scatter_reduce(kind, include_self):
    index = indices(4, 5, 4)
    for dtype in (torch.float32, torch.int64):
        x, source = numbers(5, 4, dtype=dtype), numbers(5, 4, dtype=dtype)
        check("aten.scatter_reduce.two", x, 1, index, source, kind, include_self=include_self)
    if kind in ("amax", "amin") and include_self:
        check("aten.scatter_reduce.two", x > 0, 0, index, source > 3, kind)
        nans = torch.full((5, 4), float("nan"))
        check("aten.scatter_reduce.two", torch.randn(5, 4), 1, index, nans, kind)


@pytest.mark.filterwarnings("ignore:index_reduce")
def test_rows():
    x, index, unique = numbers(5, 3), torch.tensor([4, 0, 4, 1]), torch.tensor([4, 0, 3, 1])
    check("aten.index_add.default", x, 0, index, numbers(4, 3))
    check("aten.index_add.default", x.t().contiguous(), -1, index.int(), numbers(3, 4), alpha=2.5)
    check("aten.index_add.default", x > 0, 0, index, numbers(4, 3) > 5)
    check("aten.index_copy.default", x, 0, unique, numbers(4, 3))
    check("aten.index_fill.int_Scalar", x, 0, torch.tensor([-1, 0, 2]), 7)
    check("aten.index_fill.int_Tensor", x, -1, torch.tensor([-1]), torch.tensor(7.0))
    for kind in ("prod", "mean", "amax", "amin"):
        check("aten.index_reduce.default", x, 0, index, numbers(4, 3), kind)
    check("aten.index_reduce.default", x, 0, index, numbers(4, 3), "amax", include_self=False)


@pytest.mark.parametrize("accumulate", [False, True])
def test_put(accumulate):
    index = torch.tensor([0, -1, 7])
    check("aten.put.default", numbers(5, 3), index, numbers(3), accumulate)
    check("aten.put.default", numbers(4), torch.tensor([[3, 0]]), numbers(2), accumulate)
