"""Replaces `torch.compile`: with the backend "gt" by `gt.compile`, and else so that a refusal of GT tensors names GT.

Torch's compiler would run a function with the backend "gt" without compiling it: dynamo does not trace GT's code, and
never calls a backend for GT tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from gt.client.torch_patches.dispatch import tree_leaves

BACKEND = "gt"
original = torch.compile
# Arguments of torch.compile that have no meaning for GT, and the values that are accepted and ignored.
_IGNORED: dict[str, tuple[Any, ...]] = {"fullgraph": (False, True), "dynamic": (None, False, True), "name": (None,)}
# Functions of torch that are compiled whole wherever they are called: the public name, and the way out.
_WAYS_OUT = {
    "_flex_attention_hop_wrapper": (
        "flex_attention",
        "use torch.nn.functional.scaled_dot_product_attention, with the scores that score_mod and block_mask would "
        "change as attn_mask",
    ),
    "_cond_op_wrapper": ("torch.cond", "use an if: a comparison of GT tensors reads its value"),
    "_while_loop_op_wrapper": ("while_loop", "use a while: a comparison of GT tensors reads its value"),
    "run_flattened_scan": ("scan", "use a for"),
    "run_flattened_map": ("map", "use a for, or torch.vmap"),
}


def patch_compile(compile_for_gt: Callable[[Any], Any], tensor: type[torch.Tensor]) -> None:
    """Let `torch.compile(model, backend="gt")` call a function of GT; other backends are torch's. `tensor` is the class
    of GT's tensors."""

    @functools.wraps(original)
    def compile(model: Any = None, **options: Any) -> Any:
        if options.get("backend") != BACKEND:
            compiled = original(model, **options)
            is_whole = options.get("fullgraph") and isinstance(model, FunctionType) and compiled is not model
            return _naming_gt(compiled, model.__name__, tensor) if is_whole else compiled
        if model is None:
            return lambda decorated: compile(decorated, **options)
        if options.get("disable"):
            return model
        for name, value in options.items():
            if name not in ("backend", "disable") and value not in _IGNORED.get(name, (None, False)):
                raise TypeError(f'torch.compile(backend="gt") has no {name}, and {name}={value!r} was asked for')
        return compile_for_gt(model)

    torch.compile = compile


def _naming_gt(compiled: Callable[..., Any], name: str, tensor: type[torch.Tensor]) -> Callable[..., Any]:
    """A function that was compiled whole, whose refusal by dynamo of GT tensors says what to do."""

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except Exception as error:
            is_refusal = name in _WAYS_OUT or type(error).__module__.startswith("torch._dynamo")
            if not is_refusal or not any(isinstance(leaf, tensor) for leaf in tree_leaves((args, kwargs))):
                raise
            known, way_out = _WAYS_OUT.get(name, (name, 'leave out fullgraph=True, or compile it with backend="gt"'))
        raise NotImplementedError(
            f"{known} does not work on GT tensors: torch's compiler traces it whole, with tensors whose memory is in "
            f"this process, and GT's is on workers; {way_out}"
        )

    return call
