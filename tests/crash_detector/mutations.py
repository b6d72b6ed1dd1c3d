"""Calls that are wrong in one or two places, made of one that is right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.crash_detector.recording import Call, schema_of

PAIRS = 60
_FAR = 1 << 33  # elements beyond this are in no mapped memory
_INTEGERS = (0, -1, 1, 100, _FAR, -_FAR, 1 << 62, -(1 << 63), (1 << 31) - 1, -(1 << 31))


def mutate(call: Call) -> Iterator[tuple[str, Call]]:
    """The call itself, then each way to change one argument, then pairs of changes drawn at random."""
    yield "as it is", call
    if not call.is_recorded:
        return
    leaves, spec = tree_flatten((call.args, call.kwargs))
    edits = [(place, name, leaf) for place, leaf in enumerate(leaves) for name, leaf in _edits(leaf)]
    for place, name, leaf in edits:
        yield f"leaf {place} {name}", _with(call, leaves, spec, {place: leaf})
    for name, args, kwargs in _list_edits(call):
        yield name, Call(call.op, args, kwargs)
    source = random.Random(call.op)
    for _ in range(PAIRS if len(leaves) > 1 and edits else 0):
        chosen = [source.choice(edits), source.choice(edits)]
        name = " and ".join([f"leaf {place} {name}" for place, name, _ in chosen])
        yield name, _with(call, leaves, spec, {place: leaf for place, _, leaf in chosen})


def _with(call: Call, leaves: list[Any], spec: Any, changes: dict[int, Any]) -> Call:
    changed = [changes.get(place, leaf) for place, leaf in enumerate(leaves)]
    args, kwargs = tree_unflatten(changed, spec)
    return Call(call.op, args, kwargs)


def _edits(leaf: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(leaf, torch.Tensor):
        yield from _shapes(leaf)
        yield from _values(leaf)
        yield from _kinds(leaf)
    elif isinstance(leaf, bool):
        yield f"= {not leaf}", not leaf
    elif isinstance(leaf, int):
        for value in _INTEGERS:
            yield f"= {value}", value
    elif isinstance(leaf, float):
        for value in (0.0, -1.0, float("nan"), float("inf"), 1e30):
            yield f"= {value}", value


def _shapes(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for dim, size in enumerate(tensor.shape):
        for shorter in {0, 1, size - 1} - {size, -1}:
            yield f"dim {dim} cut to {shorter}", tensor.narrow(dim, 0, shorter).contiguous()
        if size:
            yield f"dim {dim} twice as long", torch.cat([tensor, tensor], dim)
            yield f"dim {dim} dropped", tensor.select(dim, 0).contiguous()
        if size > 1:
            yield f"dim {dim} expanded", tensor.narrow(dim, 0, 1).clone().expand(tensor.shape)
    yield "with one dim more", tensor.unsqueeze(0)
    yield "flat", tensor.reshape(-1)
    yield "empty", tensor.new_empty(0)
    if tensor.numel():
        one = tensor.reshape(-1)[0].clone()
        yield "one number", one
        yield "one number expanded", one.expand(tensor.shape)
    if tensor.dim() > 1:
        yield "transposed", tensor.transpose(0, -1).contiguous()
        yield "with transposed strides", tensor.transpose(0, -1).contiguous().transpose(0, -1)
        yield (
            "with reversed strides",
            tensor.permute(*reversed(range(tensor.dim()))).contiguous().permute(*reversed(range(tensor.dim()))),
        )
    if tensor.dim() == 4:
        yield "with channels last", tensor.contiguous(memory_format=torch.channels_last)


def _values(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if tensor.dtype is torch.bool or not tensor.numel() or tensor.dtype.is_complex:
        return
    if tensor.dtype.is_floating_point:
        values: list[Any] = [float("nan"), float("inf"), -1.0, 1e30]
    else:
        info = torch.iinfo(tensor.dtype)
        near = [-1, 0, 1, 100, tensor.numel(), *tensor.shape, _FAR, -_FAR, info.max, info.min]
        values = [value for value in dict.fromkeys(near) if info.min <= value <= info.max]
    for value in values:
        yield f"full of {value}", torch.full_like(tensor, value)
        last = tensor.clone()
        last.view(-1)[-1] = value
        yield f"ends with {value}", last


def _kinds(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.complex64):
        if dtype is not tensor.dtype:
            yield f"as {dtype}", tensor.to(dtype)


def _list_edits(call: Call) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    for place, value in enumerate(call.args):
        if isinstance(value, list | tuple):
            for name, changed in _lengths(list(value)):
                yield f"argument {place} {name}", (*call.args[:place], changed, *call.args[place + 1 :]), call.kwargs
        elif isinstance(value, torch.Tensor) and str(schema_of(call.op).arguments[place].real_type) != "Tensor":
            yield f"argument {place} absent", (*call.args[:place], None, *call.args[place + 1 :]), call.kwargs
    for key, value in call.kwargs.items():
        if isinstance(value, list | tuple):
            for name, changed in _lengths(list(value)):
                yield f"argument {key} {name}", call.args, call.kwargs | {key: changed}


def _lengths(items: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    yield "empty", []
    if items:
        yield "one shorter", items[:-1]
        yield "one longer", [*items, items[-1]]
