"""Inferred strides of normalized and convolved images against torch's kernels, for images of one pixel, row, column,
channel or image in every memory format. Strides of dims of one element are compared too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gt.client.memory_formats import suggested_format
from tests.client.test_kernel_strides import inferred_results

aten = torch.ops.aten

SHAPES = {
    "one pixel": (3, 8, 1, 1),
    "one row": (3, 8, 1, 4),
    "one column": (3, 8, 4, 1),
    "one channel": (3, 1, 4, 4),
    "one image": (1, 8, 4, 4),
    "one pixel of one image": (1, 8, 1, 1),
    "one element": (1, 1, 1, 1),
    "several of all": (2, 4, 3, 5),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def in_formats(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Images with the strides of both memory formats, with dims of one element of stride 1, cut out of larger images,
    and with exchanged rows and columns."""
    last = torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)
    unit = tuple(1 if size == 1 else stride for size, stride in zip(shape, last.stride(), strict=True))
    larger = torch.empty([max(size, 2) for size in shape], dtype=dtype)
    rows_exchanged = torch.empty(shape, dtype=dtype).mT.contiguous().mT
    found = [torch.empty(shape, dtype=dtype), last, last.as_strided(shape, unit), rows_exchanged]
    found.append(larger[tuple(slice(size) for size in shape)])
    return [torch.rand_like(image) for image in {image.stride(): image for image in found}.values()]


def assert_inferred(func: Any, *args: Any) -> None:
    """Compare the shapes and strides of an op's results with the inferred ones, if they can be inferred."""
    inferred = inferred_results(func, args, {})
    for ours, theirs in zip(inferred or (), func(*args), strict=False):
        if theirs is not None and theirs.numel():
            given = [(tuple(value.shape), value.stride()) for value in args if isinstance(value, torch.Tensor)]
            assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride()), (func, given)


def pairs(shape: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return itertools.product(in_formats(shape), repeat=2)


@shapes
@pytest.mark.parametrize("training", [False, True])
def test_normalized_images_have_torchs_strides(shape: tuple[int, ...], training: bool) -> None:
    statistics = [torch.rand(shape[1]) for _ in range(4)]
    for image in in_formats(shape):
        assert_inferred(aten.native_batch_norm.default, image, *statistics, training, 0.1, 1e-5)
        assert_inferred(aten._native_batch_norm_legit_no_training.default, image, *statistics, 0.1, 1e-5)
        assert_inferred(aten._batch_norm_no_update.default, image, *statistics, 0.1, 1e-5)


@shapes
@pytest.mark.parametrize("training", [False, True])
def test_gradients_of_normalized_images_have_torchs_strides(shape: tuple[int, ...], training: bool) -> None:
    """The kernel depends on the strides of the gradient, the result on those of the image."""
    statistics = [torch.rand(shape[1]) for _ in range(5)]
    for gradient, image in pairs(shape):
        args = (gradient, image, *statistics, training, 1e-5, [True] * 3)
        assert_inferred(aten.native_batch_norm_backward.default, *args)
        assert_inferred(aten.batch_norm_backward.default, *args, torch.empty(0, dtype=torch.uint8))


@shapes
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_images_normalized_in_groups_have_torchs_strides(shape: tuple[int, ...], groups: int) -> None:
    images, channels, height, width = shape
    if channels % groups:
        pytest.skip("the channels cannot be cut into these groups")
    sizes = (images, channels, height * width, groups)
    weight, mean = torch.rand(channels), torch.rand(images, groups)
    for gradient, image in pairs(shape):
        if not image.is_contiguous(memory_format=suggested_format(image)):
            continue  # torch's kernel refuses it
        assert_inferred(aten.native_group_norm.default, image, weight, weight, *sizes, 1e-5)
        args = (gradient, image, mean, mean, weight, *sizes, [True] * 3)
        assert_inferred(aten.native_group_norm_backward.default, *args)
