"""searchsorted, bucketize and isin, shard by shard."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.samples import indices
from tests.sharding.simulate import check


def test_searchsorted_and_bucketize():
    edges = torch.tensor([-1.0, 0.0, 0.0, 2.5, float("inf")])
    values = torch.tensor([[0.0, -2.0, float("nan")], [3.0, 2.5, float("inf")]])
    check("aten.bucketize.Tensor", values, edges)
    check("aten.bucketize.Tensor", values, edges, right=True, out_int32=True)
    check("aten.bucketize.Scalar", 1.0, edges)
    check("aten.searchsorted.Tensor", edges, values, side="right")
    check("aten.searchsorted.Tensor", torch.stack([edges, edges + 1]), values)
    check("aten.searchsorted.Scalar", edges, 0.0)
    check("aten.searchsorted.Tensor", edges[[4, 3, 2, 1, 0]], values, sorter=torch.tensor([4, 3, 2, 1, 0]))


@pytest.mark.parametrize("invert", [False, True])
def test_isin(invert):
    check("aten.isin.Tensor_Tensor", indices(6, 5, 2), indices(6, 3, 2), invert=invert)
    check("aten.isin.Tensor_Scalar", indices(3, 5), 1, invert=invert)
    check("aten.isin.Scalar_Tensor", 1, indices(3, 5), invert=invert)
