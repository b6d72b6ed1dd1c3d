"""Nodes of autograd's graph: the one whose gradient is being computed, and the numbers of nodes."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch

current_node: Callable[[], Any] = torch._C._current_autograd_node  # type: ignore[attr-defined]
# The number that the next node of this thread gets.
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]
sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")
FIRST_ACCUMULATING = 1 << 63  # nodes that accumulate gradients have numbers from here on


def accumulated_parameter(node: Any) -> torch.Tensor | None:
    """The tensor whose `.grad` a node accumulates; None for any other node."""
    return node.variable if sequence_number(node) >= FIRST_ACCUMULATING else None
