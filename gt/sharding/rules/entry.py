"""The entries of the table of rules."""

from __future__ import annotations

import cmath
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from gt.sharding.constraints import Target
from gt.sharding.factors import OpShardingRule
from gt.sharding.op_calls import Expansion, OpCall
from gt.sharding.schedules import Algorithm
from gt.sharding.spec import DeviceMesh, ShardingSpec
from gt.sharding.strategies import OpOperand, OpStrategy

RuleFunction: TypeAlias = Callable[[OpCall], OpShardingRule | None]
Expand: TypeAlias = Callable[[OpCall, Sequence[ShardingSpec]], Expansion | None]
LayOut: TypeAlias = Callable[[OpCall, Sequence[OpOperand], Sequence[Target], DeviceMesh], OpStrategy | None]


NO_ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType({})


class OpEntry(NamedTuple):
    """All that sharding knows of an op.

    - `rule`: builds the rule of a call; None if the call has no rule
    - `expand`: the call as several ops, for the given layouts of its inputs; None if that does not help. Used if it
      moves fewer bytes than every strategy of the rule
    - `is_linear_with`: whether the op is linear with a scalar argument, so that partial values may pass: 0 * inf is not
      0, and quotients by 0 do not add up
    - `lay_out`: the strategy of a call, chosen without a rule: for ops on lists, whose tensors are independent of each
      other; None if the call has none
    - `algorithms`: named ways to run the op, in one round or several; users choose one by its name
    """

    rule: RuleFunction
    expand: Expand | None = None
    is_linear_with: Callable[[complex], bool] = cmath.isfinite
    lay_out: LayOut | None = None
    algorithms: Mapping[str, Algorithm] = NO_ALGORITHMS


def for_ops(entry: OpEntry, names: str) -> dict[str, OpEntry]:
    """The same entry for several aten ops, whose names are separated by whitespace."""
    return {f"aten.{name}": entry for name in names.split()}
