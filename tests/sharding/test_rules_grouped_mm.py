"""Grouped matrix products, shard by shard."""

import pytest
import torch

from tests.sharding.simulate import check

OP = "aten._grouped_mm.default"
OFFSETS = [(2, 2, 8), (0, 3, 8), (8, 8, 8), (1, 5, 8)]


def ends(*offsets: int) -> torch.Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


@pytest.mark.parametrize("offsets", OFFSETS)
def test_groups_of_rows(offsets):
    check(OP, torch.randn(8, 8), torch.randn(3, 8, 4), ends(*offsets))


@pytest.mark.parametrize("offsets", OFFSETS)
def test_groups_of_columns(offsets):
    check(OP, torch.randn(3, 5, 8), torch.randn(8, 8), ends(*offsets))


@pytest.mark.parametrize("offsets", OFFSETS)
def test_groups_of_the_contracted_dim(offsets):
    check(OP, torch.randn(8, 4).t(), torch.randn(8, 4), ends(*offsets))


def test_groups_that_are_apart():
    check(OP, torch.randn(3, 5, 8), torch.randn(3, 8, 4))


def test_weights_that_are_transposed():
    check(OP, torch.randn(8, 8), torch.randn(3, 5, 8).mT, ends(2, 2, 8))


def test_narrow_floats():
    left, right = torch.randn(8, 8).bfloat16(), torch.randn(3, 8, 8).bfloat16()
    check(OP, left, right, ends(2, 2, 8), tolerance=0.1)
