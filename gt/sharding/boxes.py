"""Intervals and boxes: ranges of elements along one dim and along all dims of a tensor, and the cuts of a dim."""

from __future__ import annotations

import functools
import math
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]
Interval: TypeAlias = tuple[int, int]
"""The first element and the one after the last."""

Box: TypeAlias = tuple[Interval, ...]
"""One interval per dim."""

Cuts: TypeAlias = tuple[Interval, ...]
"""The interval of each shard along a dim."""


@functools.lru_cache(maxsize=1 << 13)
def balanced_cuts(size: int, counts: tuple[int, ...]) -> Cuts:
    """The default cuts of a dim over mesh axes of the given sizes, major first.

    Each axis cuts the intervals of the one before into shares that differ by at most one element, the larger ones
    first. No shard is empty unless the dim has fewer elements than shards, and gathering the minor axis gives the
    default cuts of the other axes."""
    cuts: list[Interval] = [(0, size)]
    for count in counts:
        finer: list[Interval] = []
        for start, stop in cuts:
            share, more = divmod(stop - start, count)
            for position in range(count):
                end = start + share + (position < more)
                finer.append((start, end))
                start = end
        cuts = finer
    return tuple(cuts)


def is_partition(cuts: Cuts, size: int) -> bool:
    """Whether intervals, in any order, cover a dim without overlap. Empty ones are ignored."""
    ordered = sorted([(start, stop) for start, stop in cuts if start < stop])
    return [0, *[stop for _, stop in ordered]] == [*[start for start, _ in ordered], size]


def total_length(cuts: Cuts) -> int:
    return sum([stop - start for start, stop in cuts])


def box_shape(box: Box) -> Shape:
    return tuple([stop - start for start, stop in box])


def box_elements(box: Box) -> int:
    return math.prod([max(stop - start, 0) for start, stop in box])


def intersect(a: Box, b: Box) -> Box | None:
    """The part that two boxes share; None if it is empty."""
    shared = tuple([(max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True)])
    return None if any(start >= stop for start, stop in shared) else shared
