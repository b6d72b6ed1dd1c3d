"""Algorithms for distributed products: of two operands that share a summed factor.

The algorithms know the roles of factors and not their op: `rows` are in the first operand and the result, `columns` in
the second and the result, `summed` in both operands, and `batch` in all three.

| name | grid | an operand that is never whole |
|---|---|---|
| `local` | as the operands lie; nothing moves | - |
| `gather_a`, `gather_b` | all workers along columns; along rows | - |
| `inner` | all workers along the summed factor; the result is reduced | - |
| `stationary_a`, `stationary_b`, `stationary_c` | any in which that tensor does not move | - |
| `summa` | rows by columns, in panels of the summed factor | both |
| `cannon` | a square of rows by columns; blocks are shifted along both axes | both |
| `2.5d` | rows by columns by layers; each layer sums a part, in panels | both |
| `ring` | all workers along rows, or along columns; the other operand is shifted along a ring | the shifted one |
| `grid` | any, in one round | - |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gt.sharding.boxes import Cuts, balanced_cuts
from gt.sharding.cost import reshard_bytes
from gt.sharding.factors import REDUCE, OpShardingRule
from gt.sharding.schedules import Algorithm, Schedule, ScheduleProblem
from gt.sharding.spec import DeviceMesh, DimSpec, ShardingSpec
from gt.sharding.strategies import FactorSharding, axes_in_use, build_strategy, operand_layout, strategies_of

MAX_ROUNDS = 64


class ProductFactors(NamedTuple):
    """The factors of a product by their roles, the largest of each role first."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    summed: tuple[str, ...]
    batch: tuple[str, ...]


def product_factors(rule: OpShardingRule) -> ProductFactors:
    def factors_in(dims: Sequence[Sequence[object]]) -> set[str]:
        return {ref.factor for dim in dims for ref in dim}  # type: ignore[attr-defined]

    first, second = map(factors_in, rule.operands)
    given = factors_in(rule.results[0])

    def largest_first(names: set[str]) -> tuple[str, ...]:
        return tuple(sorted(names, key=lambda name: (-rule.factors[name].size, name)))

    summed = {name for name in first & second if rule.factors[name].role == REDUCE}
    return ProductFactors(
        largest_first((first & given) - second),
        largest_first((second & given) - first),
        largest_first(summed),
        largest_first(first & second & given),
    )


# --- One round --------------------------------------------------------------------------------------------------------


def _one_round(problem: ScheduleProblem, assignment: Mapping[str, DimSpec]) -> Iterator[Schedule]:
    """The strategy that cuts factors by these axes."""
    shardings = {name: FactorSharding(axes) for name, axes in assignment.items() if axes}
    shapes = [operand.shape for operand in problem.operands]
    strategy = build_strategy(problem.rule, shapes, [problem.result.shape], problem.mesh, shardings)
    if strategy is not None:
        yield Schedule((strategy.operands,), strategy.results[0])


def _all_along(role: str) -> Algorithm:
    """All axes of the mesh cut the largest factor of a role; none is cut if the product has no such factor."""

    def schedules(problem: ScheduleProblem) -> Iterator[Schedule]:
        names = getattr(product_factors(problem.rule), role)[:1]
        yield from _one_round(problem, dict.fromkeys(names, problem.mesh.axis_names))

    return schedules


def _strategies(problem: ScheduleProblem) -> Iterator[Schedule]:
    """Every strategy of the rule, along all axes of the mesh."""
    rule, operands, result, mesh, _ = problem
    used = axes_in_use(operands, [result], mesh)
    idle = [axis for axis in mesh.axis_names if axis not in used]
    for strategy in strategies_of(rule, operands, [result], mesh):
        yield Schedule((strategy.operands,), strategy.results[0])
    for strategy in strategies_of(rule, operands, [result], mesh, idle) if idle else ():
        yield Schedule((strategy.operands,), strategy.results[0])


def _those(fits: Callable[[ScheduleProblem, Schedule], bool]) -> Algorithm:
    def schedules(problem: ScheduleProblem) -> Iterator[Schedule]:
        return (schedule for schedule in _strategies(problem) if fits(problem, schedule))

    return schedules


def _stays(problem: ScheduleProblem, schedule: Schedule, position: int) -> bool:
    """Whether an operand moves to no other worker. Cutting what is replicated moves nothing."""
    operand = problem.operands[position]
    return not reshard_bytes(operand.shape, operand.itemsize, operand.spec, schedule.rounds[0][position])


def _result_stays(problem: ScheduleProblem, schedule: Schedule) -> bool:
    wanted = problem.result.final_spec(schedule.result)
    moved = reshard_bytes(problem.result.shape, problem.result.itemsize, schedule.result, wanted)
    return not moved and not schedule.result.partial


def _is_local(problem: ScheduleProblem, schedule: Schedule) -> bool:
    wanted = problem.result.final_spec(schedule.result)
    moved = reshard_bytes(problem.result.shape, problem.result.itemsize, schedule.result, wanted)
    return not moved and _stays(problem, schedule, 0) and _stays(problem, schedule, 1)


# --- Several rounds ---------------------------------------------------------------------------------------------------


class Grid(NamedTuple):
    """The axes of a mesh that cut each role."""

    mesh: DeviceMesh
    rows: DimSpec = ()
    columns: DimSpec = ()
    summed: DimSpec = ()
    batch: DimSpec = ()


class _Windows:
    """Makes the layouts of rounds on a grid."""

    def __init__(self, problem: ScheduleProblem, grid: Grid) -> None:
        self.grid = grid
        self.rule = problem.rule
        self.factors = product_factors(problem.rule)
        self.size = problem.rule.factors[self.factors.summed[0]].size
        self._shapes = [operand.shape for operand in problem.operands]
        self._result = problem.result.shape
        self._operands = problem.operands

    def count(self, axes: DimSpec) -> int:
        return math.prod([self.grid.mesh.axis_size(axis) for axis in axes])

    def _cut(self, summed: FactorSharding) -> dict[str, FactorSharding]:
        """How factors are cut. An axis that cuts a second factor needs cuts that are given (a skewed layout)."""
        factors, grid = self.factors, self.grid
        cut = {factors.summed[0]: summed} if summed.axes else {}
        for names, axes in ((factors.rows, grid.rows), (factors.columns, grid.columns), (factors.batch, grid.batch)):
            if names and axes:
                sizes = tuple([grid.mesh.axis_size(axis) for axis in axes])
                is_shared = not set(axes).isdisjoint(summed.axes)
                cuts = balanced_cuts(self.rule.factors[names[0]].size, sizes) if is_shared else None
                cut[names[0]] = FactorSharding(axes, cuts)
        return cut

    def operand(self, position: int, axes: DimSpec, cuts: Cuts | None = None) -> ShardingSpec:
        """An operand whose summed factor is cut by these axes into these windows."""
        cut = self._cut(FactorSharding(axes, cuts))
        spec = operand_layout(self.rule, position, self._shapes[position], self.grid.mesh, cut)
        assert spec is not None, "the dims of a product are single factors"
        return spec

    def result(self) -> ShardingSpec:
        cut = self._cut(FactorSharding(self.grid.summed))
        strategy = build_strategy(self.rule, self._shapes, [self._result], self.grid.mesh, cut)
        assert strategy is not None, "the dims of a product are single factors"
        return strategy.results[0]

    def start(self, layouts: Sequence[ShardingSpec]) -> tuple[ShardingSpec | None, ...]:
        """Partial operands are reduced once, to one copy in blocks. So are those moved that lie on workers of which the
        mesh has not all: only the workers of the mesh take part in rounds."""
        workers = set(self.grid.mesh.workers)
        return tuple(
            [
                block if operand.spec.partial or not workers.issuperset(operand.spec.mesh.workers) else None
                for operand, block in zip(self._operands, layouts, strict=True)
            ]
        )


def _is_round_product(problem: ScheduleProblem) -> bool:
    """Whether the product has the factors that rounds need."""
    found = product_factors(problem.rule)
    return bool(found.rows and found.columns and len(found.summed) == 1)


def _panels(problem: ScheduleProblem, windows: _Windows) -> Schedule:
    """Rounds over panels of the summed factor, of each layer's part of it if layers divide it."""
    grid, layers = windows.grid, windows.count(windows.grid.summed)
    parts = balanced_cuts(windows.size, (layers,)) if layers > 1 else ((0, windows.size),)
    longest = max(stop - start for start, stop in parts)
    across = max(windows.count(grid.rows), windows.count(grid.columns), 2)
    panel = max(problem.panel or -(-longest // across), -(-longest // MAX_ROUNDS), 1)
    rounds = []
    for begin in range(0, max(longest, 1), panel):
        cuts = [(min(start + begin, stop), min(start + begin + panel, stop)) for start, stop in parts]
        rounds.append(tuple([_shown(windows, position, cuts) for position in (0, 1)]))
    blocks = [windows.operand(position, (*grid.summed, *_others(grid, position))) for position in (0, 1)]
    return Schedule(tuple(rounds), windows.result(), start=windows.start(blocks))


def _others(grid: Grid, position: int) -> DimSpec:
    """The axes along which an operand of a grid is replicated: those of the other one."""
    return grid.columns if position == 0 else grid.rows


def _shown(windows: _Windows, position: int, cuts: Sequence[tuple[int, int]]) -> ShardingSpec:
    """An operand with the same window on all workers along the axes of the other operand; if there are none, along its
    own."""
    grid = windows.grid
    others = _others(grid, position) or (() if grid.summed else (*grid.rows, *grid.columns, *grid.batch))
    repeated = tuple([window for window in cuts for _ in range(windows.count(others))])
    return windows.operand(position, (*grid.summed, *others), repeated)


def _grids(problem: ScheduleProblem, roles: Sequence[str]) -> Iterator[Grid]:
    """All ways to give each axis of the mesh that has several workers to a role, and to each of `roles` at least one;
    an axis may also cut the batch."""
    mesh = problem.mesh
    axes = [axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1]
    usable = [*roles, *(["batch"] if product_factors(problem.rule).batch else [])]
    needed = set(roles) if len(axes) >= len(roles) else set()
    for chosen in itertools.product(usable, repeat=len(axes)):
        if needed <= set(chosen):
            own = {role: tuple([a for a, r in zip(axes, chosen, strict=True) if r == role]) for role in usable}
            yield Grid(mesh, **own)


def _summa(problem: ScheduleProblem) -> Iterator[Schedule]:
    if problem.mesh.size == 1:
        yield from _one_round(problem, {})
    elif _is_round_product(problem):
        for grid in _grids(problem, ("rows", "columns")):
            yield _panels(problem, _Windows(problem, grid))


def _layered(problem: ScheduleProblem) -> Iterator[Schedule]:
    """SUMMA on each layer of a grid. A mesh with fewer than three axes is seen as a grid of as many equal rows and
    columns as possible."""
    if not _is_round_product(problem):
        return
    mesh = problem.mesh
    if mesh.size == 1:
        yield from _one_round(problem, {})
        return
    if sum(size > 1 for size in mesh.shape) >= 3:
        for grid in _grids(problem, ("rows", "columns", "summed")):
            yield _panels(problem, _Windows(problem, grid))
        return
    for side in range(2, math.isqrt(mesh.size) + 1):
        layers, rest = divmod(mesh.size, side * side)
        if not rest and layers > 1:
            seen = DeviceMesh((side, side, layers), ("rows", "columns", "layers"), mesh.workers, hosts=mesh.hosts)
            yield _panels(problem, _Windows(problem, Grid(seen, ("rows",), ("columns",), ("layers",))))


def _cannon(problem: ScheduleProblem) -> Iterator[Schedule]:
    """Worker (i, j) has block i + j + t of the summed factor in round t; from round to round the blocks of the first
    operand go one column to the left and those of the second one row up."""
    if not _is_round_product(problem):
        return
    if problem.mesh.size == 1:
        yield from _one_round(problem, {})
    for grid in _squares(problem.mesh):
        windows = _Windows(problem, grid)
        side = windows.count(grid.rows)
        blocks = balanced_cuts(windows.size, (side,))
        rounds = []
        for turn in range(side):
            cuts = tuple([blocks[(i + j + turn) % side] for i in range(side) for j in range(side)])
            rounds.append(tuple([windows.operand(at, (*grid.rows, *grid.columns), cuts) for at in (0, 1)]))
        start = windows.start([windows.operand(at, _others(grid, at)) for at in (0, 1)])
        yield Schedule(tuple(rounds), windows.result(), (True, True), start)


def _squares(mesh: DeviceMesh) -> Iterator[Grid]:
    """The mesh as a square of rows by columns."""
    axes = [axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1]
    side = math.isqrt(mesh.size)
    if len(axes) == 2 and mesh.axis_size(axes[0]) == mesh.axis_size(axes[1]):
        yield Grid(mesh, (axes[0],), (axes[1],))
        yield Grid(mesh, (axes[1],), (axes[0],))
    elif side > 1 and side * side == mesh.size:
        seen = DeviceMesh((side, side), ("rows", "columns"), mesh.workers, hosts=mesh.hosts)
        yield Grid(seen, ("rows",), ("columns",))


def _ring(problem: ScheduleProblem) -> Iterator[Schedule]:
    """Worker i has block i + t of the shifted operand in round t."""
    if not _is_round_product(problem):
        return
    axes = tuple([axis for axis in problem.mesh.axis_names if problem.mesh.axis_size(axis) > 1])
    if not axes:
        yield from _one_round(problem, {})
        return
    for grid in (Grid(problem.mesh, rows=axes), Grid(problem.mesh, columns=axes)):
        windows = _Windows(problem, grid)
        count = windows.count(axes)
        if count > MAX_ROUNDS:
            continue
        blocks = balanced_cuts(windows.size, tuple([problem.mesh.axis_size(axis) for axis in axes]))
        turned = [(*blocks[turn:], *blocks[:turn]) for turn in range(count)]
        rounds = tuple([tuple([windows.operand(at, axes, cuts) for at in (0, 1)]) for cuts in turned])
        stays = 0 if grid.rows else 1
        moved = list(windows.start(rounds[0]))
        moved[stays] = windows.operand(stays, ())
        yield Schedule(rounds, windows.result(), tuple([at != stays for at in (0, 1)]), tuple(moved))


PRODUCT_ALGORITHMS: dict[str, Algorithm] = {
    "local": _those(_is_local),
    "gather_a": _all_along("columns"),
    "gather_b": _all_along("rows"),
    "inner": _all_along("summed"),
    "stationary_a": _those(lambda problem, schedule: _stays(problem, schedule, 0)),
    "stationary_b": _those(lambda problem, schedule: _stays(problem, schedule, 1)),
    "stationary_c": _those(_result_stays),
    "summa": _summa,
    "cannon": _cannon,
    "2.5d": _layered,
    "ring": _ring,
    "grid": _strategies,
}
