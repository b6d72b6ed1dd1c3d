"""The cheapest strategy of an op's rule, by the bytes that it moves. Nothing here names an op.

The dispatcher plans op by op. A pass over a whole program is in hierarchical_propagation.py; the dispatcher does not
use it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from gt.sharding.constraints import Constraint
from gt.sharding.cost import memory_bytes, reshard_bytes
from gt.sharding.factors import OpShardingRule
from gt.sharding.spec import DeviceMesh, ShardingSpec
from gt.sharding.strategies import OpOperand, OpResult, OpStrategy, project, strategies_of


class Choice(NamedTuple):
    """A strategy and the bytes that move for it: of operands, and of results that have a target."""

    strategy: OpStrategy
    bytes: int


def propagate_sharding(
    rule: OpShardingRule, operands: Sequence[OpOperand], results: Sequence[OpResult], mesh: DeviceMesh
) -> Choice:
    """The cheapest strategy on a mesh: the fewest bytes moved, then the fewest unrequested cuts, then the fewest
    changed results and operands, then the least memory.

    A strategy that moves nothing is taken even if its result is partial. If bytes move anyway, the later cost of a
    result counts too: a partial result will be reduced, and a cut along an axis that cuts no operand will be gathered,
    since no layout asked for it. Constraints on results come first (`_constraint_rank`)."""
    projected = [
        project(rule, position, operand.spec) if operand.spec.mesh is mesh else {}
        for position, operand in enumerate(operands)
    ]
    cut = {axis for operand in operands if operand.spec.mesh is mesh for axis in operand.spec.axes}
    constrained = {axis for result in results if isinstance(result.target, Constraint) for axis in result.target.axes}
    best: tuple[tuple[int, ...], Choice] | None = None
    for order, strategy in enumerate(strategies_of(rule, operands, results, mesh, projected)):
        constraint_rank = _constraint_rank(strategy, operands, results, mesh, constrained) if constrained else 0
        moved, changed = _moved(strategy, operands, results)
        if best is not None and (constraint_rank, int(moved > 0), moved) > best[0][:3]:
            continue  # saves the rest of the rank for most strategies
        later = _rank(strategy, results, moved, cut | constrained)
        rank = (constraint_rank, *later, *changed, _memory(strategy, results), order)
        if best is None or rank < best[0]:
            best = (rank, Choice(strategy, moved))
    assert best is not None, "an op can always run on whole operands"
    return best[1]


def _constraint_rank(
    strategy: OpStrategy,
    operands: Sequence[OpOperand],
    results: Sequence[OpResult],
    mesh: DeviceMesh,
    constrained: set[str],
) -> int:
    """How well a strategy serves constraints on the results, which name the axes `constrained`; 0 is best.

    0: these axes divide the op, or partial values that may stay partial pass it, and its operands stay as they are;
    only results move. 1: the results satisfy the constraints as computed, and are not left partial; operands move.
    2: any other strategy."""
    divided = {axis for sharding in strategy.assignment.values() for axis in sharding.axes}
    for result, given in zip(results, strategy.results, strict=True):
        if isinstance(result.target, Constraint) and result.target.keeps_partial:
            divided.update(given.partial)
    pairs = zip(operands, strategy.operands, strict=True)
    if constrained <= divided and all(_stays(operand.spec, needed, mesh, constrained) for operand, needed in pairs):
        return 0
    satisfied = all(
        r.final_spec(given) is given and constrained.isdisjoint(given.partial)
        for r, given in zip(results, strategy.results, strict=True)
    )
    return 1 if satisfied else 2


def _stays(spec: ShardingSpec, needed: ShardingSpec, mesh: DeviceMesh, constrained: set[str]) -> bool:
    """Whether an operand keeps its layout along the axes `constrained`. Cutting a replicated operand is allowed."""
    if spec.mesh is not mesh:
        return False
    return all(axis not in spec.partial or axis in needed.partial for axis in constrained) and all(
        axis in needed_axes
        for axes, needed_axes in zip(spec.dims, needed.dims, strict=True)
        for axis in axes
        if axis in constrained
    )


def moved_bytes(operand: OpOperand, needed: ShardingSpec) -> int:
    """The bytes that move to give an operand a layout. Copies are free."""
    if operand.spec is needed or needed in operand.copies:
        return 0
    return reshard_bytes(operand.shape, operand.itemsize, operand.spec, needed)


def _moved(
    strategy: OpStrategy, operands: Sequence[OpOperand], results: Sequence[OpResult]
) -> tuple[int, tuple[int, int]]:
    """The bytes that a strategy moves, and the numbers of results and of operands that it moves."""
    moved = operands_changed = results_changed = 0
    for operand, needed in zip(operands, strategy.operands, strict=True):
        if operand.spec is not needed and needed not in operand.copies:
            moved += reshard_bytes(operand.shape, operand.itemsize, operand.spec, needed)
            operands_changed += 1
    for result, given in zip(results, strategy.results, strict=True):
        wanted = result.final_spec(given)
        if wanted is not given:
            moved += reshard_bytes(result.shape, result.itemsize, given, wanted)
            results_changed += 1
    return moved, (results_changed, operands_changed)


def _rank(strategy: OpStrategy, results: Sequence[OpResult], moved: int, cut: set[str]) -> tuple[int, int, int]:
    """Whether bytes move, how many now and later, and the number of cuts that no layout asked for."""
    free = [
        (result, result.final_spec(given))
        for result, given in zip(results, strategy.results, strict=True)
        if not isinstance(result.target, ShardingSpec)
    ]
    pending = sum(_pending(result, given, cut) for result, given in free) if moved else 0
    unrequested = sum(axis not in cut for _, given in free for axis in given.axes)
    return int(moved > 0), moved + pending, unrequested


def _memory(strategy: OpStrategy, results: Sequence[OpResult]) -> int:
    pairs = zip(results, strategy.results, strict=True)
    return sum(memory_bytes(given, result.shape, result.itemsize) for result, given in pairs)


def _pending(result: OpResult, given: ShardingSpec, cut: set[str]) -> int:
    """The bytes that a result's layout will cost later: to reduce partial values, and to gather unrequested cuts."""
    size = given.mesh.axis_size
    unrequested = [axis for axis in given.axes if axis not in cut]
    group = math.prod([size(axis) for axis in (*given.partial, *unrequested)])
    copies = given.mesh.size // math.prod([size(axis) for axis in (*given.partial, *given.axes)])
    return (group - 1) * math.prod(result.shape) * result.itemsize * copies
