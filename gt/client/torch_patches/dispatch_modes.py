"""Dispatch and function modes: the stacks of those that are on, and a base class that does not import dynamo."""

from __future__ import annotations

from torch.overrides import _get_current_function_mode_stack as current_function_modes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as current_dispatch_modes

__all__ = ["UntracedMode", "current_dispatch_modes", "current_function_modes", "disable_current_modes"]


class UntracedMode(TorchDispatchMode):
    """A dispatch mode whose methods torch does not wrap to disable dynamo: wrapping imports dynamo (1.6 s)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
