"""Keeps `torch.distributed.tensor` from being imported by a program that does not use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("aten", "FRAGMENT")  # its registrations end with it


def keep_dtensor_out(handle: type[torch.Tensor], dispatch: Callable[..., Any]) -> None:
    """Register `dispatch` for every op on tensors of a class. Before an op reaches the `__torch_dispatch__` of a class
    without such a registration, torch checks whether the tensor is a DTensor, and the first check imports
    `torch.distributed.tensor` (1 s). Rare ops (with `out=`, or of another library) are not registered."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and not name.partition(".")[2].endswith("out"):
            torch.library.register_torch_dispatch(name, handle, dispatch, lib=_LIBRARY)
