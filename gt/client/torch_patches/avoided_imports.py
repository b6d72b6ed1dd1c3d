"""Keeps torch's compiler, dynamo, and `torch.distributed.tensor` from being imported by programs that do not use them,
and dynamo from tracing GT's code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._compile
import torch._decomp.decompositions
import torch._meta_registrations
import torch._refs.fft
import torch._refs.linalg
import torch._refs.nn.functional
import torch._refs.special
from torch._C._dynamo import eval_frame

from gt.client.torch_patches.dispatch import disable_current_modes
from gt.garbage_collection import paused_collection

_LIBRARY = torch.library.Library("aten", "FRAGMENT")  # its registrations end with it


def keep_dtensor_out(functions: dict[type[torch.Tensor], Callable[..., Any]]) -> None:
    """Register the `__torch_dispatch__` of classes for every op on tensors of them. Before an op reaches one of a class
    without such a registration, torch checks whether the tensor is a DTensor, and the first check imports
    `torch.distributed.tensor` (1 s). Rare ops (with `out=`, or of another library) are not registered."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and not name.partition(".")[2].endswith("out"):
            for handle, dispatch in functions.items():
                torch.library.register_torch_dispatch(name, handle, dispatch, lib=_LIBRARY)


_MODULES = (
    torch._refs,
    torch._refs.fft,
    torch._refs.linalg,
    torch._refs.nn.functional,
    torch._refs.special,
    torch._decomp.decompositions,
    torch._meta_registrations,
)
_NO_CODE = compile("", "", "exec")  # the code object of something that is not a function


def keep_dynamo_out() -> None:
    """Torch disables dynamo for its Python shape functions, and the first call of one imports dynamo (0.7 s) to do so.
    In a program that has not imported dynamo, each function is registered as its own disabled version instead."""
    if "torch._dynamo" in sys.modules:
        return
    tables = [vars(module) for module in _MODULES] + list(torch._decomp.global_decomposition_table.values())
    for function in [function for table in tables for function in table.values()]:
        while (wrapped := wrapped_function(function)) is not None:
            if function.__code__.co_filename == torch._compile.__file__:
                wrapped.__dynamo_disable = wrapped  # the attribute that torch._compile reads
            function = wrapped


def import_shape_functions() -> None:
    """Run one of torch's Python shape functions outside of all modes: the first time, both import other modules. A
    session does it when it begins: in the middle of an op, a signal handler that issues another one would meet a partly
    imported module."""
    with paused_collection(), disable_current_modes():
        torch.ops.aten.mul.Scalar(torch.empty(1, device="meta"), 2.0)


def wrapped_function(function: Any) -> Any:
    """The function inside one of torch's wrappers, whose closures all call it `fn`; None for any other function."""
    cells = zip(
        getattr(function, "__code__", _NO_CODE).co_freevars, getattr(function, "__closure__", None) or (), strict=True
    )
    return next((cell.cell_contents for name, cell in cells if name == "fn"), None)


def hide_from_dynamo(function: Callable[..., Any]) -> None:
    """Make dynamo run a function without tracing it, if it compiles a program that uses GT tensors."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
