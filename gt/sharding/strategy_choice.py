"""The cheapest strategy of an op's rule, by the bytes that it moves. Nothing here names an op.

The dispatcher plans op by op. A pass over a whole program is in hierarchical_propagation.py; the dispatcher does not
use it.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gt.core.errors import SettingsError
from gt.core.settings import read_settings
from gt.sharding.boxes import Shape
from gt.sharding.calibration import Calibration, stored_calibration, transfer_seconds
from gt.sharding.constraints import Constraint
from gt.sharding.cost import memory_bytes, reshard_bytes
from gt.sharding.factors import OpShardingRule
from gt.sharding.host_order import host_share
from gt.sharding.reshard import plan_reshard
from gt.sharding.spec import DeviceMesh, ShardingSpec
from gt.sharding.strategies import OpOperand, OpResult, OpStrategy, axes_in_use, strategies_of
from gt.sharding.work import LaidOutTensor, work_of

log = logging.getLogger("gt.dispatcher")


class Choice(NamedTuple):
    """A strategy and the bytes that move for it: of operands, and of results that have a target."""

    strategy: OpStrategy
    bytes: int


def propagate_sharding(
    rule: OpShardingRule, operands: Sequence[OpOperand], results: Sequence[OpResult], mesh: DeviceMesh
) -> Choice:
    """The cheapest strategy on a mesh: the fewest bytes moved, then the fewest unrequested cuts, then the fewest
    changed results and operands, then the least memory. On a mesh of several hosts, of equal bytes those count most
    that travel between hosts.

    A strategy that moves nothing is taken even if its result is partial. If bytes move anyway, the later cost of a
    result counts too: a partial result will be reduced, and a cut along an axis that cuts no operand will be gathered,
    since no layout asked for it. Then axes that are not in use may cut the op as well: if operands that move are
    larger than the results, workers receive less. If nothing has to move, workers along such axes do the same work: to
    divide it would cost the gather of the results.

    Constraints on results come first (`_constraint_rank`), and with them only axes in use cut the op. With
    GT_STRATEGY=cost, the estimated time comes next: of the op on the slowest shard, and of all bytes."""
    ranks = _Ranks(rule, operands, results, mesh)
    best: tuple[tuple[float, ...], Choice] | None = None
    for strategy in strategies_of(rule, operands, results, mesh):
        best = ranks.better(best, strategy)
    assert best is not None, "an op can always run on whole operands"
    if best[1].bytes and ranks.may_save_with_idle(best[0]):
        for strategy in strategies_of(rule, operands, results, mesh, ranks.idle):
            best = ranks.better(best, strategy, least=1)
    return best[1]


@functools.cache
def _machine() -> Calibration | None:
    """The speeds by which times are estimated, as `gt.auto_shard` has them; None if bytes alone decide."""
    if read_settings().strategy != "cost":
        return None
    try:
        return stored_calibration() or Calibration()
    except SettingsError as error:
        log.warning("%s. GT_STRATEGY=cost assumes %s", error, Calibration())
        return Calibration()


class RankedChoice(NamedTuple):
    """A choice with its rank besides the bytes that it moves: the bytes that its results will cost later, and how well
    it serves constraints on the results, as in `_constraint_rank`."""

    choice: Choice
    later: int
    constraint_rank: int


def ranked_choices(
    rule: OpShardingRule, operands: Sequence[OpOperand], results: Sequence[OpResult], mesh: DeviceMesh
) -> list[RankedChoice]:
    """All strategies in the order in which `propagate_sharding` prefers them."""
    ranks = _Ranks(rule, operands, results, mesh)
    found = [ranks.ranked(strategy) for strategy in strategies_of(rule, operands, results, mesh)]
    if ranks.idle and min(found, key=lambda each: each[0])[1].choice.bytes:
        with_idle = [ranks.ranked(strategy) for strategy in strategies_of(rule, operands, results, mesh, ranks.idle)]
        found += [each for each in with_idle if each[1].choice.bytes]
    return [ranked for _, ranked in sorted(found, key=lambda each: each[0])]


class _Ranks:
    """Ranks strategies for given operands and results: the smallest rank is best."""

    def __init__(
        self, rule: OpShardingRule, operands: Sequence[OpOperand], results: Sequence[OpResult], mesh: DeviceMesh
    ) -> None:
        self._rule = rule
        self._operands = operands
        self._results = results
        self._mesh = mesh
        self._machine = _machine()
        self._cut = {axis for operand in operands if operand.spec.mesh is mesh for axis in operand.spec.axes}
        targets = [result.target for result in results if isinstance(result.target, Constraint)]
        self._constrained = {axis for target in targets for axis in target.axes}
        used = {*axes_in_use(operands, results, mesh), *(mesh.axis_names if targets else ())}
        self.idle = [axis for axis in mesh.axis_names if axis not in used and mesh.axis_size(axis) > 1]

    def better(
        self, best: tuple[tuple[float, ...], Choice] | None, strategy: OpStrategy, least: int = 0
    ) -> tuple[tuple[float, ...], Choice]:
        """The better one of a strategy and the best before, with its rank; of equals the one before. A strategy that
        moves fewer bytes than `least` is left out: if it divides the work only, its later cost is not counted."""
        begin, moved, changed = self.begin(strategy)
        if best is not None and (moved < least or (self._machine is None and begin > best[0][:3])):
            return best  # the latter saves the rest of the rank for most strategies
        rank, _ = self.complete(strategy, begin[0], moved, changed)
        return best if best is not None and best[0] <= rank else (rank, Choice(strategy, moved))

    def ranked(self, strategy: OpStrategy) -> tuple[tuple[float, ...], RankedChoice]:
        """A strategy as a choice, with its rank."""
        begin, moved, changed = self.begin(strategy)
        rank, later = self.complete(strategy, begin[0], moved, changed)
        return rank, RankedChoice(Choice(strategy, moved), later, begin[0])

    def may_save_with_idle(self, rank: tuple[float, ...]) -> bool:
        """Whether a strategy that cuts the op along idle axes may be better than one of this rank. It moves a result to
        the other workers along such an axis, now or later."""
        if self._machine is not None or not self.idle:
            return bool(self.idle)
        least = min([math.prod(result.shape) * result.itemsize for result in self._results], default=0)
        return rank[2] > least * (min(map(self._mesh.axis_size, self.idle)) - 1)

    def begin(self, strategy: OpStrategy) -> tuple[tuple[int, int, int], int, tuple[int, int]]:
        """A lower bound of the first three places of a rank, the bytes that move, and how many tensors change."""
        constrained = self._constrained
        constraint_rank = (
            _constraint_rank(strategy, self._operands, self._results, self._mesh, constrained) if constrained else 0
        )
        moved, changed = _moved(strategy, self._operands, self._results)
        return (constraint_rank, int(moved > 0), moved), moved, changed

    def complete(
        self, strategy: OpStrategy, constraint_rank: int, moved: int, changed: tuple[int, int]
    ) -> tuple[tuple[float, ...], int]:
        """The rank, and the bytes that the results will cost later."""
        pending = self._pending(strategy) if moved else []
        total = moved + sum([each.nbytes for each in pending])
        transfers = [*self._transfers(strategy), *pending] if self._mesh.hosts and total else []
        machine = self._machine
        time = (self._seconds(strategy, total, transfers, machine),) if machine is not None else ()
        between = (_bytes_between_hosts(transfers),) if self._mesh.hosts else ()
        cuts = self._unrequested_cuts(strategy)
        own = (int(moved > 0), total, *between, cuts, *changed, _memory(strategy, self._results))
        return (constraint_rank, *time, *own), total - moved

    def _seconds(
        self, strategy: OpStrategy, nbytes: int, transfers: Sequence[_Transfer], machine: Calibration
    ) -> float:
        """The time of an op, and of the bytes that move for it now and later. `transfers` are these bytes if the mesh
        has several hosts."""
        taken = zip(self._operands, strategy.operands, strict=True)
        given = zip(self._results, strategy.results, strict=True)
        tensors = [
            *[LaidOutTensor(operand.shape, operand.itemsize, spec) for operand, spec in taken],
            *[LaidOutTensor(result.shape, result.itemsize, spec) for result, spec in given],
        ]
        work = work_of(self._rule, strategy.assignment, tensors)
        if not transfers:
            return work.seconds(machine) + nbytes / self._mesh.size / machine.link_bandwidth
        return work.seconds(machine) + sum([transfer_seconds(*transfer, machine) for transfer in transfers])

    def _transfers(self, strategy: OpStrategy) -> Iterator[_Transfer]:
        """The exchanges that move operands, and results that have a target."""
        for operand, needed in zip(self._operands, strategy.operands, strict=True):
            if operand.spec is not needed and needed not in operand.copies:
                yield from _steps(operand.shape, operand.itemsize, operand.spec, needed)
        for result, given in zip(self._results, strategy.results, strict=True):
            yield from _steps(result.shape, result.itemsize, given, result.final_spec(given))

    def _free(self, strategy: OpStrategy) -> list[tuple[OpResult, ShardingSpec]]:
        """The results that have no target, and their layouts."""
        return [
            (result, result.final_spec(given))
            for result, given in zip(self._results, strategy.results, strict=True)
            if not isinstance(result.target, ShardingSpec)
        ]

    def _pending(self, strategy: OpStrategy) -> list[_Transfer]:
        """What the results will cost later: partial values will be reduced and unrequested cuts gathered; along axes
        that are not in use, reduced values will be gathered too."""
        cut, found = self._cut | self._constrained, []
        for result, given in self._free(strategy):
            undone = (*given.partial, *[axis for axis in given.axes if axis not in cut])
            copied = tuple([axis for axis in given.partial if axis in self.idle])
            for axes in (undone, copied):
                found.append(_Transfer("", axes, _pending_bytes(result, given, axes), given.mesh))
        return found

    def _unrequested_cuts(self, strategy: OpStrategy) -> int:
        """The number of cuts that no layout asked for."""
        cut = self._cut | self._constrained
        return sum(axis not in cut for _, given in self._free(strategy) for axis in given.axes)


class _Transfer(NamedTuple):
    """Bytes that all workers of a mesh together receive, in an exchange along some axes."""

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    mesh: DeviceMesh


def _steps(shape: Shape, itemsize: int, source: ShardingSpec, target: ShardingSpec) -> list[_Transfer]:
    if source is target:
        return []
    plan = plan_reshard(shape, itemsize, source, target)
    pairs = zip(plan.steps, plan.step_bytes, strict=True)
    return [_Transfer(step.kind, step.axes, nbytes, step.target.mesh) for step, nbytes in pairs if nbytes]


def _bytes_between_hosts(transfers: Sequence[_Transfer]) -> float:
    return sum([nbytes * host_share(kind, axes, mesh) for kind, axes, nbytes, mesh in transfers if nbytes])


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


def _memory(strategy: OpStrategy, results: Sequence[OpResult]) -> int:
    pairs = zip(results, strategy.results, strict=True)
    return sum(memory_bytes(given, result.shape, result.itemsize) for result, given in pairs)


def _pending_bytes(result: OpResult, given: ShardingSpec, axes: Sequence[str]) -> int:
    """The bytes that a result's layout will cost later, along axes: to reduce partial values to one worker each, or to
    gather cuts."""
    size = given.mesh.axis_size
    group = math.prod([size(axis) for axis in axes])
    copies = given.mesh.size // math.prod([size(axis) for axis in (*given.partial, *given.axes)])
    return (group - 1) * math.prod(result.shape) * result.itemsize * copies
