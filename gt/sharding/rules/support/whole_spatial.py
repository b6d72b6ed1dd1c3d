"""Rules of ops on images, whose last dims are spatial and whole."""

from __future__ import annotations

from collections.abc import Sequence

from gt.sharding.dtypes import is_complex, is_floating
from gt.sharding.factors import OpShardingRule, PartialPassthrough, bind
from gt.sharding.op_calls import Lowering, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.local_programs import same_op, zeros_if_empty


def exact_passthroughs(call: OpCall, passthroughs: Sequence[PartialPassthrough]) -> tuple[PartialPassthrough, ...]:
    """The passthroughs without sums of integers: averages and interpolations of integers are rounded."""
    dtype = call.inputs[0].dtype
    return tuple([p for p in passthroughs if p.kind != "sum" or is_floating(dtype) or is_complex(dtype)])


def spatial_rule(text: str, *passthroughs: PartialPassthrough, lowering: Lowering = same_op) -> OpEntry:
    def rule(call: OpCall) -> OpShardingRule:
        passed = exact_passthroughs(call, passthroughs)
        return bind(
            text, call.shapes, call.result_shapes, passthroughs=passed, lowering=zeros_if_empty(lowering)
        )  # fmt: skip

    return OpEntry(rule)


def whole_spatial_dims(rank: int, *passthroughs: PartialPassthrough, lowering: Lowering = same_op) -> OpEntry:
    """An op whose tensors all have the same dims, apart from the last `rank` ones, which are whole."""
    dims = " ".join(["...", *["1"] * rank])

    def rule(call: OpCall) -> OpShardingRule | None:
        text = f"{', '.join([dims] * len(call.inputs))} -> {', '.join([dims] * len(call.outputs))}"
        return spatial_rule(text, *passthroughs, lowering=lowering).rule(call)

    return OpEntry(rule)
