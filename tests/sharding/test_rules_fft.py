"""Fourier transforms, shard by shard."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.expansions import check_expansion
from tests.sharding.simulate import check


def waves(*shape):
    return torch.randn(*shape, dtype=torch.complex64)


def test_dims_that_are_not_transformed_are_cut():
    check("aten._fft_c2c.default", waves(5, 4, 2), [1], 0, True)
    check("aten._fft_c2c.default", waves(5, 4), [1], 1, False)
    check("aten._fft_r2c.default", torch.randn(5, 4, 3), [0, 2], 2, True)
    check("aten._fft_r2c.default", torch.randn(2, 5), [1], 0, False)
    check("aten._fft_c2r.default", waves(5, 4), [1], 2, 7)
    check("aten._fft_c2r.default", waves(5, 4), [1], 2, 6)


CUTS = ["x, -, -", "-, x, -", "-, -, x", "x, y, -", "x, -, y", "-, x y, -"]
DIMS = [[0, 1], [1, 2], [0, 1, 2], [2, 0]]


@pytest.mark.parametrize(
    ("cut", "dims"), [(cut, dims) for cut in CUTS for dims in DIMS if any(cut.split(", ")[dim] != "-" for dim in dims)]
)
@pytest.mark.parametrize("mode", [0, 1])
def test_dims_are_transformed_one_after_the_other(cut, dims, mode):
    check_expansion("aten._fft_c2c.default", waves(4, 3, 5), dims, mode, True, cut=[cut])
    check_expansion("aten._fft_r2c.default", torch.randn(4, 3, 5), dims, mode, True, cut=[cut], tolerance=1e-4)
    size = 2 * ((4, 3, 5)[dims[-1]] - 1)
    check_expansion("aten._fft_c2r.default", waves(4, 3, 5), dims, mode, size, cut=[cut], tolerance=1e-4)


def test_a_transform_of_cut_planes_swaps_dims_instead_of_gathering():
    x = waves(8, 60)
    gathered_by_two = 2 * x.numel() * 8 // 2
    assert check_expansion(
        "aten._fft_c2c.default", x[:, :].contiguous(), [0, 1], 0, True, cut=["x y, -"], tolerance=1e-4
    )
    moved = check_expansion("aten._fft_c2c.default", x, [0, 1], 0, True, cut=["x, -"], tolerance=1e-4)
    assert moved < gathered_by_two
