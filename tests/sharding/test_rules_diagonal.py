"""Diagonals and triangles, shard by shard."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.samples import numbers
from tests.sharding.simulate import check


@pytest.mark.parametrize("offset", [0, 1, -2, 4, 9])
def test_diagonals(offset):
    x = numbers(5, 3)
    line = torch.diagonal(x, offset)
    check("aten.diagonal.default", x, offset)
    check("aten.diagonal_copy.default", numbers(3, 2, 5), offset, -1, 0)
    check("aten.diagonal_backward.default", line, [5, 3], offset, 0, 1)
    check("aten.diagonal_scatter.default", x, torch.randn_like(line), offset)
    check("aten.diag_embed.default", numbers(2, 5), offset)
    check("aten.tril.default", numbers(2, 5, 3), offset)
    check("aten.triu.default", x, -offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bfloat16, torch.complex64])
def test_traces(dtype):
    matrix = torch.arange(12).view(4, 3).to(dtype)
    try:
        matrix.trace()
    except NotImplementedError as error:
        pytest.skip(str(error))  # torch 2.10 has none in bfloat16
    check("aten.trace.default", matrix)


def test_more_diagonals():
    check("aten.diagonal.default", torch.rand(5, 3) > 0.3)
    check("aten.diag_embed.default", numbers(4), 0, 1, 0)
    check("aten.diag_embed.default", numbers(3, 2), -1, 0, 2)
    check("aten.trace.default", numbers(1, 5))
    check("aten.tril.default", torch.ones(4, 5, dtype=torch.bool), 1)
