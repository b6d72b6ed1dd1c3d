"""Torch's dispatch of ops: its registry, kernels that GT replaces, the modes that are on, and whether modes,
transforms, or traces and profiles see ops besides autograd and the dispatcher."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C import Argument, DispatchKey, FunctionSchema
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel_for_key
from torch._ops import OpOverload
from torch.autograd import forward_ad, profiler
from torch.overrides import _get_current_function_mode_stack as current_function_modes
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as current_dispatch_modes
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map_only, tree_unflatten

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]

IsLeaf = Callable[[Any], bool] | None


def tree_flatten(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[Any], TreeSpec]:
    with _released(is_leaf) as test:
        return _pytree.tree_flatten(tree, test)


def tree_map(function: Callable[..., Any], tree: Any, is_leaf: IsLeaf = None) -> Any:
    with _released(is_leaf) as test:
        return _pytree.tree_map(function, tree, is_leaf=test)


@contextmanager
def _released(is_leaf: IsLeaf) -> Iterator[IsLeaf]:
    """A test that refers to nothing after the block. Torch's functions leave a cycle that holds the test, and with it
    the tensors that it refers to, until the next garbage collection."""
    held = [is_leaf]
    try:
        yield None if is_leaf is None else lambda value: bool((test := held[0]) and test(value))
    finally:
        held.clear()


__all__ = [
    "Argument", "DispatchKey", "FunctionSchema", "OpOverload",
    "has_kernel", "has_kernel_for_key", "kernel_of", "packet_name", "schema_of",
]  # fmt: skip


def schema_of(func: OpOverload) -> FunctionSchema:
    return func._schema


def packet_name(func: OpOverload) -> str:
    """The name that an op's overloads have in common: `add_` of `aten.add_.Tensor`."""
    return func._opname


def has_kernel(func: OpOverload, key: DispatchKey | str) -> bool:
    return has_kernel_for_key(func.name(), key)


def kernel_of(func: OpOverload, key: DispatchKey) -> Callable[..., Any]:
    """An op as the kernel registered for one dispatch key runs it."""
    return functools.partial(func._op_dk, key)


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


__all__ = ["UntracedMode", "current_dispatch_modes", "current_function_modes", "disable_current_modes"]


class UntracedMode(TorchDispatchMode):
    """A dispatch mode whose methods torch does not wrap to disable dynamo: wrapping imports dynamo (1.6 s)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


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
