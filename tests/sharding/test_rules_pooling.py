"""Pooling, shard by shard."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.simulate import MESHES, check, resolve

ONE = MESHES[1:2]
TWO = MESHES[2:]
# input size, kernel, stride, padding, ceil_mode
POOLS = [
    ((7, 6), [2, 2], [], 0, False),
    ((7, 6), [3, 2], [2, 1], 1, False),
    ((9, 5), [3, 3], [2, 3], 1, True),
    ((5, 4), [3, 3], [1, 1], 1, True),
    ((8, 3), [5, 3], [3, 1], 1, True),
    ((4, 4), [1, 4], [3, 4], 0, False),
]


@pytest.mark.parametrize(("size", "kernel", "stride", "padding", "ceil"), POOLS)
def test_pooling(size: tuple, kernel: list, stride: list, padding: int, ceil: bool) -> None:
    x = torch.randint(0, 5, (2, 3, *size)).float()  # ties
    paddings = [min(padding, width // 2) for width in kernel]
    check("aten.max_pool2d_with_indices.default", x, kernel, stride, paddings, [1, 1], ceil, meshes=MESHES[1:])
    check("aten.avg_pool2d.default", x, kernel, stride, paddings, ceil, True, meshes=ONE)
    check("aten.avg_pool2d.default", x[0].clone(), kernel, stride, paddings, ceil, False, meshes=TWO)
    check("aten.avg_pool2d.default", x, kernel, stride, paddings, ceil, True, 3, meshes=ONE)


def test_pooling_of_windows_with_holes() -> None:
    check("aten.max_pool2d_with_indices.default", torch.randn(1, 2, 9, 8), [2, 3], [2, 1], [1, 1], [3, 2])


def test_pooling_of_infinities_and_nans() -> None:
    x = torch.randn(2, 7, 7)
    x[:, 2:5] = -torch.inf
    x[1, 5] = torch.nan
    check("aten.max_pool2d_with_indices.default", x, [3, 3], [2, 2], [1, 1])
    check("aten.max_pool2d_with_indices.default", torch.full((1, 5, 5), -torch.inf), [2, 2], [1, 1], [1, 1])


def test_pooling_of_volumes() -> None:
    x = torch.randn(2, 1, 5, 4, 3)
    check("aten.max_pool3d_with_indices.default", x, [2, 2, 2], [2, 1, 1], [1, 0, 0], meshes=TWO)
    check("aten.avg_pool3d.default", x, [2, 2, 2], [2, 1, 1], [1, 0, 1], meshes=TWO)


def test_gradients_of_pooling() -> None:
    x = torch.randn(3, 2, 5, 6)
    out, index = torch.ops.aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
    grad = torch.randn_like(out)
    check("aten.max_pool2d_with_indices_backward.default", grad, x, [2, 2], [2, 2], [0, 0], [1, 1], False, index)
    check("aten.avg_pool2d_backward.default", grad, x, [2, 2], [2, 2], [0, 0], False, True, None)
    check("aten.max_unpool2d.default", out, index, [5, 6])
    volume = torch.randn(3, 2, 4, 4, 4)
    out, index = torch.ops.aten.max_pool3d_with_indices(volume, [2] * 3, [2] * 3)
    grad, rest = torch.randn_like(out), ([2] * 3, [2] * 3, [0] * 3)
    check("aten.max_pool3d_with_indices_backward.default", grad, volume, *rest, [1] * 3, False, index)
    check("aten.avg_pool3d_backward.default", grad, volume, *rest, False, True, None)


@pytest.mark.parametrize("rank", [2, 3])
def test_adaptive_pooling(rank: int) -> None:
    for x in (torch.randn(3, 2, *[5] * rank), torch.randn(4, *[5] * rank)):
        out, index = resolve(f"aten.adaptive_max_pool{rank}d.default")(x, [2] * rank)
        check(f"aten._adaptive_avg_pool{rank}d.default", x, [2] * rank)
        check(f"aten.adaptive_max_pool{rank}d.default", x, [2] * rank)
        check(f"aten._adaptive_avg_pool{rank}d_backward.default", torch.randn_like(out), x)
        check(f"aten.adaptive_max_pool{rank}d_backward.default", torch.randn_like(out), x, index)


@pytest.mark.parametrize("rank", [2, 3])
def test_fractional_pooling(rank: int) -> None:
    x, samples = torch.randn(3, 2, *[6] * rank), torch.rand(3, 2, rank)
    lists = [2] * rank, [3] * rank
    check(f"aten.fractional_max_pool{rank}d.default", x, *lists, samples)
    out, index = resolve(f"aten.fractional_max_pool{rank}d.default")(x, *lists, samples)
    check(f"aten.fractional_max_pool{rank}d_backward.default", torch.randn_like(out), x, *lists, index)
