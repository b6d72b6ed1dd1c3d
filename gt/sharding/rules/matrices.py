"""Linear algebra, transforms and other ops that work on whole matrices of a batch."""

from __future__ import annotations

from gt.sharding.rules.entry import OpEntry

MATRICES: dict[str, OpEntry] = {}
