"""The cheapest way to lay a tensor out anew.

A way is a list of specs, each made from the one before by one of three kinds of hop:

* a move: every worker pulls what it lacks, each element from one holder. No scheme can move less;
* a reduction along some of the partial axes: every worker pulls all addends of its part, or, where the layout stays as
  it is, an all-reduce;
* a relabelling as partial: every worker keeps some of its own elements and fills up with the identity. Free.

What is replicated in the end is reduced to one owner for each element first, and copied afterwards. Everything is
counted in elements that a worker receives from another one; its own are free.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise, takewhile
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gt.sharding.spec import Cuts, DeviceMesh, DimSpec, Shape, ShardingSpec, balanced_cuts

IntArray: TypeAlias = NDArray[np.int64]

IDEMPOTENT = ("max", "min", "and", "or")
"""Reductions under which a value may be repeated: replicas are partial values as they are."""


# --- Counting one hop -------------------------------------------------------------------------------------------------


class Boxes(NamedTuple):
    """The parts that the workers of a mesh hold, in the order of the mesh."""

    starts: IntArray  # (dims, workers)
    stops: IntArray  # (dims, workers)
    sizes: IntArray  # (workers,)


@functools.lru_cache(maxsize=8192)
def boxes(spec: ShardingSpec, shape: Shape) -> Boxes:
    edges = np.empty((2, len(shape), spec.mesh.size), np.int64)
    for dim, axes in enumerate(spec.dims):
        if axes:
            known = _edges(spec.intervals(shape, dim))
            edges[:, dim] = known.take(shard_numbers(spec.mesh, axes), axis=1)
        else:
            edges[0, dim], edges[1, dim] = 0, shape[dim]
    return Boxes(edges[0], edges[1], np.multiply.reduce(edges[1] - edges[0]))


@functools.lru_cache(maxsize=8192)
def _edges(cuts: Cuts) -> IntArray:
    return np.fromiter(chain.from_iterable(cuts), np.int64, 2 * len(cuts)).reshape(-1, 2).T


@functools.lru_cache(maxsize=4096)
def shard_numbers(mesh: DeviceMesh, axes: DimSpec) -> IntArray:
    """For every worker of a mesh, the number of its shard of a dim that `axes` cut."""
    numbers = np.zeros(mesh.shape, np.int64)
    for axis in axes:
        along = [1] * len(mesh.shape)
        along[mesh.axis_names.index(axis)] = mesh.axis_size(axis)
        numbers = numbers * mesh.axis_size(axis) + np.arange(mesh.axis_size(axis)).reshape(along)
    return numbers.ravel()


@functools.lru_cache(maxsize=4096)
def places(mesh: DeviceMesh, other: DeviceMesh) -> IntArray:
    """For every worker of a mesh, its place in another one; -1 where it has none."""
    known = {worker: place for place, worker in enumerate(other.workers)}
    return np.array([known.get(worker, -1) for worker in mesh.workers], np.int64)


def group_size(mesh: DeviceMesh, axes: Sequence[str]) -> int:
    return math.prod([mesh.axis_size(axis) for axis in axes])


def reduced_axes(source: ShardingSpec, target: ShardingSpec) -> tuple[str, ...]:
    """The axes along which a hop reduces."""
    return tuple([axis for axis in source.partial if axis not in target.partial])


def new_partial_axes(source: ShardingSpec, target: ShardingSpec) -> tuple[str, ...]:
    """The axes along which a hop relabels."""
    return tuple([axis for axis in target.partial if axis not in source.partial])


def is_all_reduce(source: ShardingSpec, target: ShardingSpec) -> bool:
    """Whether a reduction leaves the layout as it is."""
    return source.mesh is target.mesh and source.dims == target.dims and source.cuts == target.cuts


def received(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> IntArray:
    """The elements that every worker of the target receives in one hop, (workers,)."""
    sizes = boxes(target, shape).sizes
    if new_partial_axes(source, target):
        return np.zeros_like(sizes)
    axes = reduced_axes(source, target)
    addends = group_size(source.mesh, axes)
    if not axes or not is_all_reduce(source, target):
        return addends * sizes - _own(shape, source, target)
    share, more = np.divmod(sizes, addends)
    segments = share + (shard_numbers(source.mesh, axes) < more)
    return (addends - 1) * segments + sizes - segments


def _own(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> IntArray:
    """How much of its part of the target every worker of it holds already, (workers,)."""
    held, needed = boxes(source, shape), boxes(target, shape)
    starts, stops = held.starts, held.stops
    is_same = source.mesh.workers == target.mesh.workers
    if not is_same:
        at = places(target.mesh, source.mesh)
        starts, stops = starts[:, at], stops[:, at]
    shared = np.minimum(stops, needed.stops) - np.maximum(starts, needed.starts)
    own: IntArray = np.multiply.reduce(np.maximum(shared, 0))
    return own if is_same else own * (at >= 0)


def _moved(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> int:
    """`received` by all workers together, in a tenth of the time where that is possible."""
    if new_partial_axes(source, target):
        return 0
    axes = reduced_axes(source, target)
    addends = group_size(source.mesh, axes)
    if axes and is_all_reduce(source, target):
        return 2 * (addends - 1) * (_stored(shape, target) // addends)
    return addends * _stored(shape, target) - _kept(shape, source, target)


@functools.lru_cache(maxsize=65536)
def _stored(shape: Shape, spec: ShardingSpec) -> int:
    """The elements that all workers together hold."""
    lengths = [_length(cuts) if cuts else size for size, cuts in zip(shape, spec.cuts, strict=True)]
    return math.prod(lengths) * (spec.mesh.size // group_size(spec.mesh, spec.axes))


def _kept(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> int:
    """The elements of the target that all workers together hold already."""
    axes = _nesting(source, target)
    if axes is None:
        return int(np.add.reduce(_own(shape, source, target)))
    return math.prod(shape) * (source.mesh.size // group_size(source.mesh, axes))


def _nesting(source: ShardingSpec, target: ShardingSpec) -> list[str] | None:
    """Where for every dim the shards of one side are parts of the other's: the axes of the finer ones. What workers
    hold of both sides is then what they hold of the finer one, which has each element once along these axes."""
    if source.mesh is not target.mesh or any(source.cuts) or any(target.cuts):
        return None
    axes: list[str] = []
    for mine, theirs in zip(source.dims, target.dims, strict=True):
        coarse, fine = (mine, theirs) if len(mine) < len(theirs) else (theirs, mine)
        if fine[: len(coarse)] != coarse:
            return None
        axes += fine
    return axes if len(set(axes)) == len(axes) else None


# --- The cheapest route -----------------------------------------------------------------------------------------------


class Route(NamedTuple):
    """The layouts on the way, both ends included, and the elements received by each hop between them. The ends are
    the layouts asked for, if in other words: axes of size one are left out, and a mesh that is the target's with other
    axis names is named as the target's. A single spec: nothing has to be done."""

    specs: tuple[ShardingSpec, ...]
    received: tuple[int, ...]


@functools.lru_cache(maxsize=65536)
def cheapest_route(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> Route:
    target = _plain(target, shape)
    source = _renamed(_plain(source, shape), target.mesh)
    if not source.partial and not target.partial:
        moved = _moved(shape, source, target)
        is_there = source is target or (not moved and _holds_exactly(shape, source, target))
        return Route((target,), ()) if is_there else Route((source, target), (moved,))
    if source is target or _is_relabelled(source, target):
        return Route((target,), ())
    return _cheapest_reduction(shape, source, target)


def _cheapest_reduction(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> Route:
    """Fewest elements, then fewest hops, then the first."""
    best: Route | None = None
    floor = _fewest(shape, source, target)
    for specs in _routes(shape, source, target):
        counts = tuple([_moved(shape, *hop) for hop in pairwise(specs)])
        if best is None or (sum(counts), len(counts)) < (sum(best.received), len(best.received)):
            best = Route(specs, counts)
        if sum(best.received) <= floor:
            break
    assert best is not None, f"no way from {source!r} to {target!r}"
    return best


def _plain(spec: ShardingSpec, shape: Shape) -> ShardingSpec:
    """The same layout without cuts that are the default and without axes of size one, unless they hold a window."""
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
    """The same layout in terms of another mesh, where that differs in names only."""
    if spec.mesh is mesh or spec.mesh.workers != mesh.workers:
        return spec
    mine, others = [[axis for axis in m.axis_names if m.axis_size(axis) > 1] for m in (spec.mesh, mesh)]
    if list(map(spec.mesh.axis_size, mine)) != list(map(mesh.axis_size, others)):
        return spec
    name = dict(zip(mine, others, strict=True))
    dims = [[name[axis] for axis in axes] for axes in spec.dims]
    return spec.replace(mesh=mesh, dims=dims, partial=[name[axis] for axis in spec.partial])


def _holds_exactly(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> bool:
    """Whether every worker of the target holds its part and nothing else, given that it holds it."""
    if source.mesh is target.mesh and _stored(shape, source) != _stored(shape, target):
        return False
    at = places(target.mesh, source.mesh)
    held, needed = boxes(source, shape), boxes(target, shape)
    is_equal = held.stops[:, at] - held.starts[:, at] == needed.stops - needed.starts
    return bool((is_equal & (at >= 0)).all())


def _is_relabelled(source: ShardingSpec, target: ShardingSpec) -> bool:
    """Whether replicas become partial values of a reduction that does not mind."""
    if target.kind not in IDEMPOTENT or not {*source.partial} <= {*target.partial}:
        return False
    return source is target.replace(partial=source.partial)


def _routes(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> Iterator[tuple[ShardingSpec, ...]]:
    for stays in _staying(source, target):
        for goal in _goals(shape, source, target, stays):
            end = () if goal is target else (target,)
            if goal is source:
                yield (source, *end)
                continue
            yield (source, goal, *end)
            if source.partial != stays:
                for between in _stations(shape, source, goal):
                    if between is not source and between is not goal:
                        yield (source, between, goal, *end)


def _stations(shape: Shape, source: ShardingSpec, goal: ShardingSpec) -> Iterator[ShardingSpec]:
    """Layouts on the way from a partial source to a goal that has copies: cut as the goal but partial still, for an
    all-reduce of what is needed only; or with one owner for each element."""
    if _stored(shape, goal) == _needed(shape, goal) * group_size(goal.mesh, goal.partial):
        return
    if source.mesh is goal.mesh and not {*source.partial} & {*goal.axes}:
        yield ShardingSpec(goal.mesh, goal.dims, source.partial, source.kind, goal.cuts)
    yield from _refined(shape, _without_overlaps(shape, goal, source), _free(goal), source)
    reduced = ShardingSpec(source.mesh, source.dims, goal.partial, goal.kind, source.cuts)
    yield from _refined(shape, reduced, _free(reduced), goal)


def _staying(source: ShardingSpec, target: ShardingSpec) -> list[tuple[str, ...]]:
    """The partial axes that are left alone on the way. Where the rest of the layout changes as well, reducing them all
    the same may be cheaper: the value is then copied in place of all its addends."""
    shared = tuple([axis for axis in source.partial if axis in target.partial])
    if not shared or source.mesh is not target.mesh or source.kind != target.kind:
        return [()]
    return [shared] if shared == target.partial != source.partial else [shared, ()]


def _goals(shape: Shape, source: ShardingSpec, target: ShardingSpec, stays: tuple[str, ...]) -> Iterator[ShardingSpec]:
    """What to make from the source, so that at most a relabelling is left to be done."""
    new = tuple([axis for axis in target.partial if axis not in stays])
    if not new:
        yield target
        return
    if source.partial == stays and _relabels(shape, source, target, new):
        yield source
    yield from _refined(shape, target.replace(partial=stays), new, source)


def _relabels(shape: Shape, source: ShardingSpec, target: ShardingSpec, new: tuple[str, ...]) -> bool:
    """Whether what the workers hold is enough to fill the target along its new partial axes, one of each set of
    replicas keeping its elements."""
    if source.mesh is not target.mesh:
        return False
    cutting = [axis for axis in new if axis in source.axes]
    return _kept(shape, source, target) * group_size(source.mesh, cutting) == _stored(shape, target)


def _free(spec: ShardingSpec) -> tuple[str, ...]:
    used = {*spec.axes, *spec.partial}
    return tuple([axis for axis in spec.mesh.axis_names if axis not in used])


def _needed(shape: Shape, spec: ShardingSpec) -> int:
    """How many elements of the tensor a spec stores at all: windows may overlap, and leave out some."""
    return math.prod([_length(_disjoint(cuts)) if cuts else size for cuts, size in zip(spec.cuts, shape, strict=True)])


def _fewest(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> int:
    """A bound to stop the search at: addends but one for each element, then one element for each further copy."""
    if not source.partial:
        return 0
    bounds = []
    for stays in _staying(source, target):
        fibres = group_size(target.mesh, stays) * _needed(shape, target)
        new = [axis for axis in target.partial if axis not in stays]
        addends = group_size(source.mesh, source.partial) // group_size(target.mesh, stays)
        stored = _stored(shape, target) // group_size(target.mesh, new)
        bounds.append((addends - 1) * fibres + stored - fibres)
    return min(bounds)


# --- One owner for each element ---------------------------------------------------------------------------------------


def _refined(shape: Shape, base: ShardingSpec, axes: tuple[str, ...], like: ShardingSpec) -> Iterator[ShardingSpec]:
    """Ways to cut the parts of a layout further by `axes`: where possible as `like` is cut; the axes that remain cut
    any one dim, the longest first."""
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
    """The axes by which `like` cuts a dim further than `base` does, and the intervals that follow."""
    mine, theirs = base.dims[dim], like.dims[dim] if like.mesh is base.mesh else ()
    more: DimSpec = ()
    if theirs[: len(mine)] == mine:
        more = tuple(takewhile(left.__contains__, theirs[len(mine) :]))
    if not more or (base.cuts[dim] is None and like.cuts[dim] is None):
        return more, base.cuts[dim]
    if mine + more == theirs:
        coarse = base.intervals(shape, dim)
        nested = _nested(coarse, like.intervals(shape, dim))
        if _length(nested) == _length(coarse):
            return more, nested
    return (), base.cuts[dim]


def _without_overlaps(shape: Shape, spec: ShardingSpec, like: ShardingSpec) -> ShardingSpec:
    """The layout with windows made smaller, so that each element has one owner: where possible the one that has it in
    `like`, which is how a halo is left out."""
    if not any(spec.cuts):
        return spec
    cuts = list(spec.cuts)
    for dim, windows in enumerate(cuts):
        if windows is not None:
            cuts[dim] = _disjoint(windows)
            if like.mesh is spec.mesh and like.dims[dim] == spec.dims[dim]:
                kept = _nested(windows, like.intervals(shape, dim))
                if _length(kept) == _length(_disjoint(windows)):
                    cuts[dim] = kept
    return spec.replace(cuts=cuts).normal(shape)


def _nested(coarse: Cuts, fine: Cuts) -> Cuts:
    """The parts of coarse intervals that are in fine ones, equally many for each of them."""
    count = len(fine) // len(coarse)
    parents = [parent for parent in coarse for _ in range(count)]
    shared = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(parents, fine, strict=True)]
    return tuple([(start, max(start, stop)) for start, stop in shared])


def _disjoint(cuts: Cuts) -> Cuts:
    """Every element left to the first of the intervals that have it."""
    reached = 0
    found = list(cuts)
    for place in sorted(range(len(cuts)), key=cuts.__getitem__):
        start = max(cuts[place][0], reached)
        reached = max(start, cuts[place][1])
        found[place] = (start, reached)
    return tuple(found)


def _length(cuts: Cuts) -> int:
    return sum([stop - start for start, stop in cuts])


def _split(cuts: Cuts | None, counts: tuple[int, ...]) -> Cuts | None:
    """Every interval cut by the default rule; default cuts stay default ones."""
    if cuts is None:
        return None
    return tuple([(start + a, start + b) for start, stop in cuts for a, b in balanced_cuts(stop - start, counts)])
