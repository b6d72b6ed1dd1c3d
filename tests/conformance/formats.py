"""Memory formats of operands: how a sample's tensors lie in memory before an op gets them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.conformance.sides import Side


@dataclass(frozen=True, slots=True)
class Format:
    """`stored` is a plain tensor in the memory that a side is given, `viewed` the operand as a view of that memory,
    where it `applies` to a tensor. Ops cannot write to a format in which elements share memory."""

    applies: Callable[[torch.Tensor], bool]
    stored: Callable[[torch.Tensor], torch.Tensor]
    viewed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    is_writable: bool = True


def _itself(stored: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return stored


def _channels_last(dims: int, format_: torch.memory_format) -> Format:
    return Format(lambda tensor: tensor.dim() == dims, lambda tensor: tensor.contiguous(memory_format=format_), _itself)


def _reversed(tensor: torch.Tensor) -> torch.Tensor:
    order = list(range(tensor.dim()))[::-1]
    return tensor.permute(order).contiguous().permute(order)


def _with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    memory = tensor.new_zeros([2 * size for size in tensor.shape])
    memory[_every_second(tensor)] = tensor
    return memory


def _every_second(tensor: torch.Tensor) -> tuple[slice, ...]:
    return tuple([slice(None, None, 2)] * tensor.dim())


FORMATS = {
    "channels_last": _channels_last(4, torch.channels_last),
    "channels_last_3d": _channels_last(5, torch.channels_last_3d),
    "permuted": Format(lambda tensor: tensor.dim() > 1, _reversed, _itself),
    "transposed": Format(
        lambda tensor: tensor.dim() > 1,
        lambda tensor: tensor.mT.contiguous(),
        lambda stored, tensor: stored.mT,
    ),
    "expanded": Format(
        lambda tensor: tensor.dim() > 1 and tensor.shape[0] > 1,
        lambda tensor: tensor[:1].contiguous(),
        lambda stored, tensor: stored.expand(tensor.shape),
        is_writable=False,
    ),
    "stepped": Format(
        lambda tensor: tensor.dim() > 0 and tensor.numel() > 0,
        _with_gaps,
        lambda stored, tensor: stored[_every_second(tensor)],
    ),
}


class FormattedSide:
    """A side that gets its tensors in a format."""

    def __init__(self, side: Side, format_: Format | None) -> None:
        self._side = side
        self._format = format_

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        format_ = self._format
        if format_ is None or tensor.layout is not torch.strided or not format_.applies(tensor):
            return self._side.place(tensor)
        return format_.viewed(self._side.place(format_.stored(tensor)), tensor)

    def allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        is_writable = self._format is None or self._format.is_writable
        return self.place(tensor) if is_writable else self._side.place(tensor)

    def settle(self) -> None:
        self._side.settle()

    def factories(self) -> contextlib.AbstractContextManager[Any]:
        return self._side.factories()


def applies_to(format_: Format, sample: Any) -> bool:
    tensors = [leaf for leaf in tree_leaves((sample.input, sample.args, sample.kwargs)) if _is_strided(leaf)]
    return any(format_.applies(tensor) for tensor in tensors)


def _is_strided(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
