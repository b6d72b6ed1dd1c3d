"""Makes torch's optimizers update parameters on GT in lists of tensors, by their implementation "foreach".

Torch's optimizers update plain CPU parameters one by one, with about 12 ops for each. "foreach" takes the same 12 ops
for a whole list of parameters. For parameters on GT it becomes the default, and its lists are cut into buckets, so that
the intermediate results of only one bucket at a time are in memory.
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
_DTYPES = (torch.float32, torch.float64)  # dtypes in which they do; in half precision they round at other points
_NAME = "_default_to_fused_or_foreach"
BUCKET_BYTES = 4 << 20  # bytes of whole parameters in a bucket; those of gradients are as large
# By the id() of a plain tensor, the parameter on GT for which it stands: see `standing_for`.
_originals: dict[int, torch.Tensor] = {}


@contextlib.contextmanager
def standing_for(originals: dict[int, torch.Tensor]) -> Iterator[None]:
    """Inside, optimizers treat plain tensors, given by id(), as the parameters on GT for which they stand: they choose
    the same implementation and the same lists."""
    _originals.update(originals)
    try:
        yield
    finally:
        for ident in originals:
            del _originals[ident]


def call_after_loading(function: Callable[[Optimizer], None]) -> None:
    """Call a function with each optimizer that was given a state, by `load_state_dict` or by unpickling."""
    set_state = Optimizer.__setstate__

    @functools.wraps(set_state)
    def set_and_call(optimizer: Optimizer, state: dict[str, Any]) -> None:
        set_state(optimizer, state)
        function(optimizer)

    Optimizer.__setstate__ = set_and_call  # type: ignore[method-assign]


def patch_optimizer_defaults(handles: tuple[type[torch.Tensor], ...]) -> None:
    """Let optimizers whose parameters are all on GT use "foreach", unless the user chose an implementation."""
    for name in SAME_BITS:
        module = sys.modules[f"torch.optim.{name}"]
        setattr(module, _NAME, _preferring_lists(getattr(module, _NAME), handles))
    sgd: Any = sys.modules["torch.optim.sgd"]
    sgd.sgd = _sparing_gradients(sgd.sgd, handles)
    group: Any = _in_buckets(Optimizer._group_tensors_by_device_and_dtype, handles)
    Optimizer._group_tensors_by_device_and_dtype = staticmethod(group)  # type: ignore[method-assign]


def _preferring_lists(
    choose: Callable[..., tuple[bool, bool]], handles: tuple[type[torch.Tensor], ...]
) -> Callable[..., Any]:
    @functools.wraps(choose)
    def choose_implementation(
        params: list[torch.Tensor], differentiable: bool, use_fused: bool = False
    ) -> tuple[bool, bool]:
        fused, lists = choose(params, differentiable, use_fused)
        # In a step gradients are enabled if it is differentiable, which SGD does not say.
        if not (fused or lists or differentiable or torch.is_grad_enabled()) and params:
            are_usual = all(_is_on_gt(each, handles) and each.dtype in _DTYPES for each in params)
            lists = are_usual and not share_memory(params)
        return fused, lists

    return choose_implementation


def _sparing_gradients(update: Callable[..., None], handles: tuple[type[torch.Tensor], ...]) -> Callable[..., None]:
    """SGD's update, parameter by parameter where its lists would write to the gradients: those of Nesterov's momentum
    do, unless weight decay or `maximize` has made other tensors of them."""

    @functools.wraps(update)
    def update_parameters(params: list[torch.Tensor], *args: Any, **options: Any) -> None:
        writes = options["nesterov"] and not options["weight_decay"] and not options["maximize"]
        is_free = options.get("foreach", False) is None and options.get("fused", False) is None
        if writes and is_free and any(_is_on_gt(each, handles) for each in params):
            options["foreach"] = False
        update(params, *args, **options)

    return update_parameters


def share_memory(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether two of some parameters share their storage: updated in lists, each op would see both updates half done.
    The tensors are on GT, or stand for one there."""
    storages = [id(tensor._ref.storage) for tensor in tensors if hasattr(tensor, "_ref")]
    return len(set(storages)) < len(storages)


def _in_buckets(group: Callable[..., dict[Any, Any]], handles: tuple[type[torch.Tensor], ...]) -> Callable[..., Any]:
    @functools.wraps(group)
    def group_in_buckets(tensorlistlist: list[list[Any]], with_indices: bool = False) -> dict[Any, Any]:
        groups = group(tensorlistlist, with_indices)
        if not tensorlistlist[0] or not _is_on_gt(tensorlistlist[0][0], handles):
            return groups
        return _BucketedGroups(
            (key, ([each[bucket] for each in lists], indices[bucket]))
            for key, (lists, indices) in groups.items()
            for bucket in _buckets(lists[0])
        )

    return group_in_buckets


class _BucketedGroups(dict[Any, Any]):
    """The buckets of torch's groups, by device and dtype. A mapping with repeated keys: optimizers go through all its
    items."""

    def __init__(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        self._pairs = list(pairs)
        super().__init__(self._pairs)

    def items(self) -> Any:
        return self._pairs

    def values(self) -> Any:
        return [value for _, value in self._pairs]


def bucket_sizes(parameters: list[torch.Tensor]) -> list[int]:
    """The lengths of the lists into which "foreach" cuts the parameters of a group."""
    groups = Optimizer._group_tensors_by_device_and_dtype([parameters], with_indices=True)  # type: ignore[list-item]
    return [len(indices) for _, indices in groups.values()]


def _is_on_gt(tensor: torch.Tensor, handles: tuple[type[torch.Tensor], ...]) -> bool:
    return type(tensor) in handles or (bool(_originals) and id(tensor) in _originals)


def _buckets(tensors: list[torch.Tensor]) -> Iterator[slice]:
    start = size = 0
    for number, tensor in enumerate(tensors, 1):
        size += _originals.get(id(tensor), tensor).nbytes
        if size >= BUCKET_BYTES or number == len(tensors):
            yield slice(start, number)
            start, size = number, 0
