"""The strategies of a rule: every way to cut an op's factors by mesh axes, and the layouts that each needs and gives.

`project` translates the layouts of operands to factors, `build_strategy` an assignment of axes to factors back to
layouts. Nothing here names an op.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from gt.sharding.boxes import Cuts, Shape, balanced_cuts
from gt.sharding.constraints import Constraint, Target, satisfy
from gt.sharding.factors import MASK, REDUCE, WHOLE, Dim, Factor, OpShardingRule, PartialPassthrough
from gt.sharding.spec import DeviceMesh, DimSpec, ShardingSpec

MAX_STRATEGIES = 4096  # beyond this many only factors that some operand is already cut along are considered


class FactorSharding(NamedTuple):
    """The mesh axes that cut a factor, major to minor, and the cuts if they are not the default."""

    axes: DimSpec
    cuts: Cuts | None = None


class OpOperand(NamedTuple):
    """A tensor that an op takes, its layout, and the layouts of copies that exist of it."""

    shape: Shape
    itemsize: int
    spec: ShardingSpec
    copies: tuple[ShardingSpec, ...] = ()


class OpResult(NamedTuple):
    """A tensor that an op gives. `target`: its required layout, or how some mesh axes must cut it; None: any layout."""

    shape: Shape
    itemsize: int
    target: Target = None

    def final_spec(self, given: ShardingSpec) -> ShardingSpec:
        """The required layout of a result that the op computes in the given layout."""
        if isinstance(self.target, Constraint):
            return satisfy(self.target, given)
        return given if self.target is None else self.target


class OpStrategy(NamedTuple):
    """One way to run an op: the layouts that its operands must have, the resulting layouts of its results, and the axes
    that cut each factor."""

    operands: tuple[ShardingSpec, ...]
    results: tuple[ShardingSpec, ...]
    assignment: Mapping[str, FactorSharding]


# --- Dims to factors --------------------------------------------------------------------------------------------------


def project(rule: OpShardingRule, position: int, spec: ShardingSpec) -> dict[str, FactorSharding]:
    """The axes that cut each factor of an operand, from its layout. Axes that do not fit the factors are left out."""
    return _project_dims(rule, rule.operands[position], spec)


def project_target(rule: OpShardingRule, position: int, spec: ShardingSpec) -> dict[str, FactorSharding]:
    """The same for the required layout of a result."""
    return _project_dims(rule, rule.results[position], spec)


def _project_dims(rule: OpShardingRule, dims: Sequence[Dim], spec: ShardingSpec) -> dict[str, FactorSharding]:
    found: dict[str, FactorSharding] = {}
    for dim, axes, cuts in zip(dims, spec.dims, spec.cuts, strict=True):
        if len(dim) == 1 and axes:
            found[dim[0].factor] = FactorSharding(axes, None if dim[0].window else cuts)
        elif dim and axes:
            found.update(_project_compound(rule.factors, dim, axes, spec.mesh))
    return found


def _project_compound(
    factors: Mapping[str, Factor], dim: Dim, axes: DimSpec, mesh: DeviceMesh
) -> dict[str, FactorSharding]:
    """Give the axes of a dim to its factors, major first. A factor gets axes only if the one before is cut into shards
    of one element."""
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
    """The axes and cuts of a dim whose factors are cut as assigned; None if its shards would not be contiguous."""
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
    """A minor factor may be cut only if the factors before it are cut into shards of one element: then its shards are
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
) -> OpStrategy | None:
    """The layouts that result from an assignment of axes to factors; None if the op cannot run with it. `passing` are
    the axes along which partial values pass through the op."""
    passing = passing or {}
    if any(rule.factors[name].role == WHOLE for name in assignment):
        return None
    partial_kinds = {rule.factors[name].reduction for name in assignment if _gives_partial(rule.factors[name])}
    partial_kinds |= {passed.result_kind for passed in passing.values()}
    taken = [passed.kind for passed in passing.values()]
    if len(partial_kinds) > 1 or len(set(taken)) > 1:
        return None
    operands = []
    for position, (dims, shape) in enumerate(zip(rule.operands, operand_shapes, strict=True)):
        partial = [axis for axis, passed in passing.items() if position in passed.operands]
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
    return OpStrategy(tuple(operands), tuple(results), dict(assignment))


def _gives_partial(factor: Factor) -> bool:
    return factor.role in (REDUCE, MASK)


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


def operand_layout(
    rule: OpShardingRule,
    position: int,
    shape: Shape,
    mesh: DeviceMesh,
    assignment: Mapping[str, FactorSharding],
) -> ShardingSpec | None:
    """The layout of an operand whose factors are cut as assigned; None if its shards would not be contiguous."""
    return _spec_of(rule, rule.operands[position], shape, mesh, assignment, (), "sum")


# --- All strategies ---------------------------------------------------------------------------------------------------


def strategies_of(
    rule: OpShardingRule,
    operands: Sequence[OpOperand],
    results: Sequence[OpResult],
    mesh: DeviceMesh,
    idle: Collection[str] = (),
) -> Iterator[OpStrategy]:
    """All strategies that give each axis in use to one factor, to a passthrough of partial values, or to nothing. With
    `idle`, axes that are not in use: those strategies that give at least one of them to a factor."""
    used = {*axes_in_use(operands, results, mesh), *idle}
    projected = _projections(rule, operands, results, mesh)
    options = [_options(rule, operands, results, axis, used) for axis in mesh.axis_names]
    if math.prod([len(option) for option in options]) > MAX_STRATEGIES:
        named = {name for found in projected for name in found}
        options = [[o for o in option if not isinstance(o, str) or o in named] for option in options]
    operand_shapes = [operand.shape for operand in operands]
    result_shapes = [result.shape for result in results]
    for chosen in itertools.product(*options):
        if idle and not any(option for axis, option in zip(mesh.axis_names, chosen, strict=True) if axis in idle):
            continue
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


def axes_in_use(operands: Sequence[OpOperand], results: Sequence[OpResult], mesh: DeviceMesh) -> set[str]:
    """The axes of a mesh along which an operand, or the required layout of a result, is cut or partial."""
    targets = [result.target for result in results if result.target is not None]
    specs = [*[operand.spec for operand in operands], *targets]
    return {axis for spec in specs if spec.mesh is mesh for axis in (*spec.axes, *spec.partial)}


def _projections(
    rule: OpShardingRule, operands: Sequence[OpOperand], results: Sequence[OpResult], mesh: DeviceMesh
) -> list[dict[str, FactorSharding]]:
    """The axes that cut each factor in the layouts of operands, and in the required ones of results."""
    found = [project(rule, at, operand.spec) for at, operand in enumerate(operands) if operand.spec.mesh is mesh]
    targets = [(at, result.target) for at, result in enumerate(results) if isinstance(result.target, ShardingSpec)]
    return [*found, *[project_target(rule, at, target) for at, target in targets if target.mesh is mesh]]


def _options(
    rule: OpShardingRule, operands: Sequence[OpOperand], results: Sequence[OpResult], axis: str, used: set[str]
) -> list[str | PartialPassthrough | None]:
    if axis not in used:
        return [None]
    partial_kinds = {operand.spec.kind for operand in operands if axis in operand.spec.partial}
    passthroughs = [
        p for p in rule.passthroughs if p.kind in partial_kinds and not _blows_up(p, operands, results, axis)
    ]
    cuttable = [name for name, factor in rule.factors.items() if factor.role != WHOLE and factor.size > 0]
    return [*cuttable, *passthroughs, None]


def _blows_up(
    passed: PartialPassthrough, operands: Sequence[OpOperand], results: Sequence[OpResult], axis: str
) -> bool:
    """Whether passing partial values on costs nothing now and too much later: the largest operand's shards would become
    partial values as large as the whole, or the results are larger than the partial operands. Where a constraint
    keeps partial values, as for gradients in a scope, only sums and multiples of them pass along its axes: with another
    operand the op is that of an activation, which is reduced to the layout of the scope."""
    others = [operand for position, operand in enumerate(operands) if position not in passed.operands]
    targets = [result.target for result in results if isinstance(result.target, Constraint)]
    if any(target.keeps_partial and axis in target.axes for target in targets) and any(o.shape for o in others):
        return True
    sizes = {position: math.prod(operands[position].shape) for position in passed.operands}
    largest = max(sizes.values())
    partial = sum(size for position, size in sizes.items() if axis in operands[position].spec.partial)
    if not passed.may_grow and sum(math.prod(result.shape) for result in results) > partial:
        return True
    return any(axis in operands[position].spec.axes for position, size in sizes.items() if size == largest)


def _orders(
    rule: OpShardingRule,
    axes_of: Mapping[str, list[str]],
    projected: Sequence[Mapping[str, FactorSharding]],
    mesh: DeviceMesh,
) -> Iterator[dict[str, FactorSharding]]:
    """Assignments with the given axes per factor, for each useful order and cuts of these axes: those of the operands
    and results that have the same axes on the factor; those of one with fewer axes, the new ones as minor axes; the
    crossed cuts of two; if there are none, the order of the mesh and the default cuts."""
    alternatives: list[list[tuple[str, FactorSharding]]] = []
    for name, axes in axes_of.items():
        given = [p[name] for p in projected if name in p and set(p[name].axes) <= set(axes)]
        same = [sharding for sharding in given if len(sharding.axes) == len(axes)]
        longer = [
            FactorSharding((*s.axes, *[axis for axis in axes if axis not in s.axes]))
            for s in given
            if len(s.axes) < len(axes)
        ]
        crossed = [
            _crossed(one, other, rule.factors[name].size, mesh)
            for one, other in itertools.combinations(dict.fromkeys(given), 2)
            if sorted((*one.axes, *other.axes)) == sorted(axes)
        ]
        distinct = dict.fromkeys([*same, *longer, *crossed] or [FactorSharding(tuple(axes))])
        alternatives.append([(name, sharding) for sharding in distinct])
    for combination in itertools.product(*alternatives):
        yield dict(combination)


def _crossed(one: FactorSharding, other: FactorSharding, size: int, mesh: DeviceMesh) -> FactorSharding:
    """A factor cut in one way along some axes and in another way along other axes: each worker has the intersection of
    its two shards, which may be empty. Nothing moves."""
    cuts = [_cuts_of(sharding, size, mesh) for sharding in (one, other)]
    shared = [(max(start, low), max(min(stop, high), start, low)) for start, stop in cuts[0] for low, high in cuts[1]]
    return FactorSharding((*one.axes, *other.axes), tuple(shared))


def _cuts_of(sharding: FactorSharding, size: int, mesh: DeviceMesh) -> Cuts:
    return sharding.cuts or balanced_cuts(size, tuple([mesh.axis_size(axis) for axis in sharding.axes]))
