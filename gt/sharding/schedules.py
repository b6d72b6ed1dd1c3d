"""Schedules: an op as the sum of several calls, each on other windows of its operands.

A schedule of several rounds needs less memory than a strategy that moves the same bytes, because no worker holds a
whole operand at any time: SUMMA, Cannon's algorithm and rings are schedules of a matrix product. A schedule of one
round is a strategy. Nothing here names an op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from gt.core.errors import LayoutError, nearest
from gt.sharding.cost import memory_bytes, reshard_bytes
from gt.sharding.factors import OpShardingRule
from gt.sharding.spec import DeviceMesh, ShardingSpec
from gt.sharding.strategies import OpOperand, OpResult


class UnfitAlgorithm(LayoutError):
    """An algorithm named by the user that does not exist, or does not fit the call."""


class Schedule(NamedTuple):
    """An op as rounds, one after another.

    - `rounds`: per round, the layouts of the operands, each of which has other windows of them
    - `result`: the layout of the result of each round, and of their sum
    - `travels`: per operand, whether it moves from round to round; otherwise it moves from its own layout to that of
      each round. Empty: none travels
    - `start`: the layouts that the operands are moved to before the first round; None: their own. Empty: all their own
    """

    rounds: tuple[tuple[ShardingSpec, ...], ...]
    result: ShardingSpec
    travels: tuple[bool, ...] = ()
    start: tuple[ShardingSpec | None, ...] = ()

    def moves_of(self, position: int, own: ShardingSpec) -> Iterator[tuple[ShardingSpec, ShardingSpec]]:
        """The moves of an operand, which has the layout `own` before: pairs of a layout and the next one."""
        held = own
        start = self.start_of(position)
        if start is not None:
            yield held, start
            held = start
        for layouts in self.rounds:
            yield held, layouts[position]
            held = layouts[position] if self.is_travelling(position) else held

    def start_of(self, position: int) -> ShardingSpec | None:
        """The layout that an operand is moved to before the first round. A single round has none: its windows are moved
        from where the operand is, which takes no more bytes."""
        return self.start[position] if self.start and len(self.rounds) > 1 else None

    def is_travelling(self, position: int) -> bool:
        return bool(self.travels) and self.travels[position]


class ScheduleCost(NamedTuple):
    """The bytes that all workers together receive, the number of exchanges, which follow each other, and the most bytes
    that a worker holds beside the operands in their own layouts: their windows, products, and the sum of products."""

    bytes: int
    exchanges: int
    memory: int


class ScheduleProblem(NamedTuple):
    """The call to find a schedule for: its rule, its operands in their layouts, its result, and the mesh. `panel`: the
    elements of a summed factor that each round takes; 0: as the algorithm chooses."""

    rule: OpShardingRule
    operands: tuple[OpOperand, ...]
    result: OpResult
    mesh: DeviceMesh
    panel: int = 0


Algorithm: TypeAlias = Callable[[ScheduleProblem], Iterator[Schedule]]
"""The schedules by which an algorithm runs a call; none if it does not fit the call."""


def schedule_cost(schedule: Schedule, operands: Sequence[OpOperand], result: OpResult) -> ScheduleCost:
    """The cost of a schedule, with that of moving the sum to the layout that is asked for."""
    nbytes = exchanges = memory = 0
    for position, (shape, itemsize, spec, copies) in enumerate(operands):
        held = []
        for source, target in schedule.moves_of(position, spec):
            moved = 0 if target in copies else reshard_bytes(shape, itemsize, source, target)
            nbytes, exchanges = nbytes + moved, exchanges + (moved > 0)
            held += [memory_bytes(target, shape, itemsize)] if source is not target else []
        most = max(held, default=0)
        memory += most * min(len(schedule.rounds), 2)  # the window of a round, and the next one, which moves meanwhile
    own = memory_bytes(schedule.result, result.shape, result.itemsize)
    memory += own * (2 if len(schedule.rounds) > 1 else 1)
    wanted = result.final_spec(schedule.result)
    later = 0
    if wanted is not schedule.result:
        later = reshard_bytes(result.shape, result.itemsize, schedule.result, wanted)
        memory = max(memory, own + memory_bytes(wanted, result.shape, result.itemsize))
    return ScheduleCost(nbytes + later, exchanges + (later > 0), memory)


def find_schedule(name: str, algorithms: Mapping[str, Algorithm], problem: ScheduleProblem) -> Schedule:
    """The schedule of the named algorithm that moves the fewest bytes, then has the fewest exchanges, then the least
    memory. Raises UnfitAlgorithm."""
    if name not in algorithms:
        raise UnfitAlgorithm(f"there is no algorithm {name!r}; {nearest(name, algorithms)}")
    found = list(algorithms[name](problem))
    if not found:
        shapes = " and ".join("x".join(map(str, operand.shape)) for operand in problem.operands)
        layouts = " and ".join(f"[{operand.spec}]" for operand in problem.operands)
        raise UnfitAlgorithm(
            f"the algorithm {name!r} does not fit operands {shapes} as {layouts} on mesh {problem.mesh}; without a "
            f"name GT takes the cheapest one that does"
        )
    return min(found, key=lambda schedule: schedule_cost(schedule, problem.operands, problem.result))


def find_lean_schedule(algorithms: Mapping[str, Algorithm], problem: ScheduleProblem, limit: int) -> Schedule | None:
    """The schedule of several rounds that needs the least memory, among those that move at most `limit` bytes; None if
    there is none."""
    found = [schedule for algorithm in algorithms.values() for schedule in algorithm(problem)]
    costs = [(schedule_cost(each, problem.operands, problem.result), each) for each in found if len(each.rounds) > 1]
    lean = [(cost.memory, cost.bytes, cost.exchanges, each) for cost, each in costs if cost.bytes <= limit]
    return min(lean, key=lambda each: each[:3])[3] if lean else None
