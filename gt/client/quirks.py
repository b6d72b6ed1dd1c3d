"""Habits of torch that cost GT something, and how it avoids them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch._compile
import torch._decomp.decompositions
import torch._meta_registrations
import torch._refs.fft
import torch._refs.linalg
import torch._refs.nn.functional
import torch._refs.special
from torch._C._dynamo import eval_frame

_MODULES = (
    torch._refs,
    torch._refs.fft,
    torch._refs.linalg,
    torch._refs.nn.functional,
    torch._refs.special,
    torch._decomp.decompositions,
    torch._meta_registrations,
)
_PLAIN = compile("", "", "exec")  # the code of something that is not a function
_LIBRARY = torch.library.Library("aten", "FRAGMENT")  # the rules in it end with it


def keep_dynamo_out() -> None:
    """Torch hides its Python shape functions from dynamo, and the first call of one imports dynamo (0.7 s) to ask for
    the function that hides it. Where nothing has imported dynamo there is nobody to hide from: each function is noted
    as its own hidden version."""
    if "torch._dynamo" in sys.modules:
        return
    tables = [vars(module) for module in _MODULES] + list(torch._decomp.global_decomposition_table.values())
    for function in [function for table in tables for function in table.values()]:
        while (wrapped := _wrapped(function)) is not None:
            if function.__code__.co_filename == torch._compile.__file__:
                wrapped.__dynamo_disable = wrapped  # where torch._compile looks
            function = wrapped


def _wrapped(function: Any) -> Any:
    """The function that one of torch's wrappers wraps, which they all call `fn`; None for any other function."""
    cells = zip(
        getattr(function, "__code__", _PLAIN).co_freevars, getattr(function, "__closure__", None) or (), strict=True
    )
    return next((cell.cell_contents for name, cell in cells if name == "fn"), None)


def keep_dtensor_out(handle: type[torch.Tensor], dispatch: Callable[..., Any]) -> None:
    """Before an op reaches the `__torch_dispatch__` of a tensor's class, torch asks whether the tensor is a DTensor,
    and the first such question imports `torch.distributed.tensor` (1 s). It does not ask where the class has a rule for
    the op. Ops that are rare (with `out=`, or of a library) get no rule: they take the longer way to the same place."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and not name.partition(".")[2].endswith("out"):
            torch.library.register_torch_dispatch(name, handle, dispatch, lib=_LIBRARY)


def hide_from_dynamo(function: Callable[..., Any]) -> None:
    """Dynamo would trace what an op does in the client, where it traces a function that uses GT tensors."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
