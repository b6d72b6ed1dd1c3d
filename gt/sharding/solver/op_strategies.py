"""All strategies of one call on a mesh, with the time of each. Strategies with the same layouts, or that some worker
could not do in a single shard of at least one element, are left out."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gt.core.meta import ITEM_BYTES, TensorMeta
from gt.sharding.boxes import Shape
from gt.sharding.calibration import Calibration, step_seconds
from gt.sharding.cost import memory_bytes
from gt.sharding.factors import WHOLE, OpShardingRule, PartialPassthrough
from gt.sharding.op_calls import OpCall
from gt.sharding.reshard import plan_reshard
from gt.sharding.rules import entry_of, rule_of
from gt.sharding.rules.entry import LayOut
from gt.sharding.spec import DeviceMesh, ShardingSpec, whole
from gt.sharding.strategies import FactorSharding, OpOperand, OpStrategy, build_strategy
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


MAX_COMBINATIONS = 1 << 12


def call_strategies(
    call: OpCall, mesh: DeviceMesh, machine: Calibration, is_view: bool
) -> list[tuple[OpStrategy, float]]:
    """The strategies of a call and their times; of those with the same layouts the fastest. Views take no time."""
    found: dict[tuple[object, ...], tuple[OpStrategy, float]] = {}
    rule = rule_of(call) if call.op else None
    for strategy in [*_strategies(call, rule, mesh)] or [_whole_strategy(call, mesh)]:
        specs = (*strategy.operands, *strategy.results)
        time = 0.0 if is_view else call_seconds(rule, call, strategy.assignment, specs, machine)
        key = (strategy.operands, strategy.results)
        if key not in found or time < found[key][1]:
            found[key] = (strategy, time)
    return list(found.values())


def _strategies(call: OpCall, rule: OpShardingRule | None, mesh: DeviceMesh) -> Iterator[OpStrategy]:
    entry = entry_of(call.op) if call.op else None
    if rule is not None:
        yield from _rule_strategies(call, rule, mesh)
    elif entry is not None and entry.lay_out is not None:
        yield from _lay_out_strategies(call, entry.lay_out, mesh)
    else:
        yield _whole_strategy(call, mesh)


def _whole_strategy(call: OpCall, mesh: DeviceMesh) -> OpStrategy:
    operands, results = [
        tuple([whole(mesh, len(meta.shape)) for meta in metas]) for metas in (call.inputs, call.outputs)
    ]
    return OpStrategy(operands, results, {})


def _lay_out_strategies(call: OpCall, lay_out: LayOut, mesh: DeviceMesh) -> Iterator[OpStrategy]:
    for spec in layouts_of(call.inputs[0], mesh):
        operands = [
            OpOperand(
                meta.shape,
                ITEM_BYTES[meta.dtype],
                spec if meta.shape == call.inputs[0].shape else whole(mesh, len(meta.shape)),
            )
            for meta in call.inputs
        ]
        strategy = lay_out(call, operands, [None] * len(call.outputs), mesh)
        if strategy is not None:
            yield strategy


def _rule_strategies(call: OpCall, rule: OpShardingRule, mesh: DeviceMesh) -> Iterator[OpStrategy]:
    axes = [axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1]
    passes = [each for each in rule.passthroughs if each.kind == "sum"]
    cuttable = [name for name, factor in rule.factors.items() if factor.role != WHOLE and factor.size > 1]
    options: list[str | PartialPassthrough | None] = [*cuttable, *passes, None]
    if len(options) ** len(axes) > MAX_COMBINATIONS:
        largest = sorted(cuttable, key=lambda name: -rule.factors[name].size)[:6]
        options = [*largest, None]
    for chosen in itertools.product(options, repeat=len(axes)):
        assignment: dict[str, tuple[str, ...]] = {}
        passing: dict[str, PartialPassthrough] = {}
        for axis, option in zip(axes, chosen, strict=True):
            if isinstance(option, str):
                assignment[option] = (*assignment.get(option, ()), axis)
            elif option is not None:
                passing[axis] = option
        if any(_count(mesh, cut) > rule.factors[name].size for name, cut in assignment.items()):
            continue
        shardings = {name: FactorSharding(cut) for name, cut in assignment.items()}
        strategy = build_strategy(rule, call.shapes, call.result_shapes, mesh, shardings, passing)
        if strategy is not None and not _has_custom_cuts(strategy):
            yield strategy


def _has_custom_cuts(strategy: OpStrategy) -> bool:
    """Whether some layout has its own cuts, as windows and merged dims with uneven factors give: other ops do not
    have them, so they would be moved anyway."""
    return any(any(spec.cuts) for spec in (*strategy.operands, *strategy.results))


def _count(mesh: DeviceMesh, axes: Sequence[str]) -> int:
    return math.prod([mesh.axis_size(axis) for axis in axes])


def layouts_of(meta: TensorMeta, mesh: DeviceMesh) -> list[ShardingSpec]:
    """The layouts of a tensor in which each axis cuts one dim or none, and each worker has some element."""
    axes = [axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1]
    found = []
    for chosen in itertools.product([*range(len(meta.shape)), None], repeat=len(axes)):
        dims = [tuple([a for a, dim in zip(axes, chosen, strict=True) if dim == d]) for d in range(len(meta.shape))]
        if all(not cut or _count(mesh, cut) <= size for cut, size in zip(dims, meta.shape, strict=True)):
            found.append(ShardingSpec(mesh, dims))
    return found
