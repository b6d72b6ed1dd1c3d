"""What an entry of the table holds."""

from __future__ import annotations

import cmath
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from gt.sharding.factors import OpShardingRule
from gt.sharding.op_calls import Expansion, OpCall
from gt.sharding.spec import ShardingSpec

Rule: TypeAlias = Callable[[OpCall], OpShardingRule | None]
Expand: TypeAlias = Callable[[OpCall, Sequence[ShardingSpec]], Expansion | None]


class OpEntry(NamedTuple):
    """`rule` builds the rule of a call, or None where the call has none. `expand` gives the call as several ops, for
    inputs laid out as given, or None where that does not help: taken where it moves fewer bytes than any strategy of
    the rule. `tame` says of a number among the arguments whether the op is linear with it, so that partial values may
    pass: 0 * inf is not 0, and what is divided by 0 does not add up."""

    rule: Rule
    expand: Expand | None = None
    tame: Callable[[complex], bool] = cmath.isfinite
