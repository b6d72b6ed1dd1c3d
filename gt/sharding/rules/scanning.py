"""Running totals, sorting, and the largest of many."""

from __future__ import annotations

from gt.sharding.rules.entry import OpEntry

SCANNING: dict[str, OpEntry] = {}
