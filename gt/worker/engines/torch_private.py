"""The private parts of torch that engines use. tests/worker/engines/test_torch_private.py tries each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.autograd import profiler
from torch.utils._python_dispatch import TorchDispatchMode

Code: TypeAlias = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Compiled code."""


def qualified_name(op: str) -> tuple[str, str]:
    """The name of an op in torch's registry: ("aten::add", "Tensor") for `aten.add.Tensor`. Others are in none."""
    parts = op.split(".")
    if len(parts) != 3:
        return op, "is not an overload"
    return f"{parts[0]}::{parts[1]}", "" if parts[2] == "default" else parts[2]


def is_profiled() -> bool:
    """Whether a profiler of torch records in this process."""
    return bool(profiler._is_profiler_enabled)


@contextmanager
def profiler_range(name: str) -> Generator[None]:
    """A context that a profiler records under a name."""
    begun = torch.autograd._record_function_with_args_enter(name)
    try:
        yield
    finally:
        torch.autograd._record_function_with_args_exit(begun)


def registered_ops() -> list[str]:
    """The names of all ops and overloads, such as `aten::add.Tensor`."""
    return torch._C._dispatch_get_all_op_names()  # type: ignore[no-any-return]


def find_overload(op: str) -> Callable[..., Any]:
    """The function of an overload, without the Python wrapper of `torch.ops`, which doubles the cost of a call."""
    function, _, _ = torch._C._get_operation_overload(*qualified_name(op))
    return function  # type: ignore[no-any-return]


def find_schema(op: str) -> Any:
    return torch._C._get_schema(*qualified_name(op))


def find_tags(op: str) -> frozenset[str]:
    """The names of an op's tags, such as `pointwise`."""
    _, _, tags = torch._C._get_operation_overload(*qualified_name(op))
    return frozenset(str(tag).partition(".")[2] for tag in tags)


def find_python_function(op: str) -> Callable[..., Any] | None:
    """Torch's Python function of an op's name, such as `torch.add`, without the wrappers of the module `torch`."""
    return getattr(torch._C._VariableFunctions, op.split(".")[1], None)


def load_code(path: Path) -> Code:
    """The function in a shared library that AOTInductor has made for the CPU. Torch's compiler is not imported."""
    return torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1).run  # type: ignore[no-any-return]


def storage_identity(tensor: torch.Tensor) -> int:
    """The same number for tensors that share memory, while one of them is alive."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


@contextmanager
def new_memory_filled() -> Generator[None]:
    """Let torch fill all new memory, also that of kernels, as it does for deterministic algorithms."""
    before = torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])


class OpWatcher(TorchDispatchMode):
    """Notes the ops that run, with their arguments. Arguments that have the defaults of the schema are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[Any, ...]]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, to keep it out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((str(func), (*args, *(kwargs or {}).items())))
        return func(*args, **(kwargs or {}))


def _dispatch_keys_of_a_new_thread() -> tuple[Any, Any]:
    """Torch's thread-local dispatch keys as they are without an active mode, autocast or transform."""
    found: list[Any] = []

    def read() -> None:
        found.extend((torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    return found[0], found[1]


_CLEAN_INCLUDE, _CLEAN_EXCLUDE = _dispatch_keys_of_a_new_thread()


class Isolation(AbstractContextManager[None]):
    """Torch's thread-local state as in a new thread, and inference mode. Hot path: a class, because it is entered for
    every batch and a generator would take twice as long."""

    def __enter__(self) -> None:
        self._trace = torch._C._get_tracing_state()
        if self._trace is not None:  # inside a trace even the sizes of tensors are tensors
            torch._C._set_tracing_state(None)
        # One after the other, and inference mode last: some guards act when they are made, and inference mode changes
        # the dispatch keys that the first guard has set.
        self._keys = torch._C._ForceDispatchKeyGuard(_CLEAN_INCLUDE, _CLEAN_EXCLUDE)
        self._keys.__enter__()
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()
        self._inference = torch._C._InferenceMode(True)
        self._inference.__enter__()

    def __exit__(self, *error: object) -> None:
        for guard in (self._inference, self._functions, self._keys):
            guard.__exit__(None, None, None)
        if self._trace is not None:
            torch._C._set_tracing_state(self._trace)
