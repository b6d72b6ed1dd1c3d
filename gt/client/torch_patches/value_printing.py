"""Torch's formatting of the values of a plain tensor."""

from __future__ import annotations

import torch


def format_values(values: torch.Tensor, threshold: int, indent: int) -> str:
    """With more elements than `threshold`, only the edges of each dim and dots between them."""
    with torch._tensor_str.printoptions(threshold=threshold):
        return torch._tensor_str._tensor_str(values, indent=indent)


def edge_items() -> int:
    """The number of elements at each edge of a dim that are shown of a large tensor."""
    return torch._tensor_str.PRINT_OPTS.edgeitems
