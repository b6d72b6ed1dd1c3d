"""Patches how torch makes tensors of user subclasses, and keeps the `__torch_function__` of these classes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def patch_make_subclass(handle: type[torch.Tensor], convert: Callable[[Any, Any], torch.Tensor]) -> None:
    """Let `torch.Tensor._make_subclass`, with which subclasses make their tensors, take a GT tensor as data:
    `convert(subclass, tensor)` makes a tensor of both classes. Plain data takes torch's own way."""
    make = torch.Tensor._make_subclass

    @functools.wraps(make)
    def make_subclass(cls: Any, data: torch.Tensor, require_grad: bool = False, **options: Any) -> torch.Tensor:
        if not isinstance(data, handle):
            return make(cls, data, require_grad, **options)
        return convert(cls, data).requires_grad_(require_grad)

    torch.Tensor._make_subclass = staticmethod(make_subclass)  # type: ignore[assignment]


def restore_torch_function(new: Any) -> type[torch.Tensor]:
    """Undo that torch turns `__torch_function__` off in every new class that has a `__torch_dispatch__`."""
    if "__torch_function__" in vars(new):
        del new.__torch_function__
    return new  # type: ignore[no-any-return]
