"""Tensors made of nothing: constants, ranges, random numbers."""

from __future__ import annotations

from gt.sharding.rules.entry import OpEntry

CREATION: dict[str, OpEntry] = {}
