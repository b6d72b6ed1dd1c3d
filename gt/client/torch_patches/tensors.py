"""Tensors of torch: handles without memory, user subclasses, `torch.Tensor.data`, and how values are printed."""

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


def patch_data_property(handle: type[torch.Tensor]) -> None:
    """A plain tensor that is assigned a GT tensor takes a copy of its value: torch would give it missing memory.

    The getter stays torch's C function (0.2 us more than before), and the setter adds one check if both tensors are
    plain (0.6 us). Overriding the op with which torch itself checks an assignment would add 6 us.
    """
    get, put = torch._C.TensorBase.data.__get__, torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]

    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(value, handle) and not isinstance(tensor, handle):
            value = value.detach().cpu()
        put(tensor, value)

    torch.Tensor.data = property(get, set_data)  # type: ignore[method-assign, assignment]


def format_values(values: torch.Tensor, threshold: int, indent: int) -> str:
    """With more elements than `threshold`, only the edges of each dim and dots between them."""
    with torch._tensor_str.printoptions(threshold=threshold):
        return torch._tensor_str._tensor_str(values, indent=indent)


def edge_items() -> int:
    """The number of elements at each edge of a dim that are shown of a large tensor."""
    return torch._tensor_str.PRINT_OPTS.edgeitems


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
