"""Softmax, norms and losses: statistics over some dims, then every element."""

from __future__ import annotations

from gt.sharding.rules.channel_norm import CHANNEL_NORM
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.layer_norm import LAYER_NORM
from gt.sharding.rules.losses import LOSSES
from gt.sharding.rules.softmax import SOFTMAX

NORMALIZATION: dict[str, OpEntry] = SOFTMAX | LAYER_NORM | CHANNEL_NORM | LOSSES
