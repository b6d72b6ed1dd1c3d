"""Resampling and rearranging of images, shard by shard."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.simulate import MESHES, check

ONE = MESHES[1:2]
TWO = MESHES[2:]
UPSAMPLES = [
    ("upsample_nearest1d", 1, ()), ("upsample_linear1d", 1, (False,)), ("_upsample_nearest_exact1d", 1, ()),
    ("upsample_nearest2d", 2, ()), ("upsample_bilinear2d", 2, (True,)), ("upsample_bicubic2d", 2, (False,)),
    ("_upsample_nearest_exact2d", 2, ()), ("_upsample_bilinear2d_aa", 2, (False,)),
    ("_upsample_bicubic2d_aa", 2, (False,)), ("upsample_nearest3d", 3, ()), ("upsample_trilinear3d", 3, (False,)),
    ("_upsample_nearest_exact3d", 3, ()),
]  # fmt: skip


def test_upsampling() -> None:
    for op, rank, args in UPSAMPLES:
        x, size = torch.randn(3, 2, *[4] * rank), [7] * rank
        check(f"aten.{op}.default", x, size, *args, meshes=TWO)
        grad = torch.randn(3, 2, *size)
        check(f"aten.{op}_backward.default", grad, size, list(x.shape), *args, meshes=TWO, tolerance=1e-3)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_padding(rank: int) -> None:
    x, pads = torch.randn(3, 2, *[4] * rank), [1, 2] * rank
    for kind in ("reflection", "replication"):
        check(f"aten.{kind}_pad{rank}d.default", x, pads)
        grad = torch.randn(3, 2, *[7] * rank)
        check(f"aten.{kind}_pad{rank}d_backward.default", grad, x, pads)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("mode", [0, 1])
def test_sampling_by_a_grid(rank: int, mode: int) -> None:
    x, grid = torch.randn(2, 3, *[4] * rank), torch.rand(2, *[5, 3, 2][:rank], rank) * 2 - 1
    check(f"aten.grid_sampler_{rank}d.default", x, grid, mode, 0, False, meshes=TWO)
    grad = torch.randn(2, 3, *grid.shape[1:-1])
    args = (grad, x, grid, mode, 0, False)
    check(f"aten.grid_sampler_{rank}d_backward.default", *args, [True, True], meshes=TWO)
    check(f"aten.grid_sampler_{rank}d_backward.default", *args, [False, True], meshes=ONE)


def test_grids_of_affine_maps() -> None:
    check("aten.affine_grid_generator.default", torch.randn(3, 2, 3), [3, 1, 4, 5], False)
    check("aten.affine_grid_generator.default", torch.randn(3, 3, 4), [3, 1, 4, 5, 2], True)


@pytest.mark.parametrize("shape", [(2, 12, 5, 3), (8, 2, 3), (1, 4, 1, 2)])
def test_shuffling_pixels(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    check("aten.pixel_shuffle.default", x, 2)
    check("aten.pixel_unshuffle.default", torch.pixel_shuffle(x, 2).contiguous(), 2)
    if len(shape) == 4:
        check("aten.channel_shuffle.default", x, 2)
        check("aten.native_channel_shuffle.default", x, 2)


@pytest.mark.parametrize("shape", [(3, 2, 5, 4), (2, 5, 4), (2, 1, 3, 3)])
def test_columns_of_windows(shape: tuple[int, ...]) -> None:
    x, rest = torch.randn(shape), ([2, 3], [1, 1], [1, 0], [2, 1])
    check("aten.im2col.default", x, *rest)
    columns = torch.ops.aten.im2col(x, *rest)
    check("aten.col2im.default", columns, list(shape[-2:]), *rest)
