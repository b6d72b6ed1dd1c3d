"""Replaces kernels of torch for composite ops that it decomposes before a tensor's class sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gt.client.torch_patches.op_registry import DispatchKey, OpOverload, kernel_of

_LIBRARY = torch.library.Library("aten", "IMPL")  # its registrations end with it
_kernels: dict[str, Callable[..., Any]] = {}


def override_kernel(name: str, kernel: Callable[..., Any]) -> None:
    """Run `kernel` for an op of aten on CPU tensors, GT's among them: torch's own would access their memory."""
    _LIBRARY.impl(name, kernel, "AutogradCPU")
    _kernels[f"aten::{name}"] = kernel


def overriding_kernel(func: OpOverload) -> Callable[..., Any] | None:
    """The kernel that replaces torch's own. In inference mode an op reaches a tensor's class without having passed it:
    autograd and its kernels are off."""
    return _kernels.get(func.name())


def run_original(func: OpOverload, *args: Any) -> Any:
    """Run torch's own kernel of an op that is overridden."""
    return kernel_of(func, DispatchKey.CompositeImplicitAutograd)(*args)
