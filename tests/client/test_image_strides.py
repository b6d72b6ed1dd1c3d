"""Inferred strides of normalized and convolved images against torch's kernels, for images of one pixel, row, column,
channel or image in every memory format. Strides of dims of one element are compared too."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gt.client.torch_strides import suggested_format
from tests.client.test_kernel_strides import inferred_results
from tests.slow_parameters import some_of

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


@contextlib.contextmanager
def refused_by_torch(message: str) -> Iterator[None]:
    """Torch's kernel may refuse the strides of a call with this message."""
    try:
        yield
    except RuntimeError as error:
        if not re.search(message, str(error)):
            raise


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


CONVOLUTIONS = {  # channels of the images and of the result, groups, size of the kernel, stride, padding, dilation
    "1x1": (4, 6, 1, 1, 1, 0, 1),
    "3x3": (4, 6, 1, 3, 1, 1, 1),
    "dilated": (4, 6, 1, 3, 1, 2, 2),
    "from one channel": (1, 4, 1, 3, 1, 1, 1),
    "to one channel": (4, 1, 1, 3, 1, 1, 1),
    "depthwise 1x1": (4, 4, 4, 1, 1, 0, 1),
    "depthwise to one pixel": (4, 4, 4, 5, 2, 2, 1),
    "grouped": (4, 8, 2, 3, 1, 1, 1),
    "grouped 1x1": (4, 8, 2, 1, 1, 0, 1),
}


@pytest.fixture(params=[1, 2], ids=lambda count: f"{count} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torch selects another kernel for small convolutions if it has one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("convolution", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("dtype", some_of([torch.float32, torch.float64], 2))
def test_convolutions_and_their_gradients_have_torchs_strides(
    threads: None, convolution: tuple[int, ...], transposed: bool, dtype: torch.dtype
) -> None:
    channels, outputs, groups, size, stride, padding, dilation = convolution
    first, second = (channels, outputs) if transposed else (outputs, channels)
    weights = in_formats((first, second // groups, size, size), dtype)
    options = ([stride] * 2, [padding] * 2, [dilation] * 2, transposed, [0, 0], groups)
    for count, height, width in ((3, 1, 1), (3, 2, 2), (1, 4, 4), (3, 1, 4), (3, 4, 1)):
        for image, weight in itertools.product(in_formats((count, channels, height, width), dtype), weights):
            made = aten.convolution.default(image, weight, None, *options)
            told = inferred_results(aten.convolution.default, (image, weight, None, *options), {})
            assert told.stride() == made.stride(), (image.shape, image.stride(), weight.shape, weight.stride())
            with refused_by_torch("grad_weight (must|needs to) be contiguous"):
                assert_inferred(aten.convolution_backward.default, made, image, weight, [outputs], *options, [True] * 3)
