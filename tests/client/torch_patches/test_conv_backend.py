"""The memory format that torch's CPU kernel of a convolution gives."""

import pytest
import torch

from gt.client.torch_patches.conv_backend import conv_memory_format, select_conv_backend


@pytest.mark.parametrize("format_", [torch.contiguous_format, torch.channels_last])
def test_the_format_is_that_of_the_kernel(format_):
    x, weight = torch.ones(2, 3, 8, 8).to(memory_format=format_), torch.ones(4, 3, 3, 3).to(memory_format=format_)
    made = torch.conv2d(x, weight)
    operands = x.to("meta"), weight.to("meta")
    backend = select_conv_backend(*operands, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, None)
    told = conv_memory_format(*operands, backend)
    assert made.is_contiguous(memory_format=told), "results of convolutions would have other strides than torch gives"
