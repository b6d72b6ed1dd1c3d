"""Scaled dot product attention."""

from __future__ import annotations

from gt.sharding.rules.entry import OpEntry

ATTENTION: dict[str, OpEntry] = {}
