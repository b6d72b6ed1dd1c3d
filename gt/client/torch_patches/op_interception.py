"""Whether modes, transforms, traces or profiles of torch see ops, besides autograd and the dispatcher."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad, profiler

from gt.client.torch_patches.dispatch_modes import disable_current_modes

_TRACER = torch._C._parse_dispatch_key("Tracer")
_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")

_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_current_transform = torch._C._functorch.peek_interpreter_stack
is_tracing = torch._C._is_tracing


def is_transformed() -> bool:
    """Whether this thread is in a transform of `torch.func` or a level of forward-mode AD, in which tensors may be
    wrapped."""
    return _current_transform() is not None or forward_ad._current_level >= 0


def is_intercepted() -> bool:
    """Whether this thread is in a torch function mode, a dispatch mode, a transform of `torch.func`, a level of
    forward-mode AD, a trace or a profile. Hot path."""
    return bool(
        _function_modes()
        or _dispatch_modes()
        or _current_transform() is not None
        or is_tracing()
        or profiler._is_profiler_enabled
        or forward_ad._current_level >= 0
    )


def traced_inside() -> AbstractContextManager[None]:
    """Inside an op of a tensor's class, which torch runs untraced: let the tracer record the ops that it calls."""
    return torch._C._SetExcludeDispatchKeyGuard(_TRACER, False)  # type: ignore[no-any-return, attr-defined]


@contextmanager
def _no_interception() -> Generator[None]:
    trace = torch._C._get_tracing_state()
    if trace is not None:
        torch._C._set_tracing_state(None)
    try:
        with disable_current_modes(), torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch():
            yield
    finally:
        if trace is not None:
            torch._C._set_tracing_state(trace)


def unintercepted(function: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """A function of GT's own work, in which torch's modes, transforms and traces see no ops: inside a trace even the
    sizes of tensors are tensors."""

    @functools.wraps(function)
    def run(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        if not is_intercepted():
            return function(*args, **kwargs)
        with _no_interception():
            return function(*args, **kwargs)

    return run
