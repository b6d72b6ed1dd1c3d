"""The kernel that torch selects for a convolution on the CPU, and the memory format of its result."""

from __future__ import annotations

from typing import Any

import torch

from gt.client.torch_patches.tensors import make_handle, no_torch_function


class _ShapeOnCPU(torch.Tensor):
    """A tensor without memory on the device "cpu": torch selects the kernel of a convolution by the device."""

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of a tensor that has only a shape")


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return make_handle(_ShapeOnCPU, tensor.shape, tensor.stride(), 0, None, tensor.dtype)


def select_conv_backend(
    source: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    bias_sizes: Any,
) -> Any:
    """The kernel for operands without bytes. `bias_sizes` is given for a backward convolution, in place of `bias`."""
    source, weight = _on_cpu(source), _on_cpu(weight)
    bias = None if bias is None else _on_cpu(bias)
    return torch._C._select_conv_backend(
        source, weight, bias, stride, padding, dilation, transposed, output_padding, groups, bias_sizes
    )


def conv_memory_format(source: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
    """The memory format to which a kernel copies its operands, and in which it gives its result."""
    return torch._C._conv_determine_backend_memory_format(_on_cpu(source), _on_cpu(weight), backend)


def computes_groups_apart(backend: Any) -> bool:
    """Whether a kernel computes the groups of a convolution one by one."""
    return backend.name.startswith(("Slow", "NnpackSpatial")) and backend.name != "Slow3d"
