"""Replaces the choice between the implementations of an optimizer, for parameters on GT.

Torch's optimizers update plain CPU parameters one by one, with about 12 ops for each. Their other implementation, on
lists of tensors, takes the same 12 ops for all of them together.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

# Optimizers whose two implementations round in the same way: every element has the same bits. Those of ASGD, NAdam and
# RAdam do not, nor does Adamax with a tensor as learning rate.
SAME_BITS = ("adadelta", "adagrad", "adam", "rmsprop", "rprop", "sgd")
_DTYPES = (torch.float32, torch.float64)  # in which they do; in half precision they round at other points
_NAME = "_default_to_fused_or_foreach"


def patch_optimizer_defaults(handle: type[torch.Tensor]) -> None:
    """Let optimizers whose parameters are all on GT use the implementation on lists, unless the user chose one."""
    for name in SAME_BITS:
        module = importlib.import_module(f"torch.optim.{name}")
        setattr(module, _NAME, _preferring_lists(getattr(module, _NAME), handle))


def _preferring_lists(choose: Callable[..., tuple[bool, bool]], handle: type[torch.Tensor]) -> Callable[..., Any]:
    @functools.wraps(choose)
    def choose_implementation(
        params: list[torch.Tensor], differentiable: bool, use_fused: bool = False
    ) -> tuple[bool, bool]:
        fused, lists = choose(params, differentiable, use_fused)
        if not (fused or lists or differentiable) and params:
            lists = all(type(each) is handle and each.dtype in _DTYPES for each in params)
        return fused, lists

    return choose_implementation
