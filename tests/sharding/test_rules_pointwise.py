"""Pointwise rules, shard by shard."""

import torch

from tests.sharding.simulate import check


def test_add_and_mul() -> None:
    a, b = torch.randn(5, 6), torch.randn(6)
    check("aten.add.Tensor", a, b)
    check("aten.mul.Tensor", a, b)
    check("aten.relu.default", a)
