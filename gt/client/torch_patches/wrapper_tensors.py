"""Tensors without memory, GT's handles: how torch makes them, and how their metadata is changed in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

# (class, shape, strides, offset, memory format, dtype): by position, because keywords cost a fifth of the call
make_handle = torch.Tensor._make_wrapper_subclass
# Gives a tensor the shape, strides, offset and dtype of another one, in place.
set_metadata: Callable[[torch.Tensor, torch.Tensor], None] = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]
# Exchanges two tensors, with all that autograd knows of them; the Python objects stay.
swap_tensors: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl
# The lazy conjugation and negation of a tensor, which are two bits of it.
set_conjugated: Callable[[torch.Tensor, bool], None] = torch._C._set_conj
set_negated: Callable[[torch.Tensor, bool], None] = torch._C._set_neg
negative_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
# The value of `__torch_function__` for a class whose ops all go to `__torch_dispatch__` directly.
no_torch_function: Any = torch._C._disabled_torch_function_impl


def patch_swapping(handle: type[torch.Tensor], swap: Callable[[Any, Any], None]) -> None:
    """Let `torch.utils.swap_tensors` exchange two tensors of a class by `swap`: torch's own function exchanges their
    classes, which may have different slots. Modules call it if torch.__future__ says that conversions swap."""
    torch_swap = torch.utils.swap_tensors

    @functools.wraps(torch_swap)
    def swap_tensors(first: Any, second: Any) -> None:
        (swap if isinstance(first, handle) and isinstance(second, handle) else torch_swap)(first, second)

    torch.utils.swap_tensors = swap_tensors


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another one."""
    return tensor._is_view()


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is torch's representation of zeros without memory, which forward-mode AD makes."""
    return tensor._is_zerotensor()  # type: ignore[no-any-return, attr-defined]
