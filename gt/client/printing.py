"""The `repr` of a tensor: its values or their edges, shape, dtype and layout."""

from __future__ import annotations

import torch

from gt.client.torch_patches.nn_modules import is_parameter
from gt.client.torch_patches.value_printing import edge_items, format_values
from gt.sharding.spec import ShardingSpec

SHOWN_ELEMENTS = 1000


def describe(tensor: torch.Tensor, values: torch.Tensor | None, spec: ShardingSpec) -> str:
    """`values`: the value, or its edges if it is too large to read, or None if it has none."""
    facts = [f"shape={tuple(tensor.shape)}", f"dtype={tensor.dtype}", f"on={describe_layout(spec)}"]
    if tensor.requires_grad:
        facts.append("requires_grad=True" if tensor.grad_fn is None else f"grad_fn=<{tensor.grad_fn.name()}>")
    name = "gt.Parameter" if is_parameter(tensor) else "gt.Tensor"
    if values is None or values.numel() == 0:
        return f"{name}([], {', '.join(facts)})"
    threshold = SHOWN_ELEMENTS if values.numel() == tensor.numel() else 0  # edges are always shown with dots
    text = format_values(values, threshold, len(name) + 1)
    return f"{name}({text}, {', '.join(facts)})"


def describe_layout(spec: ShardingSpec) -> str:
    """The layout of a tensor as `repr` shows it."""
    workers = spec.mesh.workers
    if len(workers) == 1:
        return f"worker {workers[0]}"
    if spec.is_whole:
        return f"workers {', '.join(map(str, workers))} (replicated)"
    return f"mesh {spec.mesh} as [{spec}]"


def edges(tensor: torch.Tensor) -> torch.Tensor:
    """The edges of a large tensor that printing shows, so that only these are read."""
    edge = edge_items()
    for dim, size in enumerate(tensor.shape):
        if size > 2 * edge:
            tensor = torch.cat([tensor.narrow(dim, 0, edge + 1), tensor.narrow(dim, size - edge, edge)], dim)
    return tensor
