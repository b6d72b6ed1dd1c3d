"""The cheapest route from one layout of a tensor to another.

A route is a list of specs. Each is made from the one before by one of three kinds of hop:

* a move: every worker pulls the elements that it lacks, each from one holder. No scheme can move fewer;
* a reduction along partial axes: every worker pulls all addends of its part; an all-reduce if nothing else changes;
* a relabelling as partial values: every worker keeps some of its own elements and fills the rest with the identity of
  the reduction. Moves nothing.

For a replicated target, each element is first reduced on one owner and then copied. Costs are elements that workers
receive from other workers; those that they receive from another host count twice. So the workers of a host divide a
reduction between hosts: they reduce or cut the values among themselves, reduce their parts with other hosts, and
gather them. That moves as many elements in all. It is not one collective, so it does not overlap with backward. An axis
that is partly within hosts, such as the only one of a row of workers, is not divided: its ring, in the order of hosts,
passes each link between them once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

from gt.sharding.boxes import Cuts, Shape, balanced_cuts, total_length
from gt.sharding.hop_traffic import (
    StepKind,
    changed_axes,
    group_size,
    is_all_reduce,
    kept_elements,
    moved_elements,
    positions_in,
    reduced_axes,
    stored_elements,
    worker_boxes,
)
from gt.sharding.host_order import host_share
from gt.sharding.spec import DeviceMesh, DimSpec, ShardingSpec

IDEMPOTENT = ("max", "min", "and", "or")
"""Reductions in which a value may occur several times: replicas are partial values without change."""

DIVIDED_FROM = 1 << 14
"""Elements from which the workers of a host divide a reduction between hosts: of fewer, messages take longer than the
bytes that this saves."""


class Route(NamedTuple):
    """The layouts of a route, both ends included, and the elements received in each hop. A single spec: nothing has to
    be done.

    The ends are normalized: axes of size one are left out, and a source mesh that differs from the target's in its axis
    names only is replaced by the target's."""

    specs: tuple[ShardingSpec, ...]
    received: tuple[int, ...]


@functools.lru_cache(maxsize=1 << 14)
def cheapest_route(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> Route:
    target = _plain(target, shape)
    source = _renamed(_plain(source, shape), target.mesh)
    if not source.partial and not target.partial:
        moved = moved_elements(shape, source, target)
        is_done = source is target or (not moved and _holds_exactly(shape, source, target))
        return Route((target,), ()) if is_done else Route((source, target), (moved,))
    if source is target or _is_relabelled(source, target):
        return Route((target,), ())
    return _cheapest_reduction(shape, source, target)


def _cheapest_reduction(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> Route:
    """The route with the lowest cost; of equal ones, the fewest hops."""
    best: tuple[float, int, Route] | None = None
    floor = _cost_floor(shape, source, target)
    for specs in _candidates(shape, source, target):
        counts = tuple([moved_elements(shape, *hop) for hop in pairwise(specs)])
        cost = sum(counts) + _between_hosts(specs, counts)
        if best is None or (cost, len(counts)) < best[:2]:
            best = cost, len(counts), Route(specs, counts)
        if best[0] <= floor:
            break
    assert best is not None, f"no route from {source!r} to {target!r}"
    return best[2]


def _between_hosts(specs: Sequence[ShardingSpec], counts: Sequence[int]) -> float:
    """The elements that travel between hosts, if the route is on one mesh."""
    if not specs[0].mesh.hosts or any(spec.mesh is not specs[0].mesh for spec in specs):
        return 0.0
    shares = [host_share(_kind(*hop), _hop_axes(*hop), hop[1].mesh) for hop in pairwise(specs)]
    return sum([share * count for share, count in zip(shares, counts, strict=True)])


def _hop_axes(source: ShardingSpec, target: ShardingSpec) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*reduced_axes(source, target), *changed_axes(source, target))))


def _kind(source: ShardingSpec, target: ShardingSpec) -> StepKind:
    """The name of a hop, as far as it says which workers give what."""
    if reduced_axes(source, target):
        return "all-reduce" if is_all_reduce(source, target) else "reduce-scatter"
    is_gathered = all(before[: len(after)] == after for before, after in zip(source.dims, target.dims, strict=True))
    return "all-gather" if is_gathered else "all-to-all"


def _plain(spec: ShardingSpec, shape: Shape) -> ShardingSpec:
    """The same layout without default cuts and without axes of size one, unless these have a window of a dim."""
    spec = spec.normal(shape)
    if 1 not in spec.mesh.shape:
        return spec
    large = {axis for axis, size in zip(spec.mesh.axis_names, spec.mesh.shape, strict=True) if size > 1}
    dims = [
        axes if cuts and large.isdisjoint(axes) else [axis for axis in axes if axis in large]
        for axes, cuts in zip(spec.dims, spec.cuts, strict=True)
    ]
    return spec.replace(dims=dims, partial=[axis for axis in spec.partial if axis in large])


def _renamed(spec: ShardingSpec, mesh: DeviceMesh) -> ShardingSpec:
    """The same layout on another mesh, if that differs in axis names only."""
    if spec.mesh is mesh or spec.mesh.workers != mesh.workers:
        return spec
    mine, others = [[axis for axis in m.axis_names if m.axis_size(axis) > 1] for m in (spec.mesh, mesh)]
    if list(map(spec.mesh.axis_size, mine)) != list(map(mesh.axis_size, others)):
        return spec
    name = dict(zip(mine, others, strict=True))
    dims = [[name[axis] for axis in axes] for axes in spec.dims]
    return spec.replace(mesh=mesh, dims=dims, partial=[name[axis] for axis in spec.partial])


def _holds_exactly(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> bool:
    """Whether every worker that holds its part of the target holds nothing else."""
    if source.mesh is target.mesh and stored_elements(shape, source) != stored_elements(shape, target):
        return False
    at = positions_in(target.mesh, source.mesh)
    held, needed = worker_boxes(source, shape), worker_boxes(target, shape)
    is_equal = held.stops[:, at] - held.starts[:, at] == needed.stops - needed.starts
    return bool((is_equal & (at >= 0)).all())


def _is_relabelled(source: ShardingSpec, target: ShardingSpec) -> bool:
    """Whether the hop only calls replicas partial values, of an idempotent reduction."""
    if target.kind not in IDEMPOTENT or not {*source.partial} <= {*target.partial}:
        return False
    return source is target.replace(partial=source.partial)


def _candidates(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> Iterator[tuple[ShardingSpec, ...]]:
    for stays in _staying_partial(source, target):
        for goal in _goals(shape, source, target, stays):
            end = () if goal is target else (target,)
            if goal is source:
                yield (source, *end)
                continue
            yield (source, goal, *end)
            if source.partial != stays:
                for through in _divided_by_hosts(shape, source, goal):
                    yield (source, *through, goal, *end)
                for between in _intermediates(shape, source, goal):
                    if between is not source and between is not goal:
                        yield (source, between, goal, *end)


def _divided_by_hosts(
    shape: Shape, source: ShardingSpec, goal: ShardingSpec
) -> Iterator[tuple[ShardingSpec, ShardingSpec]]:
    """The two layouts on the way to a goal if the workers of each host divide an all-reduce between hosts: cut by axes
    within hosts and still partial along the others, and reduced."""
    mesh = goal.mesh
    if not mesh.hosts or math.prod(shape) < DIVIDED_FROM or not is_all_reduce(source, goal):
        return
    within = tuple([axis for axis in _unused_axes(goal) if mesh.axis_size(axis) > 1 and not mesh.crosses_hosts(axis)])
    partial = [axis for axis in source.partial if axis not in within]
    if within and any(mesh.crosses_hosts(axis) for axis in reduced_axes(source, goal)):
        for cut in _refined(shape, goal, within, source):
            yield cut.replace(partial=partial, kind=source.kind), cut


def _intermediates(shape: Shape, source: ShardingSpec, goal: ShardingSpec) -> Iterator[ShardingSpec]:
    """Layouts between a partial source and a replicated goal: cut as the goal and still partial, which all-reduces the
    needed elements only; or with one owner for each element."""
    if stored_elements(shape, goal) == _distinct_elements(shape, goal) * group_size(goal.mesh, goal.partial):
        return
    if source.mesh is goal.mesh and not {*source.partial} & {*goal.axes}:
        yield ShardingSpec(goal.mesh, goal.dims, source.partial, source.kind, goal.cuts)
    yield from _refined(shape, _without_overlaps(shape, goal, source), _unused_axes(goal), source)
    reduced = ShardingSpec(source.mesh, source.dims, goal.partial, goal.kind, source.cuts)
    yield from _refined(shape, reduced, _unused_axes(reduced), goal)


def _staying_partial(source: ShardingSpec, target: ShardingSpec) -> list[tuple[str, ...]]:
    """Alternatives for the axes that stay partial on the route, the most axes first. If more changes than partial axes
    do, reducing some of them may be cheaper, since the value is then copied instead of its addends."""
    shared = [axis for axis in source.partial if axis in target.partial]
    if source.mesh is not target.mesh or source.kind != target.kind:
        return [()]
    return [stays for count in range(len(shared), -1, -1) for stays in itertools.combinations(shared, count)]


def _goals(shape: Shape, source: ShardingSpec, target: ShardingSpec, stays: tuple[str, ...]) -> Iterator[ShardingSpec]:
    """Layouts from which the target is at most a relabelling away."""
    new = tuple([axis for axis in target.partial if axis not in stays])
    if not new:
        yield target
        return
    if source.partial == stays and _relabels(shape, source, target, new):
        yield source
    yield from _refined(shape, target.replace(partial=stays), new, source)


def _relabels(shape: Shape, source: ShardingSpec, target: ShardingSpec, new: tuple[str, ...]) -> bool:
    """Whether the source's elements fill the target along its new partial axes, if one of each set of replicas keeps
    its elements."""
    if source.mesh is not target.mesh:
        return False
    cutting = [axis for axis in new if axis in source.axes]
    return kept_elements(shape, source, target) * group_size(source.mesh, cutting) == stored_elements(shape, target)


def _unused_axes(spec: ShardingSpec) -> tuple[str, ...]:
    used = {*spec.axes, *spec.partial}
    return tuple([axis for axis in spec.mesh.axis_names if axis not in used])


def _distinct_elements(shape: Shape, spec: ShardingSpec) -> int:
    """The number of elements of the tensor that some worker stores: windows may overlap, or skip elements."""
    lengths = [total_length(_disjoint(cuts)) if cuts else size for cuts, size in zip(spec.cuts, shape, strict=True)]
    return math.prod(lengths)


def _cost_floor(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> int:
    """A cost at which the search can stop: all addends but one for each element, and one element for each copy but the
    first."""
    if not source.partial:
        return 0
    bounds = []
    for stays in _staying_partial(source, target):
        distinct = group_size(target.mesh, stays) * _distinct_elements(shape, target)
        new = [axis for axis in target.partial if axis not in stays]
        addends = group_size(source.mesh, source.partial) // group_size(target.mesh, stays)
        stored = stored_elements(shape, target) // group_size(target.mesh, new)
        bounds.append((addends - 1) * distinct + stored - distinct)
    return min(bounds)


# --- One owner for each element ---------------------------------------------------------------------------------------


def _refined(shape: Shape, base: ShardingSpec, axes: tuple[str, ...], like: ShardingSpec) -> Iterator[ShardingSpec]:
    """Layouts that cut `base` further by `axes`: as `like` is cut if possible. The remaining axes cut one dim, the
    longest tried first."""
    if not shape:
        yield base if like.mesh is base.mesh else base.replace(mesh=base.mesh.submesh(**dict.fromkeys(axes, 0)))
        return
    dims, cuts = list(base.dims), list(base.cuts)
    left = axes
    for dim in range(len(shape)):
        more, cuts[dim] = _aligned(shape, base, left, like, dim)
        dims[dim] += more
        left = tuple([axis for axis in left if axis not in more])
    counts = tuple([base.mesh.axis_size(axis) for axis in left])
    sizes = [size // group_size(base.mesh, cutting) for size, cutting in zip(shape, dims, strict=True)]
    for dim in sorted(range(len(shape)), key=lambda dim: -sizes[dim]) if left else [0]:
        finer = (*dims[:dim], dims[dim] + left, *dims[dim + 1 :])
        finer_cuts = (*cuts[:dim], _split(cuts[dim], counts), *cuts[dim + 1 :])
        yield ShardingSpec(base.mesh, finer, base.partial, base.kind, finer_cuts).normal(shape)


def _aligned(
    shape: Shape, base: ShardingSpec, left: tuple[str, ...], like: ShardingSpec, dim: int
) -> tuple[DimSpec, Cuts | None]:
    """The axes by which `like` cuts a dim further than `base`, and the resulting intervals."""
    mine, theirs = base.dims[dim], like.dims[dim] if like.mesh is base.mesh else ()
    more: DimSpec = ()
    if theirs[: len(mine)] == mine:
        more = tuple(takewhile(left.__contains__, theirs[len(mine) :]))
    if not more or (base.cuts[dim] is None and like.cuts[dim] is None):
        return more, base.cuts[dim]
    if mine + more == theirs:
        coarse = base.intervals(shape, dim)
        nested = _nested(coarse, like.intervals(shape, dim))
        if total_length(nested) == total_length(coarse):
            return more, nested
    return (), base.cuts[dim]


def _without_overlaps(shape: Shape, spec: ShardingSpec, like: ShardingSpec) -> ShardingSpec:
    """The layout with its windows made disjoint: each element is left to the worker that has it in `like` if possible,
    which drops halos."""
    if not any(spec.cuts):
        return spec
    cuts = list(spec.cuts)
    for dim, windows in enumerate(cuts):
        if windows is not None:
            cuts[dim] = _disjoint(windows)
            if like.mesh is spec.mesh and like.dims[dim] == spec.dims[dim]:
                kept = _nested(windows, like.intervals(shape, dim))
                if total_length(kept) == total_length(_disjoint(windows)):
                    cuts[dim] = kept
    return spec.replace(cuts=cuts).normal(shape)


def _nested(coarse: Cuts, fine: Cuts) -> Cuts:
    """The intersections of each coarse interval with its share of the fine ones, the same number for each."""
    count = len(fine) // len(coarse)
    parents = [parent for parent in coarse for _ in range(count)]
    shared = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(parents, fine, strict=True)]
    return tuple([(start, max(start, stop)) for start, stop in shared])


def _disjoint(cuts: Cuts) -> Cuts:
    """The intervals with each element left to the first interval that contains it."""
    reached = 0
    found = list(cuts)
    for position in sorted(range(len(cuts)), key=cuts.__getitem__):
        start = max(cuts[position][0], reached)
        reached = max(start, cuts[position][1])
        found[position] = (start, reached)
    return tuple(found)


def _split(cuts: Cuts | None, counts: tuple[int, ...]) -> Cuts | None:
    """Every interval cut by the default rule; None, which means default cuts, stays None."""
    if cuts is None:
        return None
    return tuple([(start + a, start + b) for start, stop in cuts for a, b in balanced_cuts(stop - start, counts)])
