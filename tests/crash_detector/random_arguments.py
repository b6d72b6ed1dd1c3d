"""Arguments for ops of which no call was recorded, drawn at random by the types of the schema."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.crash_detector.recording import Call, schema_of

CALLS = 300
_SHAPES = [(), (0,), (1,), (2,), (3,), (4,), (2, 3), (3, 4), (4, 4), (1, 4), (2, 3, 4), (1, 2, 4, 4), (2, 3, 4, 5)]
_DTYPES = [torch.float32, torch.float32, torch.int64, torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool]
_DTYPES += [torch.float64, torch.bfloat16, torch.complex64]
_INTEGERS = [0, 1, 1, 2, 2, 3, 4, -1, -2, 7, 1 << 33, -(1 << 33)]
_CONSTANTS: dict[str, list[Any]] = {
    "str": ["sum", "mean", "none", "reflect", "constant", "linear", "trunc", "floor", "ij", "reduced", "prod"],
    "ScalarType": _DTYPES,
    "Layout": [torch.strided],
    "MemoryFormat": [torch.contiguous_format, torch.preserve_format, torch.channels_last],
}


def draw_calls(op: str) -> list[Call]:
    """The same ones at every run."""
    source = random.Random(op)
    arguments = schema_of(op).arguments
    return [_draw_call(op, arguments, source) for _ in range(CALLS)]


def _draw_call(op: str, arguments: Any, source: random.Random) -> Call:
    shape, dtype = source.choice(_SHAPES), source.choice(_DTYPES)  # most tensors of a call have these
    args, kwargs = [], {}
    for argument in arguments:
        if argument.kwarg_only and argument.has_default_value() and source.random() < 0.7:
            continue
        value = _value(str(argument.real_type), source, shape, dtype)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return Call(op, tuple(args), kwargs, is_recorded=False)


def _value(kind: str, source: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    if kind.startswith("Optional["):
        inner = kind.removeprefix("Optional[").removesuffix("]")
        return None if source.random() < 0.4 else _value(inner, source, shape, dtype)
    if kind.startswith("List["):
        inner = kind.removeprefix("List[").removesuffix("]")
        return [_value(inner, source, shape, dtype) for _ in range(source.randrange(4))]
    return _single(kind, source, shape, dtype)


def _single(kind: str, source: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    if kind == "Tensor":
        if source.random() < 0.4:
            shape, dtype = source.choice(_SHAPES), source.choice(_DTYPES)
        return _tensor(source, shape, dtype)
    if kind in ("int", "SymInt"):
        return source.choice(_INTEGERS)
    if kind in ("float", "number", "Scalar", "complex"):
        return source.choice([0.0, 1.0, -1.0, 0.5, 2, 1e30, float("nan")])
    if kind == "bool":
        return source.random() < 0.5
    return source.choice(_CONSTANTS[kind]) if kind in _CONSTANTS else None


def _tensor(source: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(shape, source.choice([0.0, 0.5, 1.0, -1.0])).to(dtype)
    highest = source.choice([1, 2, 4, 100])
    return torch.tensor([source.randrange(highest) for _ in range(torch.Size(shape).numel())]).to(dtype).view(shape)
