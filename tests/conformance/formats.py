"""Memory formats of operands: how a sample's tensors lie in memory before an op gets them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.conformance.sides import Side


@dataclass(frozen=True, slots=True)
class Format:
    """`stored` is a plain tensor in the memory that a side is given, `viewed` the operand as a view of that memory,
    where it `applies` to a tensor. Ops cannot write to a format in which elements share memory. `shrunk` makes the
    tensors of samples smaller first."""

    applies: Callable[[torch.Tensor], bool]
    stored: Callable[[torch.Tensor], torch.Tensor]
    viewed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    is_writable: bool = True
    shrunk: Callable[[torch.Tensor], torch.Tensor] | None = None


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


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    """Every other dim repeats its first element."""
    firsts = [slice(0, None if dim % 2 else 1) for dim in range(tensor.dim())]
    return tensor[tuple(firsts)].expand(tensor.shape)


def _windows(tensor: torch.Tensor) -> torch.Tensor:
    """Each row starts one element after the one before."""
    return tensor.flatten().as_strided(tensor.shape, [1] * tensor.dim())


def _with_one(dims: Sequence[int], order: Callable[[int], Sequence[int]], ranks: Sequence[int], odd: int = 0) -> Format:
    """Tensors of these ranks with one element in each of these dims, laid out in an order of dims, the outermost first;
    `odd` is the stride of dims of one element, if torch would not give it. Vectors that belong to channels get one
    element too."""

    shrinking = (1, *ranks) if dims == (1,) else ranks

    def shrunk(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or not tensor.numel() or tensor.dim() not in shrinking:
            return tensor
        found = tensor.detach()
        for dim in dims if tensor.dim() > 1 else (0,):
            found = found.narrow(dim, 0, 1)
        return found.clone(memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)

    def viewed(stored: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        strides, step = [0] * stored.dim(), 1
        for dim in reversed(order(stored.dim())):
            strides[dim] = odd if odd and stored.shape[dim] == 1 else step
            step *= stored.shape[dim]
        return stored.as_strided(stored.shape, strides)

    return Format(lambda tensor: tensor.dim() in ranks, lambda tensor: tensor.contiguous(), viewed, shrunk=shrunk)


def _channels_inside(rank: int) -> Sequence[int]:
    return (0, *range(2, rank), 1)


def _backwards(rank: int) -> Sequence[int]:
    return range(rank)[::-1]


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
    "uploaded expanded": Format(lambda tensor: max(tensor.shape[::2], default=0) > 1, _expanded, _itself),
    "uploaded stepped": Format(
        lambda tensor: tensor.dim() > 0 and tensor.numel() > 0,
        lambda tensor: _with_gaps(tensor)[_every_second(tensor)],
        _itself,
    ),
    "uploaded windows": Format(lambda tensor: tensor.dim() > 1 and tensor.numel() > 0, _windows, _itself),
    "one channel": _with_one((1,), _channels_inside, (4, 5)),
    "one pixel": _with_one((-1, -2), _channels_inside, (4, 5)),
    "one image": _with_one((0,), _channels_inside, (4, 5)),
    "one row": _with_one((0,), _backwards, (2, 3, 4, 5)),
    "one column": _with_one((-1,), range, (2, 3, 4, 5), odd=3),
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


# Kernels of torch that access memory beyond tensors whose sizes do not fit together.
_NOT_SHRUNK = ("lu_unpack", "_segment_reduce", "linalg.lu_solve", "linalg.householder_product", "ormqr")


def can_have(format_: Format, op: str) -> bool:
    """Whether the samples of an op can be given a format."""
    return format_.shrunk is None or not op.startswith(_NOT_SHRUNK)


def applies_to(format_: Format, sample: Any) -> bool:
    tensors = [leaf for leaf in tree_leaves((sample.input, sample.args, sample.kwargs)) if _is_strided(leaf)]
    return any(format_.applies(tensor) for tensor in tensors)


def shrink(format_: Format, sample: Any) -> Any:
    """A sample with smaller tensors, if the format has only such."""
    if format_.shrunk is None:
        return sample
    given = (sample.input, sample.args, sample.kwargs)
    sample.input, sample.args, sample.kwargs = tree_map_only(torch.Tensor, format_.shrunk, given)
    return sample


def _is_strided(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
