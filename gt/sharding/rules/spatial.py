"""Convolution, pooling and resampling."""

from __future__ import annotations

from gt.sharding.rules.entry import OpEntry

SPATIAL: dict[str, OpEntry] = {}
