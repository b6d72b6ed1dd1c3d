"""Tensors for people: `repr` has the values or their edges, shape, dtype and layout; notebooks get HTML."""

from __future__ import annotations

import torch

from gt.client.error_text import without_traceback
from gt.client.torch_patches.nn_modules import is_parameter
from gt.client.torch_patches.tensors import edge_items, format_values
from gt.core.tables import html_text
from gt.sharding.held_parts import describe_held, held_parts, parts_html
from gt.sharding.spec import ShardingSpec

SHOWN_ELEMENTS = 1000
HTML_SIDE = 6  # elements of each of the last two dims that a notebook shows
HTML_WORKERS = 64  # rows of the table of workers


def describe(tensor: torch.Tensor, values: torch.Tensor | None, spec: ShardingSpec) -> str:
    """A tensor as text. `values`: the value, or its edges if it is too large to read, or None if it has none."""
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


def corner(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """The few first values of a tensor that a notebook shows, so that only these are read; and which they are."""
    places: list[int | slice] = [0] * max(0, tensor.dim() - 2)
    places += [slice(0, min(size, HTML_SIDE)) for size in tensor.shape[-2:]]
    shown = tensor[tuple(places)]
    if shown.numel() == tensor.numel():
        return shown, "all values"
    texts = [str(place) if isinstance(place, int) else f"0:{place.stop}" for place in places]
    return shown, f"values [{', '.join(texts)}] of {tensor.numel()}"


def describe_html(tensor: torch.Tensor, values: torch.Tensor, which: str, spec: ShardingSpec) -> str:
    """A tensor for a notebook: its facts, some values, and the part that each worker holds."""
    shape = tuple(tensor.shape)
    name = "gt.Parameter" if is_parameter(tensor) else "gt.Tensor"
    grad = ", requires_grad" if tensor.requires_grad else ""
    facts = f"{name} of {tensor.dtype}{grad}, {describe_held(shape, spec)}"
    parts = held_parts(shape, tensor.itemsize, spec)
    more = f"; the first {HTML_WORKERS} of {len(parts)} workers" if len(parts) > HTML_WORKERS else ""
    text = format_values(values, SHOWN_ELEMENTS, 0) if values.numel() else "[]"
    return parts_html(facts + more, parts[:HTML_WORKERS]) + html_text(f"{which}:\n{text}")


def describe_without_value(tensor: torch.Tensor, error: Exception) -> str:
    """A tensor whose value cannot be read, and why, without the worker's traceback: reading it raises the whole
    error."""
    facts = f"gt.Tensor(no value, shape={tuple(tensor.shape)}, dtype={tensor.dtype})"
    return f"{facts}\n{without_traceback(str(error))}"


def edges(tensor: torch.Tensor) -> torch.Tensor:
    """The edges of a large tensor that printing shows, so that only these are read."""
    edge = edge_items()
    for dim, size in enumerate(tensor.shape):
        if size > 2 * edge:
            tensor = torch.cat([tensor.narrow(dim, 0, edge + 1), tensor.narrow(dim, size - edge, edge)], dim)
    return tensor
