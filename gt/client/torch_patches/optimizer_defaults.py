"""Replaces the choice between the implementations of an optimizer, and the lists of the one on lists, for parameters on
GT.

Torch's optimizers update plain CPU parameters one by one, with about 12 ops for each. Their other implementation, on
lists of tensors, takes the same 12 ops for all of them together. Here the lists are buckets, and the intermediate
results of one bucket at a time are in memory.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

# Optimizers whose two implementations round in the same way: every element has the same bits. Those of ASGD, NAdam and
# RAdam do not, nor does Adamax with a tensor as learning rate.
SAME_BITS = ("adadelta", "adagrad", "adam", "rmsprop", "rprop", "sgd")
_DTYPES = (torch.float32, torch.float64)  # in which they do; in half precision they round at other points
_NAME = "_default_to_fused_or_foreach"
BUCKET_BYTES = 4 << 20  # of parameters, whole; those of gradients are as large
# Plain tensors, by id(), that optimizers treat as the parameters on GT for which they stand: see `standing_for`.
_originals: dict[int, torch.Tensor] = {}


@contextlib.contextmanager
def standing_for(originals: dict[int, torch.Tensor]) -> Iterator[None]:
    """Let plain tensors, given by id(), be taken for parameters on GT: optimizers choose the same implementation and
    the same lists for them."""
    _originals.update(originals)
    try:
        yield
    finally:
        for ident in originals:
            del _originals[ident]


def patch_optimizer_defaults(handle: type[torch.Tensor]) -> None:
    """Let optimizers whose parameters are all on GT use the implementation on lists, unless the user chose one."""
    for name in SAME_BITS:
        module = sys.modules[f"torch.optim.{name}"]
        setattr(module, _NAME, _preferring_lists(getattr(module, _NAME), handle))
    group: Any = _in_buckets(Optimizer._group_tensors_by_device_and_dtype, handle)
    Optimizer._group_tensors_by_device_and_dtype = staticmethod(group)  # type: ignore[method-assign]


def _preferring_lists(choose: Callable[..., tuple[bool, bool]], handle: type[torch.Tensor]) -> Callable[..., Any]:
    @functools.wraps(choose)
    def choose_implementation(
        params: list[torch.Tensor], differentiable: bool, use_fused: bool = False
    ) -> tuple[bool, bool]:
        fused, lists = choose(params, differentiable, use_fused)
        if not (fused or lists or differentiable) and params:
            lists = all(_is_on_gt(each, handle) and each.dtype in _DTYPES for each in params)
        return fused, lists

    return choose_implementation


def _in_buckets(group: Callable[..., dict[Any, Any]], handle: type[torch.Tensor]) -> Callable[..., Any]:
    @functools.wraps(group)
    def group_in_buckets(tensorlistlist: list[list[Any]], with_indices: bool = False) -> dict[Any, Any]:
        groups = group(tensorlistlist, with_indices)
        if not tensorlistlist[0] or not _is_on_gt(tensorlistlist[0][0], handle):
            return groups
        return _BucketedGroups(
            (key, ([each[bucket] for each in lists], indices[bucket]))
            for key, (lists, indices) in groups.items()
            for bucket in _buckets(lists[0])
        )

    return group_in_buckets


class _BucketedGroups(dict[Any, Any]):
    """The buckets of torch's groups, by device and dtype: several may have the same key. Optimizers go through all."""

    def __init__(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        self._pairs = list(pairs)
        super().__init__(self._pairs)

    def items(self) -> Any:
        return self._pairs

    def values(self) -> Any:
        return [value for _, value in self._pairs]


def bucket_sizes(parameters: list[torch.Tensor]) -> list[int]:
    """The lengths of the lists into which the implementation on lists cuts the parameters of a group."""
    groups = Optimizer._group_tensors_by_device_and_dtype([parameters], with_indices=True)  # type: ignore[list-item]
    return [len(indices) for _, indices in groups.values()]


def _is_on_gt(tensor: torch.Tensor, handle: type[torch.Tensor]) -> bool:
    return type(tensor) is handle or (bool(_originals) and id(tensor) in _originals)


def _buckets(tensors: list[torch.Tensor]) -> Iterator[slice]:
    start = size = 0
    for number, tensor in enumerate(tensors, 1):
        size += _originals.get(id(tensor), tensor).nbytes
        if size >= BUCKET_BYTES or number == len(tensors):
            yield slice(start, number)
            start, size = number, 0
