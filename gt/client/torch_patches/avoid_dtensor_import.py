"""Keeps `torch.distributed.tensor` from being imported by a program that does not use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("aten", "FRAGMENT")  # its registrations end with it


def keep_dtensor_out(functions: dict[type[torch.Tensor], Callable[..., Any]]) -> None:
    """Register the `__torch_dispatch__` of classes for every op on tensors of them. Before an op reaches one of a class
    without such a registration, torch checks whether the tensor is a DTensor, and the first check imports
    `torch.distributed.tensor` (1 s). Rare ops (with `out=`, or of another library) are not registered."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and not name.partition(".")[2].endswith("out"):
            for handle, dispatch in functions.items():
                torch.library.register_torch_dispatch(name, handle, dispatch, lib=_LIBRARY)
