"""Rules of matrix products and attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gt.client.shape_rules.shape_rule import Results, ShapeRule, Strided, row_major, table
from gt.client.storage import Geometry
from gt.client.torch_strides import broadcast


def _mm(left: Geometry, right: Geometry) -> Results:
    if len(left.shape) != 2 or len(right.shape) != 2 or left.shape[1] != right.shape[0]:
        return None
    return [row_major((left.shape[0], right.shape[1]))]


def _bmm(left: Geometry, right: Geometry) -> Results:
    if len(left.shape) != 3 or len(right.shape) != 3 or left.shape[0] != right.shape[0]:
        return None
    return [row_major((*left.shape[:2], right.shape[2]))] if left.shape[2] == right.shape[1] else None


def _with_addend(product: Callable[[Geometry, Geometry], Results]) -> Callable[..., Results]:
    def rule(addend: Geometry, left: Geometry, right: Geometry, **_: Any) -> Results:
        found = product(left, right)
        if found is None or found[0] is None or broadcast([addend.shape, found[0].shape]) != found[0].shape:
            return None
        return found

    return rule


def _attention(query: Geometry, key: Geometry, value: Geometry, *_: Any, **__: Any) -> Results:
    if not _is_attention(query, key, value):
        return None
    batch, heads, length, _ = query.shape
    if query.stride not in (query.row_major, _by_head(query.shape).stride):
        return None
    return [Strided(tuple(query.shape), query.stride), Strided((batch, heads, length), (length * heads, 1, heads))]


def _attention_backward(
    gradient: Geometry | None, query: Geometry, key: Geometry, value: Geometry, out: Geometry, *_: Any, **__: Any
) -> Results:
    if gradient is None or not _is_attention(query, key, value):
        return None
    if gradient.shape != query.shape or out.shape != query.shape:
        return None
    return [_by_head(operand.shape) for operand in (query, key, value)]


def _is_attention(query: Geometry, key: Geometry, value: Geometry) -> bool:
    if len(query.shape) != 4 or key.shape != value.shape or len(key.shape) != 4 or 0 in (*query.shape, *key.shape):
        return False
    return query.shape[:2] == key.shape[:2] and query.shape[3] == key.shape[3]


def _by_head(shape: Sequence[int]) -> Strided:
    """(batch, heads, length, width) in memory of (batch, length, heads, width)."""
    batch, heads, length, width = shape
    return Strided((batch, heads, length, width), (length * heads * width, width, heads * width, 1))


PRODUCTS = table(
    (ShapeRule(_mm), ("mm.default",)),
    (ShapeRule(_bmm), ("bmm.default",)),
    (ShapeRule(_with_addend(_mm)), ("addmm.default",)),
    (ShapeRule(_with_addend(_bmm)), ("baddbmm.default",)),
    (ShapeRule(_attention), ("_scaled_dot_product_flash_attention_for_cpu.default",)),
    (ShapeRule(_attention_backward), ("_scaled_dot_product_flash_attention_for_cpu_backward.default",)),
)
