"""Replaces `torch.compile` for the backend "gt" by `gt.compile`.

Torch's compiler would run such a function without compiling it: dynamo does not trace GT's code, and never calls a
backend for GT tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

BACKEND = "gt"
original = torch.compile
# Arguments of torch.compile that have no meaning for GT, and the values that are accepted and ignored.
_IGNORED: dict[str, tuple[Any, ...]] = {"fullgraph": (False, True), "dynamic": (None, False, True), "name": (None,)}


def patch_compile(compile_for_gt: Callable[[Any], Any]) -> None:
    """Let `torch.compile(model, backend="gt")` call a function of GT; other backends are torch's."""

    @functools.wraps(original)
    def compile(model: Any = None, **options: Any) -> Any:
        if options.get("backend") != BACKEND:
            return original(model, **options)
        if model is None:
            return lambda decorated: compile(decorated, **options)
        if options.get("disable"):
            return model
        for name, value in options.items():
            if name not in ("backend", "disable") and value not in _IGNORED.get(name, (None, False)):
                raise TypeError(f'torch.compile(backend="gt") has no {name}, and {name}={value!r} was asked for')
        return compile_for_gt(model)

    torch.compile = compile
