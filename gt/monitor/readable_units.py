"""Times, sizes and places as a person reads them."""

from __future__ import annotations

import math


def ticks(seconds: float) -> list[float]:
    """Round times from 0 on, 4 to 10 of them."""
    if seconds <= 0:
        return [0.0]
    step = 10.0 ** math.floor(math.log10(seconds))
    step = next(step / part for part in (1, 2, 5, 10) if seconds / (step / part) >= 4)
    return [number * step for number in range(int(seconds / step + 1e-9) + 1)]


def short_site(site: str) -> str:
    return site.rpartition("/")[2]


def print_seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds / size < 1000 else f"{seconds / size:.0f} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds > 0 else "0"


def print_bytes(nbytes: float) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def count(number: int, noun: str) -> str:
    """`1 op`, `2 ops`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
