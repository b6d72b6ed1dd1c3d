"""The time of ops and of moves between layouts on a mesh: a roofline of the slowest shard, and alpha and beta of
links."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gt.core.meta import ITEM_BYTES, TensorMeta
from gt.sharding.boxes import Shape
from gt.sharding.calibration import Calibration
from gt.sharding.cost import memory_bytes
from gt.sharding.factors import OpShardingRule
from gt.sharding.link_costs import step_seconds
from gt.sharding.op_calls import OpCall
from gt.sharding.reshard import plan_reshard
from gt.sharding.spec import ShardingSpec
from gt.sharding.strategies import FactorSharding
from gt.sharding.work import LaidOutTensor, work_of


def shard_bytes(meta: TensorMeta, spec: ShardingSpec) -> int:
    """The bytes of the largest shard of a tensor."""
    return memory_bytes(spec, meta.shape, ITEM_BYTES[meta.dtype])


def call_seconds(
    rule: OpShardingRule | None,
    call: OpCall,
    assignment: Mapping[str, FactorSharding],
    specs: Sequence[ShardingSpec],
    machine: Calibration,
) -> float:
    """The time of a call whose operands and results have these layouts."""
    pairs = zip((*call.inputs, *call.outputs), specs, strict=True)
    tensors = [LaidOutTensor(meta.shape, ITEM_BYTES[meta.dtype], spec) for meta, spec in pairs]
    return machine.op_seconds + work_of(rule, assignment, tensors).seconds(machine)


class MachineKey:
    """A calibration as a key of caches: compared by identity."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration


class MoveCost(NamedTuple):
    """The time of a move between two layouts, and the bytes that all workers together receive."""

    seconds: float
    nbytes: int


def move_cost(meta: TensorMeta, source: ShardingSpec, target: ShardingSpec, machine: MachineKey) -> MoveCost:
    return _move_cost(meta.shape, ITEM_BYTES[meta.dtype], source, target, machine)


@functools.lru_cache(maxsize=1 << 18)
def _move_cost(
    shape: Shape, itemsize: int, source: ShardingSpec, target: ShardingSpec, machine: MachineKey
) -> MoveCost:
    if source is target:
        return MoveCost(0.0, 0)
    plan = plan_reshard(shape, itemsize, source, target)
    time = memory_bytes(target, shape, itemsize) / machine.calibration.memory_bandwidth  # the new part is written
    for step, nbytes in zip(plan.steps, plan.step_bytes, strict=True):
        time += step_seconds(step.kind, step.axes, nbytes, step.target.mesh, machine.calibration)
    return MoveCost(time, plan.bytes)
