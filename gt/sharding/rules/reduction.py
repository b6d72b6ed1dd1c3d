"""Ops that reduce dims."""

from __future__ import annotations

from gt.sharding.rules.entry import OpEntry

REDUCTION: dict[str, OpEntry] = {}
