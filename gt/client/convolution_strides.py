"""Strides of convolutions and of their gradients, as torch's CPU kernels give them.

Torch copies the operands to one memory format, unless they are dense in it already: operands of one pixel are dense in
several formats and keep their own strides. Some kernels then compute the groups one by one and concatenate them. Each
function follows `_convolution` or `convolution_backward` of C++.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gt.client.memory_formats import Strides, strides_in_format, strides_without_gaps, suggested_format
from gt.client.torch_patches.conv_backend import computes_groups_apart, conv_memory_format, select_conv_backend
from gt.client.torch_patches.op_registry import DispatchKey, kernel_of

_NEUTRAL = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}
_concatenate = kernel_of(torch.ops.aten.cat.default, DispatchKey.CompositeExplicitAutogradNonFunctional)


class _Part(NamedTuple):
    """A part of a convolution that a kernel computes at once, one of `parts` along the channels. `format_` is the
    memory format of its images, `weight_format` that of its weights. `is_row`: one-dimensional images, computed as
    images of one row."""

    parts: int
    format_: torch.memory_format
    weight_format: torch.memory_format
    is_row: bool


def convolution(arguments: Mapping[str, Any], results: Sequence[torch.Tensor | None]) -> list[Strides | None]:
    part = _part(arguments)
    return [None if result is None else _strides(part, result, 1, part.format_) for result in results]


def convolution_gradients(arguments: Mapping[str, Any], results: Sequence[torch.Tensor | None]) -> list[Strides | None]:
    """Of a convolution of no images the gradients are zeros like the operands."""
    source, weight = arguments["input"], arguments["weight"]
    if not source.numel() and weight.dim() != 3:
        return [strides_without_gaps(source), strides_without_gaps(weight), None]
    part = _part(arguments)
    of_source, of_weight, _ = results
    return [
        None if of_source is None else _strides(part, of_source, 1, part.format_),
        None if of_weight is None else _strides(part, of_weight, 0, part.weight_format),
        None,
    ]


def _part(arguments: Mapping[str, Any]) -> _Part:
    source, weight = arguments["input"], arguments["weight"]
    given = {name: arguments.get(name) for name in _NEUTRAL}
    is_row = weight.dim() == 3
    if is_row:
        source, weight = source.contiguous().unsqueeze(2), weight.unsqueeze(2)
        given = {name: [_NEUTRAL[name], *(value or [])] for name, value in given.items()}
    backend = select_conv_backend(
        source,
        weight,
        arguments.get("bias"),
        given["stride"],
        given["padding"],
        given["dilation"],
        arguments["transposed"],
        given["output_padding"],
        arguments["groups"],
        arguments.get("bias_sizes"),
    )
    format_ = conv_memory_format(source, weight, backend)
    if not computes_groups_apart(backend):
        return _Part(1, format_, format_, is_row)
    count = arguments["groups"]
    if count > 1:
        source, weight = _cut(source, 1, count, format_), _cut(weight, 0, count, format_)
        format_ = conv_memory_format(source, weight, backend)
    return _Part(count, format_, suggested_format(weight.contiguous(memory_format=format_)), is_row)


def _cut(operand: torch.Tensor, dim: int, count: int, format_: torch.memory_format) -> torch.Tensor:
    """The part of an operand for the first of several groups: `subtensor` of C++."""
    whole = operand.contiguous(memory_format=format_)
    part = whole.narrow(dim, 0, whole.shape[dim] // count)
    return part.contiguous(memory_format=suggested_format(whole))


def _strides(part: _Part, result: torch.Tensor, dim: int, format_: torch.memory_format) -> Strides:
    """The strides of a result whose parts are in a memory format and lie along a dim."""
    images = result.unsqueeze(2) if part.is_row else result
    stride = strides_in_format(images, format_)
    if part.parts > 1 and images.numel():
        piece = images.narrow(dim, 0, images.shape[dim] // part.parts)
        piece = torch.empty_strided(piece.shape, strides_in_format(piece, format_), dtype=piece.dtype, device="meta")
        stride = _concatenate([piece] * part.parts, dim).stride()
    return (*stride[:2], stride[3]) if part.is_row else stride
