"""Products that sum over a shared factor: matrix products and their kin."""

from __future__ import annotations

from gt.sharding.rules.entry import OpEntry

CONTRACTION: dict[str, OpEntry] = {}
