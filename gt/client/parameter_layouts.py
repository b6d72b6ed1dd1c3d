"""The layout of what belongs to a parameter: a gradient, an optimizer's state, a value that is loaded or copied.

What belongs to a parameter lies as the parameter does, so that its updates move nothing and no worker holds more of it
than of the parameter. The states of optimizers are laid out when they are loaded, and whenever their parameters move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer

from gt.client import active_session
from gt.client.session_reads import locate_copies
from gt.client.tensor import Tensor, to_gt
from gt.client.torch_patches.dispatch import tree_leaves, tree_map_only
from gt.client.torch_patches.optimizer_defaults import call_after_loading
from gt.sharding.spec import ShardingSpec

# Optimizers that have a state, with the number of parameters for which it was laid out.
_laid_out: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


def layout_beside(parameter: Tensor, shape: Sequence[int]) -> ShardingSpec | None:
    """The layout of a tensor of a shape that belongs to a parameter: that of the parameter, in the dims that it has of
    it. None if it has other dims, or if there is only one worker."""
    ref = parameter._ref
    dims = None if ref.session.alone else _dims_of(tuple(parameter.shape), tuple(shape))
    if dims is None:
        return None
    spec = locate_copies(ref, is_planning=True)[0]
    axes = [() if dim is None else spec.dims[dim] for dim in dims]
    return spec.replace(dims=axes, cuts=[None if dim is None else spec.cuts[dim] for dim in dims], partial=())


def _dims_of(whole: tuple[int, ...], shape: tuple[int, ...]) -> Sequence[int | None] | None:
    """The dims of a parameter that the dims of a tensor beside it are, None for one of a single element. Factored
    states have a matrix's rows and columns: all dims but the last, or all but the one before."""
    last = len(whole) - 1
    for dims in (range(last + 1), range(last), (*range(last - 1), last)) if last > 0 else (range(last + 1),):
        if shape == tuple([whole[dim] for dim in dims]):
            return dims
    if len(shape) == len(whole) and all(size in (1, own) for size, own in zip(shape, whole, strict=True)):
        return [dim if shape[dim] == size else None for dim, size in enumerate(whole)]
    return None


def lay_beside(parameter: Tensor, value: torch.Tensor) -> Tensor:
    """A tensor that belongs to a parameter, on GT and where the parameter is. A GT tensor stays the same object."""
    layout = layout_beside(parameter, value.shape)
    if not isinstance(value, Tensor):
        return to_gt(value, layout)
    ref = value._ref
    if layout is not None and ref is ref.storage:
        ref.session.place(ref.storage, layout)
        return value
    return to_gt(value, layout)


def note_optimizer(optimizer: Optimizer) -> None:
    """An optimizer makes a step, maybe of plain parameters: if these are moved to GT, its state follows."""
    _laid_out.setdefault(optimizer, 0)


def lay_out_new_state(optimizer: Optimizer) -> None:
    """Lay out the state of an optimizer if it has grown: in a first step, or in steps before its parameters were moved
    to GT."""
    if _laid_out.get(optimizer, 0) != len(optimizer.state):
        lay_out_state(optimizer)


def lay_out_state(optimizer: Optimizer) -> None:
    """Lay out the state of an optimizer as its parameters lie; move to GT what is still in this process. Numbers, such
    as step counts, stay here."""
    _laid_out[optimizer] = len(optimizer.state)
    _lay_out_entries(optimizer, list(optimizer.state))


def follow_parameters(parameters: Iterable[Tensor]) -> None:
    """Parameters have got another layout: their gradients and the states of optimizers follow."""
    moved = list(parameters)
    for parameter in moved:
        if parameter.grad is not None:
            parameter.grad = lay_beside(parameter, parameter.grad)
    for optimizer in list(_laid_out):
        _lay_out_entries(optimizer, [parameter for parameter in moved if parameter in optimizer.state])


def belongings() -> Iterator[tuple[Tensor, str, torch.Tensor]]:
    """What belongs to the parameters of optimizers, gradients and states with dims: the parameter, the name of the
    entry, and the tensor."""
    for optimizer in list(_laid_out):
        for parameter, entries in list(optimizer.state.items()):
            if not isinstance(parameter, Tensor) or not isinstance(entries, dict):
                continue
            if parameter._ref.session is active_session.active:
                for name, value in (("grad", parameter.grad), *entries.items()):
                    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
                    yield from [
                        (parameter, name, leaf) for leaf in leaves if leaf.dim() and leaf.layout is torch.strided
                    ]


def _lay_out_entries(optimizer: Optimizer, parameters: Iterable[Any]) -> None:
    for parameter in parameters:
        entries = optimizer.state[parameter]
        is_here = isinstance(parameter, Tensor) and parameter._ref.session is active_session.active
        if is_here and isinstance(entries, dict):
            for name, value in entries.items():
                entries[name] = tree_map_only(torch.Tensor, lambda each, beside=parameter: _laid(beside, each), value)


def _laid(parameter: Tensor, value: torch.Tensor) -> torch.Tensor:
    return lay_beside(parameter, value) if value.dim() and value.layout is torch.strided else value


call_after_loading(lay_out_state)
