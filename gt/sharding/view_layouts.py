"""The layout of a tensor that gives a view of it another layout."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.meta import TensorMeta
from gt.core.signatures import ViewStep
from gt.sharding.lowering import NoRule, infer_output_sharding
from gt.sharding.program_builder import view_call
from gt.sharding.spec import ShardingSpec, whole


def base_layout(steps: Sequence[ViewStep], base: TensorMeta, target: ShardingSpec) -> ShardingSpec | None:
    """The layout of a tensor in which the view that `steps` make of it has the layout `target`, and nothing moves. None
    if there is none."""
    calls, meta = [], base
    for step in steps:
        call, pick = view_call(step, meta)
        calls.append((call, pick))
        meta = call.outputs[pick]
    for call, pick in reversed(calls):
        mesh, rank = target.mesh, len(call.inputs[0].shape)
        targets = [target if position == pick else None for position in range(len(call.outputs))]
        try:
            strategy = infer_output_sharding(call, [whole(mesh, rank)], mesh, targets).strategy
        except NoRule:
            return None
        if strategy.results[pick] is not target:
            return None
        target = strategy.operands[0]
    return target
