"""Softmax, norms and losses: statistics over some dims, then every element."""

from __future__ import annotations

from gt.sharding.rules.entry import OpEntry

NORMALIZATION: dict[str, OpEntry] = {}
