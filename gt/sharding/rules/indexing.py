"""Ops that pick or put elements by index."""

from __future__ import annotations

from gt.sharding.rules.entry import OpEntry

INDEXING: dict[str, OpEntry] = {}
