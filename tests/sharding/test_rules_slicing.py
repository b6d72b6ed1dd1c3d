"""Slices, rows and padding, shard by shard."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.samples import numbers
from tests.sharding.simulate import check


@pytest.mark.parametrize(
    "bounds", [(1, 4, 1), (0, 7, 3), (2, 100, 2), (-5, -1, 1), (None, None, 1), (4, 2, 1), (5, 7, 1)]
)
def test_slice_and_its_inverses(bounds):
    x = numbers(7, 3)
    part = torch.ops.aten.slice.Tensor(x, 0, *bounds)
    check("aten.slice.Tensor", x, 0, *bounds)
    check("aten.slice_copy.Tensor", x.t().contiguous(), -1, *bounds)
    check("aten.slice_scatter.default", x, torch.randn_like(part), 0, *bounds)
    if None not in bounds:
        check("aten.slice_backward.default", part, [7, 3], 0, *bounds)


def test_slice_of_other_dtypes_and_narrow():
    check("aten.slice.Tensor", torch.rand(5, 2) > 0.5, 0, 1, 4)
    check("aten.slice.Tensor", numbers(0, 2), 1, 1)
    check("aten.slice.Tensor", numbers(5))
    check("aten.narrow_copy.default", numbers(7, 2), 0, 2, 3)
    check("aten.narrow_copy.default", numbers(2, 7), -1, -4, 3)


@pytest.mark.parametrize("index", [0, 3, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_select_and_its_inverses(index, dtype):
    x = numbers(5, 3).to(dtype)
    check("aten.select.int", x, 0, index)
    check("aten.select_copy.int", x.t().contiguous(), -1, index)
    check("aten.select_backward.default", x[0], [5, 3], 0, index)
    check("aten.select_scatter.default", x, x[0], 0, index)


def test_select_masks_elements_of_other_shards_without_multiplying():
    check("aten.select.int", torch.tensor([[1.0, float("inf")], [float("nan"), 2.0], [3.0, 4.0]]), 0, 0)


@pytest.mark.parametrize(
    "pad", [[1, 2], [0, 0, 3, 1], [-1, 2], [-2, -1], [4, -2, -3, 4], [0, 0], [0, 0, 0, -1], [-3, 3]]
)
def test_constant_pad(pad):
    check("aten.constant_pad_nd.default", numbers(4, 5), pad)
    check("aten.constant_pad_nd.default", numbers(5, 4), pad, 1.5)


def test_constant_pad_of_other_dtypes():
    check("aten.constant_pad_nd.default", torch.rand(2, 3) > 0.5, [1, 1], True)
    check("aten.constant_pad_nd.default", torch.arange(3), [3, 2], 7)
    check("aten.constant_pad_nd.default", numbers(0, 2), [0, 0, 2, 3], 1)
