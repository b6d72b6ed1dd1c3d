"""Clears the memory of results that torch leaves unwritten, in full or in part.

A worker process serves several sessions, and its allocator gives the memory that one of them has freed to the next. So
a session must not read memory that it has not written. The ops below were found by filling memory with a pattern before
every op of aten, and looking for the pattern in the results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gt.worker.engines.torch_private import new_memory_filled, storage_identity

_NEW = frozenset(["empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"])
_RESIZING = frozenset(
    ["resize", "resize_", "resize_as", "resize_as_", "_resize_output", "_resize_output_", "set", "set_"]
)
_PARTLY_WRITTEN = frozenset(
    [
        "_ctc_loss",  # log_alpha after the end of a shorter target
        "mkldnn_rnn_layer",  # the workspace for its gradient
    ]
)


def leaves_unwritten(op: str) -> bool:
    name = op.split(".")[1]
    return name in _NEW or name in _RESIZING or name in _PARTLY_WRITTEN


def cleared(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of an op, with zeros or NaN in new memory that it does not write; the same function if it writes
    all of it."""
    name = op.split(".")[1]
    if name in _PARTLY_WRITTEN:
        return _filled(function)
    if not leaves_unwritten(op):
        return function
    copies = name in _RESIZING
    in_place = name.endswith("_") or name == "set"  # `set` may grow the storage of its source

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        sizes = {storage_identity(tensor): tensor.untyped_storage().nbytes() for tensor in given}
        result: torch.Tensor = function(*args, **kwargs)
        before = sizes.get(storage_identity(result))
        if before is None:
            clear(result, given[0].nbytes if copies else 0)
            return result
        clear(result, before)
        if not in_place:  # with `out=` torch makes a tensor first, and copies it
            _clear_elements(result, given[0].numel() if copies else 0)
        return result

    return run


def clear(tensor: torch.Tensor, start: int = 0) -> None:
    """Write zeros to a tensor's memory from byte `start` on, gaps between elements included."""
    storage = tensor.untyped_storage()
    count = storage.nbytes() - start
    if count > 0:
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        memory.set_(storage, start, (count,)).zero_()  # type: ignore[call-overload]


def _clear_elements(tensor: torch.Tensor, start: int) -> None:
    """Write zeros to the elements from `start` on, in row-major order. Other memory may belong to other views."""
    positions = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
    tensor.masked_fill_(positions >= start, 0)


def _filled(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with new_memory_filled():
            return function(*args, **kwargs)

    return run
