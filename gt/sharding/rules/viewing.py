"""Ops that only name elements differently."""

from __future__ import annotations

from gt.sharding.rules.entry import OpEntry

VIEWING: dict[str, OpEntry] = {}
