"""After a failure: tensors that could not be written get back the last value that they had."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gt.client.entries import wrap
from gt.client.factories import FactoryMode
from gt.client.nodes import Base
from gt.client.tensor import Tensor
from gt.core.errors import GTError, WorkerLost
from gt.core.meta import contiguous_strides


def recover(*targets: torch.Tensor | torch.nn.Module | torch.optim.Optimizer) -> None:
    """Give tensors back the last value that they had, where they have none because a write to them never began: what
    should have been written was lost with a worker, or has failed. Others keep their value.

    Takes tensors, modules (parameters and buffers) and optimizers (parameters and state). Every value is read, and laid
    out anew over the workers that are there. Where one cannot be read its error is raised, and nothing has changed.
    """
    bases = {id(tensor._node.base): tensor._node.base for target in targets for tensor in _tensors(target)}
    for session in {base.session for base in bases.values()}:
        with contextlib.suppress(WorkerLost):  # so that the dispatcher knows who is gone
            session.wait_for_work()
    values = [base.session.fetch(base, former=True) for base in bases.values()]
    for base, value in zip(bases.values(), values, strict=True):
        _put_back(base, value)


def _tensors(target: Any) -> Iterator[Tensor]:
    """The GT tensors of a tensor, a module or an optimizer."""
    if isinstance(target, torch.nn.Module):
        leaves = [*target.parameters(), *target.buffers()]
    elif isinstance(target, torch.optim.Optimizer):
        leaves = tree_leaves(([group["params"] for group in target.param_groups], list(target.state.values())))
    elif isinstance(target, torch.Tensor):
        leaves = [target]
    else:
        raise TypeError(f"gt.recover takes tensors, modules and optimizers, not {type(target).__name__}")
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


def _put_back(base: Base, value: torch.Tensor) -> None:
    """All handles and views of a tensor stand for the new one; what it was is freed with the record of it."""
    session = base.session
    fresh = session.upload(value, is_operand=True)
    if base.geometry.stride != contiguous_strides(tuple(base.geometry.shape)):
        with torch.no_grad(), FactoryMode(Tensor):
            strided = torch.empty_strided(base.geometry.shape, base.geometry.stride, dtype=base.geometry.dtype)
            fresh = strided.copy_(wrap(Tensor, fresh))._node.base  # type: ignore[attr-defined]
    with contextlib.suppress(GTError):  # it may lie nowhere any more: the first op that needs it says where
        fresh = session.redistribute(fresh, session.locate(base))
    with session.lock:
        base.id, fresh.id = fresh.id, base.id
