"""Times, sizes, places and ops as a person reads them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from gt.core.meta import TensorMeta

_SHOWN_TENSORS = 4
_LONG_KINDS = {"float": "f", "int": "i", "uint": "u", "complex": "c", "bfloat": "bf"}


def ticks(seconds: float) -> list[float]:
    """Round times from 0 on, 4 to 10 of them."""
    if seconds <= 0:
        return [0.0]
    step = 10.0 ** math.floor(math.log10(seconds))
    step = next(step / part for part in (1, 2, 5, 10) if seconds / (step / part) >= 4)
    return [number * step for number in range(int(seconds / step + 1e-9) + 1)]


def short_site(site: str) -> str:
    return site.rpartition("/")[2]


def short_op(op: str) -> str:
    """The short name of an op for narrow columns: `mm` for `aten.mm.default`."""
    return op.removeprefix("aten.").removesuffix(".default")


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
    """A number with its noun: `1 op`, `2 ops`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def print_tensors(metas: Sequence[TensorMeta]) -> str:
    """Dtypes and shapes, `f32[8,16] i64[8]`; of many tensors the first two and how many more."""
    shown = metas if len(metas) <= _SHOWN_TENSORS else metas[:2]
    more = f" +{len(metas) - len(shown)}" if len(metas) > len(shown) else ""
    return " ".join([f"{short_dtype(meta.dtype)}[{','.join(map(str, meta.shape))}]" for meta in shown]) + more


def short_dtype(dtype: str) -> str:
    """The short name of a dtype: `f32` for `float32`."""
    found = re.fullmatch("(float|int|uint|complex|bfloat)([0-9]+)", dtype)
    return _LONG_KINDS[found[1]] + found[2] if found is not None else dtype
