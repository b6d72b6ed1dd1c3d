"""Ops whose results torch leaves as the memory was, in full or in part, and what is put there instead.

A worker process serves several sessions, and its allocator gives the memory that one of them has freed to the next. So
nothing may be read that was not written first. The ops below were found by filling memory with a pattern before every
op of aten, and looking for the pattern in the results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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


def leaves_memory(op: str) -> bool:
    name = op.split(".")[1]
    return name in _NEW or name in _RESIZING or name in _PARTLY_WRITTEN


def cleared(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of an op, with zeros in new memory that it does not write, or NaN; the function itself where it
    writes all of it."""
    name = op.split(".")[1]
    if name in _PARTLY_WRITTEN:
        return _filled(function)
    if not leaves_memory(op):
        return function
    copies = name in _RESIZING
    in_place = name.endswith("_") or name == "set"  # which grows the memory of its source

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        sizes = {storage._cdata: storage.nbytes() for storage in [tensor.untyped_storage() for tensor in given]}
        result: torch.Tensor = function(*args, **kwargs)
        before = sizes.get(result.untyped_storage()._cdata)
        if before is None:
            clear(result, given[0].nbytes if copies else 0)
            return result
        clear(result, before)
        if not in_place:  # `out=` is a copy of a tensor that torch makes first
            _clear_elements(result, given[0].numel() if copies else 0)
        return result

    return run


def clear(tensor: torch.Tensor, start: int = 0) -> None:
    """Zeros in all of a tensor's memory, gaps between elements included, from a byte on."""
    storage = tensor.untyped_storage()
    count = storage.nbytes() - start
    if count > 0:
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        memory.set_(storage, start, (count,)).zero_()  # type: ignore[call-overload]


def _clear_elements(tensor: torch.Tensor, start: int) -> None:
    """Zeros in the elements from one on, in row-major order. Other memory may belong to other views."""
    places = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
    tensor.masked_fill_(places >= start, 0)


def _filled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Torch fills all new memory where its algorithms are to be deterministic, that of kernels included."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before = torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()
        torch._C._set_deterministic_algorithms(True, warn_only=True)
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])

    return run
