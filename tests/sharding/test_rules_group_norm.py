"""Group norm, shard by shard."""

from __future__ import annotations

import math

import pytest
import torch

from tests.sharding.expansions import check_expansion
from tests.sharding.simulate import check, resolve

ALL = [True, True, True]
GROUP_NORM = "aten.native_group_norm.default"
GROUP_NORM_BACKWARD = "aten.native_group_norm_backward.default"


def sizes(x, group):
    return (x.shape[0], x.shape[1], math.prod(x.shape[2:]), group)


def group_norm_gradients(x, weight, group, mask):
    _, mean, rstd = resolve(GROUP_NORM)(x, weight, None, *sizes(x, group), 1e-5)
    return torch.randn(x.shape), x, mean, rstd, weight, *sizes(x, group), mask


@pytest.mark.parametrize("group", [1, 2, 3, 6])
def test_group_norm_passes_batch_and_groups(group):
    x, w, b = torch.randn(5, 6, 4), torch.randn(6), torch.randn(6)
    check(GROUP_NORM, x, w, b, *sizes(x, group), 1e-5)
    check(GROUP_NORM, x, None, None, *sizes(x, group), 1e-5)
    check(GROUP_NORM_BACKWARD, *group_norm_gradients(x, w, group, ALL))
    check(GROUP_NORM_BACKWARD, *group_norm_gradients(x, None, group, [True, False, False]))


@pytest.mark.parametrize("group", [1, 2, 6])
def test_group_norm_over_cut_dims(group):
    x, w, b = 10 + torch.randn(3, 6, 4, 2), torch.randn(6), torch.randn(6)
    check_expansion(GROUP_NORM, x, w, b, *sizes(x, group), 1e-5, cut=["-, -, x, -", "-", "-"])
    check_expansion(GROUP_NORM, x, None, b, *sizes(x, group), 1e-5, cut=["y, -, x, -", "-"])
    args = group_norm_gradients(x, w, group, ALL)
    check_expansion(GROUP_NORM_BACKWARD, *args, cut=["-, -, x, -", "-, -, x, -", "-, -", "-, -", "-"], tolerance=1e-4)
    args = group_norm_gradients(x, None, group, [True, False, False])
    check_expansion(GROUP_NORM_BACKWARD, *args, cut=["y, -, x, -", "y, -, x, -", "-, -", "-, -"], tolerance=1e-4)


def test_group_norm_of_cut_channels():
    x, w = torch.randn(3, 6), torch.randn(6)
    check_expansion(GROUP_NORM, x, w, None, *sizes(x, 2), 1e-5, cut=["-, x", "x"])
    check_expansion(GROUP_NORM, x, w, None, *sizes(x, 1), 1e-5, cut=["-, x y", "-"])
