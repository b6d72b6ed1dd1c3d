"""The tensors of a session that were lost with a worker, by the lines that made them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gt.core.messages import LostLine
from gt.core.meta import ITEM_BYTES, TensorMeta

MAX_LINES = 8  # those with the most bytes; all others are told as one
MAX_EXAMPLES = 3  # of dtypes and shapes


def describe_losses(lost: Sequence[tuple[int, TensorMeta]], sites: Mapping[int, int]) -> tuple[LostLine, ...]:
    """`sites` are those of the lines that made tensors, by id, as far as they are known."""
    by_site: dict[int, list[TensorMeta]] = {}
    for ident, meta in lost:
        by_site.setdefault(sites.get(ident, 0), []).append(meta)
    known = sorted((site for site in by_site if site), key=lambda site: _nbytes(by_site[site]), reverse=True)
    rest = [meta for site in (*known[MAX_LINES:], 0) for meta in by_site.get(site, ())]
    lines = [_describe(site, by_site[site]) for site in known[:MAX_LINES]]
    return (*lines, _describe(0, rest)) if rest else tuple(lines)


def _describe(site: int, metas: Sequence[TensorMeta]) -> LostLine:
    kinds = dict.fromkeys(f"{meta.dtype}{list(meta.shape)}" for meta in metas)
    return LostLine(site, len(metas), _nbytes(metas), tuple(kinds)[:MAX_EXAMPLES])


def _nbytes(metas: Sequence[TensorMeta]) -> int:
    return sum(math.prod(meta.shape) * ITEM_BYTES[meta.dtype] for meta in metas)
