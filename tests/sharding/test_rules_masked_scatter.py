"""masked_scatter, shard by shard."""

import pytest
import torch

from tests.sharding.simulate import check


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape) < 0.5


@pytest.mark.parametrize(
    ("shape", "marked", "source"),
    [
        ((5, 4), (5, 4), (20,)),
        ((5, 4), (4,), (3, 7)),
        ((4,), (3, 4), (12,)),
        ((5, 1), (1, 4), (20,)),
        ((7,), (7,), (9,)),
    ],
)
def test_masked_scatter(shape, marked, source):
    check("aten.masked_scatter.default", torch.randn(shape), mask(*marked), torch.randn(source))


def test_masked_scatter_of_exactly_as_many_elements_as_needed():
    marked = torch.tensor([[True, False, True], [False, True, False]])
    check("aten.masked_scatter.default", torch.randn(2, 3), marked, torch.randn(3))
    check("aten.masked_scatter.default", torch.randn(2, 3), torch.zeros(2, 3, dtype=torch.bool), torch.randn(1))


@pytest.mark.parametrize("source", [(20,), (2, 12), (30,)])
def test_masked_scatter_backward(source):
    check("aten.masked_scatter_backward.default", torch.randn(5, 4), mask(5, 4), list(source))
    check("aten.masked_scatter_backward.default", torch.randn(5, 4), mask(4), list(source))
