"""Ops that compute each element from the elements at the same place, with broadcasting."""

from __future__ import annotations

from gt.sharding.calls import Call
from gt.sharding.factors import OpShardingRule, Passing, bind
from gt.sharding.rules.entry import OpEntry


def elementwise(*passes: Passing) -> OpEntry:
    """Any number of tensors that broadcast to the results."""

    def rule(call: Call) -> OpShardingRule:
        operands = ", ".join(["..."] * len(call.inputs))
        results = ", ".join(["..."] * len(call.outputs))
        valid = [passing for passing in passes if max(passing.operands) < len(call.inputs)]
        return bind(f"{operands} -> {results}", call.shapes, call.result_shapes, passes=valid)

    return OpEntry(rule)


def _passing(*operands: int) -> Passing:
    return Passing(frozenset(operands))


POINTWISE: dict[str, OpEntry] = {
    "aten.relu": elementwise(),
    "aten.add": elementwise(_passing(0, 1)),
    "aten.mul": elementwise(_passing(0), _passing(1)),
}
