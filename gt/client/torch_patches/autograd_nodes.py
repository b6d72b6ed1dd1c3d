"""Nodes of autograd's graph: the one whose gradient is being computed, and their numbers; the end of backward."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

current_node: Callable[[], Any] = torch._C._current_autograd_node  # type: ignore[attr-defined]
# The number that the next node of this thread gets.
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]
sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")
# The number of the backward that this thread runs.
current_backward: Callable[[], int] = torch._C._current_graph_task_id  # type: ignore[attr-defined]
NO_BACKWARD = -1
FIRST_ACCUMULATING = 1 << 63  # nodes that accumulate gradients have numbers from here on


def gradient_hooks(tensor: torch.Tensor) -> list[Any]:
    """The hooks of a tensor that backward calls with its gradient."""
    before, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return [*(before or {}).values(), *(after or {}).values()] if before or after else []


def gradient_hook_tables(tensor: torch.Tensor) -> tuple[Any, Any]:
    """The tables of a tensor's hooks, to which the handles that torch has given out for them refer."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def set_gradient_hook_tables(tensor: torch.Tensor, tables: tuple[Any, Any]) -> None:
    before, after = tables
    if before is not None:
        tensor._backward_hooks = before
    if after is not None:
        tensor._post_accumulate_grad_hooks = after


def refuse_backward(tensor: torch.Tensor, reason: str) -> None:
    """Make backward raise if it reaches a tensor that a graph refers to now."""
    if tensor.requires_grad and tensor._use_count() > 1:

        def refuse(gradients: Any) -> None:
            raise RuntimeError(reason)

        get_gradient_edge(tensor).node.register_prehook(refuse)


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward that this thread runs has ended; not if it raises."""
    Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]


def accumulated_parameter(node: Any) -> torch.Tensor | None:
    """The tensor whose `.grad` a node accumulates; None for any other node."""
    return node.variable if sequence_number(node) >= FIRST_ACCUMULATING else None
