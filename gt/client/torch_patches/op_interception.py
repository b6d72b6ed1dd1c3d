"""Whether modes, transforms, traces or profiles of torch see ops, besides autograd and the dispatcher."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad, profiler

_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_current_transform = torch._C._functorch.peek_interpreter_stack
_is_tracing = torch._C._is_tracing


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
        or _is_tracing()
        or profiler._is_profiler_enabled
        or forward_ad._current_level >= 0
    )
