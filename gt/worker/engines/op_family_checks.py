"""The functions of the checks in `checked_ops.py`, most of them about a family of ops, such as attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gt.core.meta import contiguous_strides

Tensors: TypeAlias = Sequence[Tensor]
_LOWEST = {dtype: torch.iinfo(dtype).min for dtype in (torch.int64, torch.int32)}


def listed(value: Any) -> list[Tensor]:
    if value is None:
        return []
    return [value] if isinstance(value, Tensor) else [item for item in value if isinstance(item, Tensor)]


def has_gaps(tensor: Tensor) -> bool:
    return not torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


def compact(tensor: Tensor) -> Tensor:
    """For kernels that assume tensors without gaps or overlaps: a copy of any other, in the same memory format."""
    return tensor.contiguous() if has_gaps(tensor) else tensor


def contiguous(tensor: Tensor) -> Tensor:
    """With row-major strides also in dims of size 1, because the results of some kernels depend on these."""
    return tensor.contiguous().as_strided(tensor.shape, contiguous_strides(tuple(tensor.shape)))


def with_unit_stride(tensor: Tensor) -> Tensor:
    """For kernels that assume that the last dim has stride 1."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def forward_shape(op: str, *values: Any) -> tuple[int, ...]:
    """The shape that torch's shape function gives for an op of these arguments."""
    return _forward_shape(op, tuple([_hashable(value) for value in values]))


class _ShapeAndDtype(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


def _hashable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _ShapeAndDtype(tuple(value.shape), value.dtype)
    return tuple(value) if isinstance(value, list) else value


@lru_cache(maxsize=4096)
def _forward_shape(op: str, values: tuple[Any, ...]) -> tuple[int, ...]:
    packet, overload = op.split(".")
    result = getattr(getattr(torch.ops.aten, packet), overload)(*[_as_meta_tensor(value) for value in values])
    return tuple((result if isinstance(result, Tensor) else result[0]).shape)


def _as_meta_tensor(value: Any) -> Any:
    if isinstance(value, _ShapeAndDtype):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return list(value) if isinstance(value, tuple) else value


def are_statistics(channels: int, *saved: Tensor | None) -> bool:
    """Whether these are what a batch norm saves for each channel in training."""
    return all(each is not None and tuple(each.shape) == (channels,) for each in saved)


def in_rows(tensor: Tensor, output_mask: Sequence[bool]) -> Tensor:
    """The kernel for channels-last memory writes the gradient of the input also if it has no memory for that."""
    return tensor if output_mask[0] else tensor.contiguous()


def norms_shape(tensor: Tensor, dim: int) -> tuple[int, ...]:
    if not tensor.numel() or dim not in (0, tensor.dim() - 1):
        raise ValueError(f"a tensor of shape {list(tensor.shape)} has no norms over all dims but {dim}")
    return tuple(size if place == dim else 1 for place, size in enumerate(tensor.shape))


def numbers(lengths: Tensor | Sequence[int]) -> list[int]:
    return [int(each) for each in (lengths.reshape(-1).tolist() if isinstance(lengths, Tensor) else lengths)]


def used_targets(targets: Tensor, target_lengths: Tensor | Sequence[int]) -> Tensor:
    """Targets of a CTC loss without the padding, which is never read."""
    if targets.dim() == 1:
        return targets
    positions = torch.arange(targets.shape[1], device=targets.device)
    return targets[positions < torch.tensor(numbers(target_lengths), device=targets.device).unsqueeze(1)]


def margin_shape(loss: str, batch_rank: int, input: Tensor, target: Tensor, *settings: Any) -> tuple[int, ...]:
    """The loss of an input without a batch is one number, where torch's shape function gives it a dim."""
    return forward_shape(f"{loss}.default", input, target, *settings) if target.dim() >= batch_rank else ()


def broadcasts(tensor: Tensor | None, shape: Sequence[int]) -> bool:
    sizes = () if tensor is None else tensor.shape
    pairs = zip(reversed(sizes), reversed(shape), strict=False)
    return len(sizes) <= len(shape) and all(size in (1, wanted) for size, wanted in pairs)


def are_single(*values: Any) -> bool:
    """Whether tensors, and those in lists, have one number each."""
    tensors = [tensor for value in values if not isinstance(value, float | int) for tensor in listed(value)]
    return all(tensor.numel() == 1 for tensor in tensors)


def have_equal_strides(parameters: Tensors, *states: Tensors | None) -> bool:
    """Fused steps walk through the memory of a parameter, its gradient and its state at once."""
    pairs = [pair for state in (parameters, *states) for pair in zip(listed(state), parameters, strict=False)]
    return all(tensor.stride() == parameter.stride() and not has_gaps(tensor) for tensor, parameter in pairs)


def with_strides_of(gradients: Tensors, parameters: Tensors, grad_scale: Tensor | None) -> Tensors:
    """Gradients with other strides are copied, unless they are scaled in place."""
    pairs = list(zip(gradients, parameters, strict=True))
    if all(gradient.stride() == parameter.stride() for gradient, parameter in pairs):
        return gradients
    if grad_scale is not None:
        raise ValueError("grads, which are scaled in place, must have the strides of self")
    return [torch.empty_like(parameter).copy_(gradient) for gradient, parameter in pairs]


def reaches(scale: float | None, before: int, after: int) -> bool:
    """Antialiasing computes from the scale which rows of the input it reads, without comparing them with the size: the
    middle of the last row of the result must be inside of the input."""
    return scale is None or (scale > 0 and (after - 0.5) / scale <= before)


def dims_exist(self: Tensor, dim: Sequence[int]) -> bool:
    """Whether each dim is given once; raises if there is no such dim."""
    rank = max(self.dim(), 1)
    wrong = [each for each in dim if not -rank <= each < rank]
    if wrong:
        raise IndexError(f"dim {wrong[0]} is out of range for a tensor of {self.dim()} dims")
    return len({each % rank for each in dim}) == len(dim)


def come_in_pairs(pivots: Tensor) -> bool:
    rows = pivots.reshape(-1, pivots.shape[-1]).tolist() if pivots.numel() else []
    runs = ["".join("-" if pivot < 0 else " " for pivot in row).split() for row in rows]
    return all(len(run) % 2 == 0 for row in runs for run in row)


def has_lowest(tensor: Tensor) -> bool:
    """Whether a tensor contains the lowest integer, which has no positive counterpart: the processor may trap."""
    return tensor.dtype in _LOWEST and bool((tensor == _LOWEST[tensor.dtype]).any())


def are_gates(hidden: Tensor, input_bias: Tensor, hidden_bias: Tensor, has_biases: bool) -> bool:
    """Whether the weights of an LSTM's layer have the rows of 4 gates; biases are not read if there are none."""
    rows, size = hidden.shape
    return rows == 4 * size and (not has_biases or tuple(input_bias.shape) == tuple(hidden_bias.shape) == (rows,))


def workspace_bytes(input: Tensor, *settings: Any) -> int:
    return _workspace_bytes(tuple(input.shape), input.dtype, *settings)


@lru_cache(maxsize=256)
def _workspace_bytes(
    shape: tuple[int, ...], dtype: torch.dtype, hidden: int, layers: int, reverse: bool, bidirectional: bool
) -> int:
    """The size of the forward op's workspace, found by running it."""
    gates = 4 * hidden
    sizes = (shape, (gates, shape[2]), (gates, hidden), (gates,), (gates,), (shape[1], hidden), (shape[1], hidden))
    with torch.inference_mode(False), torch.enable_grad():
        tensors = [torch.zeros(size, dtype=dtype) for size in sizes]
        forward = torch.ops.aten.mkldnn_rnn_layer.default
        return int(forward(*tensors, reverse, [], 2, hidden, layers, True, bidirectional, False, True)[3].nbytes)
