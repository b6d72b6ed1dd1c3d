"""One tensor of several and several of one: cat, stack, split."""

from __future__ import annotations

from gt.sharding.rules.entry import OpEntry

JOINING: dict[str, OpEntry] = {}
