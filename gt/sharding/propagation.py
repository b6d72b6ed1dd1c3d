"""From the layouts of an op's inputs to the layout of the op: dims to factors, a choice, and factors back to dims.

Nothing here names an op. A rule says which factors there are; a *strategy* says which mesh axes cut which factor, and
what the operands and results look like then.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gt.sharding.constraints import Constraint, fulfil
from gt.sharding.cost import memory_bytes, reshard_bytes
from gt.sharding.factors import MASK, REDUCE, WHOLE, Dim, Factor, OpShardingRule, PartialPassthrough
from gt.sharding.program_propagation import run_hierarchical_propagation_pass as run_hierarchical_propagation_pass  # noqa: PLC0414
from gt.sharding.spec import Cuts, DeviceMesh, DimSpec, Shape, ShardingSpec, balanced_cuts

MOST_STRATEGIES = 4096  # beyond this many only factors that some operand is already cut along are considered


class FactorSharding(NamedTuple):
    """The mesh axes that cut a factor, major to minor, and where, if not at the default places."""

    axes: DimSpec
    cuts: Cuts | None = None


class Operand(NamedTuple):
    """A tensor that an op takes: what it is, how it is laid out now, and the layouts in which it is there `also`."""

    shape: Shape
    itemsize: int
    spec: ShardingSpec
    also: tuple[ShardingSpec, ...] = ()


class Result(NamedTuple):
    """A tensor that an op gives. `wish`: how it must be laid out, or how some axes of the mesh must cut it, where that
    is not free."""

    shape: Shape
    itemsize: int
    wish: ShardingSpec | Constraint | None = None

    def wanted(self, given: ShardingSpec) -> ShardingSpec:
        """How a result that is laid out as given is to be laid out in the end."""
        if isinstance(self.wish, Constraint):
            return fulfil(self.wish, given)
        return given if self.wish is None else self.wish


class Strategy(NamedTuple):
    """One way to run an op: how its operands must be laid out and how its results are then."""

    operands: tuple[ShardingSpec, ...]
    results: tuple[ShardingSpec, ...]
    assignment: Mapping[str, FactorSharding]


class Choice(NamedTuple):
    """A strategy and the bytes that have to move for it, for operands and results that are wished for."""

    strategy: Strategy
    bytes: int


# --- Dims to factors --------------------------------------------------------------------------------------------------


def project(rule: OpShardingRule, place: int, spec: ShardingSpec) -> dict[str, FactorSharding]:
    """What the layout of an operand says about the factors of its dims. What does not fit them is left out."""
    found: dict[str, FactorSharding] = {}
    for dim, axes, cuts in zip(rule.operands[place], spec.dims, spec.cuts, strict=True):
        if len(dim) == 1 and axes:
            found[dim[0].factor] = FactorSharding(axes, None if dim[0].window else cuts)
        elif dim and axes:
            found.update(_project_compound(rule.factors, dim, axes, spec.mesh))
    return found


def _project_compound(
    factors: Mapping[str, Factor], dim: Dim, axes: DimSpec, mesh: DeviceMesh
) -> dict[str, FactorSharding]:
    """Give the axes of a dim to its factors, major first: the next factor gets some when the one before is cut to
    single elements."""
    found: dict[str, FactorSharding] = {}
    remaining = list(axes)
    for ref in dim:
        size, taken, count = factors[ref.factor].size, [], 1
        while remaining and count * mesh.axis_size(remaining[0]) <= size:
            count *= mesh.axis_size(remaining[0])
            taken.append(remaining.pop(0))
        if taken:
            found[ref.factor] = FactorSharding(tuple(taken))
        if count != size:
            break
    return found


# --- Factors to dims --------------------------------------------------------------------------------------------------


def _layout_of(
    dim: Dim, factors: Mapping[str, Factor], assignment: Mapping[str, FactorSharding], mesh: DeviceMesh
) -> tuple[DimSpec, Cuts | None] | None:
    """How a dim is cut where its factors are cut as assigned; None where that is no contiguous cut."""
    cut = [ref for ref in dim if ref.factor in assignment]
    if not cut:
        return (), None
    if len(dim) > 1:
        return _layout_of_compound(dim, factors, assignment, mesh)
    (ref,) = cut
    axes, cuts = assignment[ref.factor]
    if ref.window is None:
        return axes, cuts
    domain = cuts or balanced_cuts(factors[ref.factor].size, tuple([mesh.axis_size(axis) for axis in axes]))
    shown = ref.window.cuts(domain)
    return None if shown is None else (axes, shown)


def _layout_of_compound(
    dim: Dim, factors: Mapping[str, Factor], assignment: Mapping[str, FactorSharding], mesh: DeviceMesh
) -> tuple[DimSpec, Cuts | None] | None:
    """A minor factor may be cut only where the factors before it are cut to single elements: then its shards are
    contiguous in the dim."""
    intervals: Cuts = ((0, 1),)
    all_axes: list[str] = []
    single = True
    for ref in dim:
        size = factors[ref.factor].size
        axes, cuts = assignment.get(ref.factor, FactorSharding(()))
        if axes and (not single or ref.window is not None):
            return None
        if axes:
            own = _cuts_of(FactorSharding(axes, cuts), size, mesh)
            intervals = tuple([(a * size + start, a * size + stop) for a, _ in intervals for start, stop in own])
            single = all(stop - start == 1 for start, stop in own)
        else:
            intervals = tuple([(start * size, stop * size) for start, stop in intervals])
            single = single and size == 1
        all_axes.extend(axes)
    return tuple(all_axes), intervals


def build_strategy(
    rule: OpShardingRule,
    operand_shapes: Sequence[Shape],
    result_shapes: Sequence[Shape],
    mesh: DeviceMesh,
    assignment: Mapping[str, FactorSharding],
    passing: Mapping[str, PartialPassthrough] | None = None,
) -> Strategy | None:
    """The layouts that an assignment of axes to factors means; None where the op cannot run so. `passing` names, per
    axis, the operands whose partial values pass through the op along it."""
    passing = passing or {}
    if any(rule.factors[name].kind == WHOLE for name in assignment):
        return None
    partial_kinds = {rule.factors[name].reduction for name in assignment if _gives_partial(rule.factors[name])}
    partial_kinds |= {passed.gives for passed in passing.values()}
    taken = [passed.kind for passed in passing.values()]
    if len(partial_kinds) > 1 or len(set(taken)) > 1:
        return None
    operands = []
    for place, (dims, shape) in enumerate(zip(rule.operands, operand_shapes, strict=True)):
        partial = [axis for axis, passed in passing.items() if place in passed.operands]
        spec = _spec_of(rule, dims, shape, mesh, assignment, partial, taken[0] if partial else "sum")
        if spec is None:
            return None
        operands.append(spec)
    results = []
    for dims, shape in zip(rule.results, result_shapes, strict=True):
        reduced = [axis for name, (axes, _) in assignment.items() if _is_reduced(rule, name, dims) for axis in axes]
        kind = next(iter(partial_kinds), "sum")
        spec = _spec_of(rule, dims, shape, mesh, assignment, [*reduced, *passing], kind)
        if spec is None:
            return None
        results.append(spec)
    return Strategy(tuple(operands), tuple(results), dict(assignment))


def _gives_partial(factor: Factor) -> bool:
    return factor.kind in (REDUCE, MASK)


def _is_reduced(rule: OpShardingRule, name: str, dims: tuple[Dim, ...]) -> bool:
    present = any(ref.factor == name for dim in dims for ref in dim)
    return _gives_partial(rule.factors[name]) and not present


def _spec_of(
    rule: OpShardingRule,
    dims: tuple[Dim, ...],
    shape: Shape,
    mesh: DeviceMesh,
    assignment: Mapping[str, FactorSharding],
    partial: Sequence[str],
    kind: str,
) -> ShardingSpec | None:
    layouts = [_layout_of(dim, rule.factors, assignment, mesh) for dim in dims]
    if any(layout is None for layout in layouts):
        return None
    axes = [layout[0] for layout in layouts if layout is not None]
    cuts = [layout[1] for layout in layouts if layout is not None]
    return ShardingSpec(mesh, axes, partial, kind, cuts).normal(shape)


# --- Choosing ---------------------------------------------------------------------------------------------------------


def propagate_sharding(
    rule: OpShardingRule, operands: Sequence[Operand], results: Sequence[Result], mesh: DeviceMesh
) -> Choice:
    """The cheapest way to run an op on a mesh: fewest bytes moved, then the fewest results and operands changed, then
    the least memory. A way that moves nothing is taken even if its result is partial. Where bytes move anyway, what a
    result will cost later counts too: a partial one will be reduced, and one that is cut along an axis that cuts no
    operand will be gathered, since nobody has asked for that cut. Where some axes are to cut a result in a certain way,
    the op is divided along these axes (`_constraint_rank`)."""
    projected = [
        project(rule, place, operand.spec) if operand.spec.mesh is mesh else {}
        for place, operand in enumerate(operands)
    ]
    cut = {axis for operand in operands if operand.spec.mesh is mesh for axis in operand.spec.axes}
    asked = {axis for result in results if isinstance(result.wish, Constraint) for axis in result.wish.axes}
    best: tuple[tuple[int, ...], Choice] | None = None
    for order, strategy in enumerate(_strategies(rule, operands, results, mesh, projected)):
        standing = _constraint_rank(strategy, operands, results, mesh, asked) if asked else 0
        moved, changed = _moved(strategy, operands, results)
        if best is not None and (standing, int(moved > 0), moved) > best[0][:3]:
            continue  # most are not worth looking at further
        rank = (standing, *_rank(strategy, results, moved, cut | asked), *changed, _memory(strategy, results), order)
        if best is None or rank < best[0]:
            best = (rank, Choice(strategy, moved))
    assert best is not None, "an op can always run on whole operands"
    return best[1]


def _constraint_rank(
    strategy: Strategy, operands: Sequence[Operand], results: Sequence[Result], mesh: DeviceMesh, asked: set[str]
) -> int:
    """How well a strategy serves a wish for how some axes cut the results. Best is an op that these axes divide as its
    operands lie: only its results are laid out anew, as are gradients that are reduced. Then one whose results come out
    as wished, for which operands move: the wish is carried back to them."""
    divided = {axis for sharding in strategy.assignment.values() for axis in sharding.axes}
    pairs = zip(operands, strategy.operands, strict=True)
    if asked <= divided and all(_stays(operand.spec, needed, mesh, asked) for operand, needed in pairs):
        return 0
    fulfilled = all(r.wanted(given) is given for r, given in zip(results, strategy.results, strict=True))
    return 1 if fulfilled else 2


def _stays(spec: ShardingSpec, needed: ShardingSpec, mesh: DeviceMesh, asked: set[str]) -> bool:
    """Whether an operand can be used as it lies with regard to some axes; a replicated one may be cut along them."""
    if spec.mesh is not mesh:
        return False
    return all(axis not in spec.partial or axis in needed.partial for axis in asked) and all(
        axis in needed_axes
        for axes, needed_axes in zip(spec.dims, needed.dims, strict=True)
        for axis in axes
        if axis in asked
    )


def _moved(strategy: Strategy, operands: Sequence[Operand], results: Sequence[Result]) -> tuple[int, tuple[int, int]]:
    """The bytes that a strategy moves, and how many results and operands it moves."""
    moved = operands_changed = results_changed = 0
    for operand, needed in zip(operands, strategy.operands, strict=True):
        if operand.spec is not needed and needed not in operand.also:
            moved += reshard_bytes(operand.shape, operand.itemsize, operand.spec, needed)
            operands_changed += 1
    for result, given in zip(results, strategy.results, strict=True):
        wanted = result.wanted(given)
        if wanted is not given:
            moved += reshard_bytes(result.shape, result.itemsize, given, wanted)
            results_changed += 1
    return moved, (results_changed, operands_changed)


def _rank(strategy: Strategy, results: Sequence[Result], moved: int, cut: set[str]) -> tuple[int, int, int]:
    """Whether bytes move, how many now and later, and cuts that nobody asked for."""
    free = [
        (result, result.wanted(given))
        for result, given in zip(results, strategy.results, strict=True)
        if not isinstance(result.wish, ShardingSpec)
    ]
    pending = sum(_pending(result, given, cut) for result, given in free) if moved else 0
    unasked = sum(axis not in cut for _, given in free for axis in given.axes)
    return int(moved > 0), moved + pending, unasked


def _memory(strategy: Strategy, results: Sequence[Result]) -> int:
    pairs = zip(results, strategy.results, strict=True)
    return sum(memory_bytes(given, result.shape, result.itemsize) for result, given in pairs)


def _pending(result: Result, given: ShardingSpec, cut: set[str]) -> int:
    """The bytes that the layout of a result will cost: to reduce it, and to gather it where nobody asked for a cut."""
    size = given.mesh.axis_size
    asked_for_nowhere = [axis for axis in given.axes if axis not in cut]
    group = math.prod([size(axis) for axis in (*given.partial, *asked_for_nowhere)])
    copies = given.mesh.size // math.prod([size(axis) for axis in (*given.partial, *given.axes)])
    return (group - 1) * math.prod(result.shape) * result.itemsize * copies


def _strategies(
    rule: OpShardingRule,
    operands: Sequence[Operand],
    results: Sequence[Result],
    mesh: DeviceMesh,
    projected: Sequence[Mapping[str, FactorSharding]],
) -> Iterator[Strategy]:
    """Every way to give each axis that is in use to one factor, to partial values that pass, or to nothing."""
    used = _axes_in_use(operands, results, mesh)
    options = [_options(rule, operands, results, axis, used) for axis in mesh.axis_names]
    if math.prod([len(option) for option in options]) > MOST_STRATEGIES:
        named = {name for found in projected for name in found}
        options = [[o for o in option if not isinstance(o, str) or o in named] for option in options]
    operand_shapes = [operand.shape for operand in operands]
    result_shapes = [result.shape for result in results]
    for chosen in itertools.product(*options):
        axes_of: dict[str, list[str]] = {}
        passing: dict[str, PartialPassthrough] = {}
        for axis, option in zip(mesh.axis_names, chosen, strict=True):
            if isinstance(option, str):
                axes_of.setdefault(option, []).append(axis)
            elif option is not None:
                passing[axis] = option
        for assignment in _orders(rule, axes_of, projected, mesh):
            strategy = build_strategy(rule, operand_shapes, result_shapes, mesh, assignment, passing)
            if strategy is not None:
                yield strategy


def _axes_in_use(operands: Sequence[Operand], results: Sequence[Result], mesh: DeviceMesh) -> set[str]:
    specs = [*[operand.spec for operand in operands], *[result.wish for result in results if result.wish is not None]]
    return {axis for spec in specs if spec.mesh is mesh for axis in (*spec.axes, *spec.partial)}


def _options(
    rule: OpShardingRule, operands: Sequence[Operand], results: Sequence[Result], axis: str, used: set[str]
) -> list[str | PartialPassthrough | None]:
    if axis not in used:
        return [None]
    partial_kinds = {operand.spec.kind for operand in operands if axis in operand.spec.partial}
    passes = [p for p in rule.passes if p.kind in partial_kinds and not _blows_up(p, operands, results, axis)]
    cuttable = [name for name, factor in rule.factors.items() if factor.kind != WHOLE and factor.size > 0]
    return [*cuttable, *passes, None]


def _blows_up(passed: PartialPassthrough, operands: Sequence[Operand], results: Sequence[Result], axis: str) -> bool:
    """Whether passing partial values on costs nothing now and too much later: they would be made of shards of the
    largest operand, each as large as the whole, or the results are larger than what is partial."""
    sizes = {place: math.prod(operands[place].shape) for place in passed.operands}
    largest = max(sizes.values())
    partial = sum(size for place, size in sizes.items() if axis in operands[place].spec.partial)
    if not passed.growing and sum(math.prod(result.shape) for result in results) > partial:
        return True
    return any(axis in operands[place].spec.axes for place, size in sizes.items() if size == largest)


def _orders(
    rule: OpShardingRule,
    axes_of: Mapping[str, list[str]],
    projected: Sequence[Mapping[str, FactorSharding]],
    mesh: DeviceMesh,
) -> Iterator[dict[str, FactorSharding]]:
    """Where a factor gets the axes that some operand has on it already, that operand's order and cuts are used, one
    alternative for each. Where it gets more, the new ones are minor, or the cuts of two operands are crossed.
    Otherwise the order of the mesh and the default cuts."""
    alternatives: list[list[tuple[str, FactorSharding]]] = []
    for name, axes in axes_of.items():
        there = [p[name] for p in projected if name in p and set(p[name].axes) <= set(axes)]
        same = [sharding for sharding in there if len(sharding.axes) == len(axes)]
        longer = [FactorSharding((*s.axes, *[axis for axis in axes if axis not in s.axes])) for s in there]
        crossed = [
            _crossed(one, other, rule.factors[name].size, mesh)
            for one, other in itertools.combinations(dict.fromkeys(there), 2)
            if sorted((*one.axes, *other.axes)) == sorted(axes)
        ]
        distinct = dict.fromkeys(same or [*longer, *crossed] or [FactorSharding(tuple(axes))])
        alternatives.append([(name, sharding) for sharding in distinct])
    for combination in itertools.product(*alternatives):
        yield dict(combination)


def _crossed(one: FactorSharding, other: FactorSharding, size: int, mesh: DeviceMesh) -> FactorSharding:
    """A factor cut in one way along some axes and in another along others: each worker has what both of its shards
    share. Nothing moves for it, but some workers may have nothing."""
    cuts = [_cuts_of(sharding, size, mesh) for sharding in (one, other)]
    shared = [(max(start, low), max(min(stop, high), start, low)) for start, stop in cuts[0] for low, high in cuts[1]]
    return FactorSharding((*one.axes, *other.axes), tuple(shared))


def _cuts_of(sharding: FactorSharding, size: int, mesh: DeviceMesh) -> Cuts:
    return sharding.cuts or balanced_cuts(size, tuple([mesh.axis_size(axis) for axis in sharding.axes]))
