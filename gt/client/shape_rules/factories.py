"""Rules of ops that make new tensors of a given size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gt.client.shape_rules.shape_rule import Results, ShapeRule, row_major, table
from gt.client.storage import Geometry


def _new_tensor(size: Sequence[int], *_: Any, memory_format: torch.memory_format | None = None, **__: Any) -> Results:
    return [row_major(size)] if memory_format is None and all(count > 0 for count in size) else None


def _new_tensor_like(tensor: Geometry, size: Sequence[int], *_: Any, **__: Any) -> Results:
    return _new_tensor(size)


def _arange(start: Any, end: Any, step: Any = 1, **_: Any) -> Results:
    """The rule of `arange` of integers."""
    if not type(start) is type(end) is type(step) is int or step <= 0 or end <= start:
        return None
    return [row_major((-(-(end - start) // step),))]


FACTORIES = table(
    (
        ShapeRule(_new_tensor, takes_sizes=True),
        (
            "zeros.default", "ones.default", "full.default", "empty.memory_format", "rand.default", "randn.default",
        ),
    ),
    (
        ShapeRule(_new_tensor_like, takes_sizes=True),
        ("new_zeros.default", "new_ones.default", "new_full.default", "new_empty.default"),
    ),
    (ShapeRule(lambda end, **options: _arange(0, end, **options), takes_sizes=True), ("arange.default",)),
    (ShapeRule(_arange, takes_sizes=True), ("arange.start", "arange.start_step")),
)  # fmt: skip
