"""Positions in sorted sequences, and membership: searchsorted, bucketize, isin."""

from __future__ import annotations

from gt.sharding.factors import (
    REDUCE,
    FactorRef,
    OpShardingRule,
    RuleBuilder,
    bind,
)
from gt.sharding.op_calls import OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.dims import dim_factors


def _searchsorted(call: OpCall) -> OpShardingRule:
    """The position of a value is the number of smaller elements, so the positions in shards add up."""
    values, sorter = call.tensor(1, "self"), call.tensor(5, "sorter")
    batched = "..." if len(call.shapes[0]) > 1 else ""
    operands = {0: f"{batched} n", values: f"{batched} m" if batched else "...", sorter: f"{batched} n"}
    result = operands[values] if values is not None else "..."
    text = ", ".join([operands[position] for position in range(len(call.inputs))])
    how = "reduce(sum): n" if sorter is None else "whole: n"
    return bind(f"{text} -> {result} | {how}", call.shapes, call.result_shapes)


def _bucketize(call: OpCall) -> OpShardingRule:
    text = "..., n -> ..." if len(call.inputs) == 2 else "n -> ..."
    return bind(f"{text} | reduce(sum): n", call.shapes, call.result_shapes)


def _isin(call: OpCall) -> OpShardingRule:
    """Membership is the OR over the shards of the set, or with `invert` the AND."""
    kind = "and" if call.kwargs.get("invert") else "or"
    elements, tests = call.tensor(0, "elements"), call.tensor(1, "test_elements")
    builder = RuleBuilder()
    own = tuple(dim_factors(builder, call.result_shapes[0]))
    if elements is not None:
        builder.operands.append(own)
    if tests is not None:
        sizes = enumerate(call.shapes[tests])
        builder.operands.append(tuple([(FactorRef(builder.factor(f"t{dim}", n, REDUCE, kind)),) for dim, n in sizes]))
    builder.results.append(own)
    return builder.build()


SEARCHSORTED: dict[str, OpEntry] = {
    "aten.searchsorted": OpEntry(_searchsorted),
    "aten.bucketize": OpEntry(_bucketize),
    "aten.isin": OpEntry(_isin),
}
