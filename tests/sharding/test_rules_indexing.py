"""index_select, gather and take, shard by shard."""

from __future__ import annotations

import pytest
import torch

from gt.sharding.op_calls import OpCall
from gt.sharding.rules import rule_of
from tests.sharding.samples import indices, numbers
from tests.sharding.simulate import check, encode, meta_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_index_select(dtype):
    x = numbers(5, 3, 2, dtype=dtype)
    check("aten.index_select.default", x, 0, indices(5, 4))
    check("aten.index_select.default", x, -2, indices(3, 7).int())
    check("aten.index_select.default", x, 2, torch.tensor(1))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather(dim):
    x = numbers(5, 4, 3)
    check("aten.gather.default", x, dim, indices(3, 5, 4, 3))
    check("aten.gather.default", x, dim, indices(3, 2, 3, 3))
    check("aten.gather.default", x, dim, indices(3, 5, 1, 2), sparse_grad=False)
    check("aten.gather.default", x > 0, dim, indices(3, 0, 4, 3))


def test_parts_of_bool_tensors_are_put_together_by_or():
    x, index, mask = torch.ones(4, dtype=torch.bool), torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool)
    args, inputs = (encode(x, []), 0, encode(index, [x])), (meta_of(x), meta_of(index))
    call = OpCall("aten.index_select.default", args, {}, inputs, (meta_of(mask),))
    assert str(rule_of(call)) == "d0, i -> i | mask(or): d0"


def test_take():
    check("aten.take.default", numbers(5, 3), torch.tensor([[0, 14, -1], [7, -15, 3]]))
    check("aten.take.default", numbers(4), torch.tensor(-2))
    check("aten.take.default", torch.tensor(3.0), torch.tensor([0, -1]))
