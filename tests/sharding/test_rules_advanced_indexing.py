"""Advanced indexing, shard by shard."""

from __future__ import annotations

import pytest
import torch

from gt.sharding.op_calls import OpCall
from gt.sharding.rules import rule_of
from gt.sharding.spec import DeviceMesh
from tests.sharding.samples import indices, numbers
from tests.sharding.simulate import check, encode, meta_of

LINE = DeviceMesh((3,), ("x",))


@pytest.mark.parametrize(
    "given",
    [
        [indices(5, 6)], [None, indices(4, 2, 3)], [indices(5, 3), indices(4, 3)],
        [indices(5, 2, 1), None, indices(3, 4)],
        [None, indices(4, 3), indices(3, 1)], [torch.tensor(-2), torch.tensor([-4, 3, 0])],
        [None, None, torch.tensor([-3, 2, -1])], [indices(5, 0)],
    ],
)  # fmt: skip
def test_index(given):
    check("aten.index.Tensor", numbers(5, 4, 3), given)
    check("aten.index.Tensor", numbers(5, 4, 3) > 0, given, meshes=[LINE])


def test_index_of_dims_that_are_not_side_by_side():
    check("aten.index.Tensor", numbers(2, 5, 3, 4), [None, indices(5, 2, 1), None, indices(4, 3)], meshes=[LINE])
    check("aten.index_put.default", numbers(2, 5, 3), [None, indices(5, 1), indices(3, 4)], numbers(2, 4), True)
    apart = [None, torch.tensor([4, 0]), None, torch.tensor([1])]
    check("aten.index_put.default", numbers(2, 5, 3, 4), apart, numbers(2, 2, 3), meshes=[LINE])


def test_masks_have_no_rule():
    x, mask = torch.zeros(4), torch.ones(4, dtype=torch.bool)
    call = OpCall(
        "aten.index.Tensor", (encode(x, []), encode([mask], [x])), {}, (meta_of(x), meta_of(mask)), (meta_of(x),)
    )
    assert rule_of(call) is None


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_index_put(accumulate, dtype):
    x = numbers(5, 4, 3, dtype=dtype)
    values = numbers(3, 4, 3, dtype=dtype)
    check("aten.index_put.default", x, [torch.tensor([0, 4, -2])], values, accumulate)
    check("aten.index_put.default", x, [torch.tensor([4, 0, 2])], values[0, 0], accumulate)
    check("aten.index_put.default", x, [None, torch.tensor([-1, 0])], values[0, 0, 0], accumulate)
    check("aten.index_put.default", x, [torch.tensor([[1], [3]]), torch.tensor([0, -1])], values[:2, :2], accumulate)
    check(
        "aten.index_put.default", x, [torch.tensor([3, 0]), None, torch.tensor([2, -2])], values[:2, :, 0], accumulate
    )
    check("aten.index_put.default", x, [torch.tensor([3, 0])], values[:1, :1], accumulate=accumulate)


def test_index_put_adds_duplicates_once():
    index = torch.tensor([0, 2, 0, -3, 0])
    check("aten.index_put.default", torch.randn(3, 2), [index], torch.randn(5, 2), True)
    check("aten._index_put_impl.default", torch.randn(3, 2), [index], torch.randn(5, 2), True)
    check("aten.index_put.default", torch.rand(3, 2) > 0.5, [index], torch.rand(5, 2) > 0.5, True)
