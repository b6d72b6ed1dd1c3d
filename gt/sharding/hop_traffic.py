"""One hop of a reshard: every worker goes from its part of one layout to its part of another. Counts the elements that
each worker receives."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gt.sharding.boxes import Cuts, Shape, total_length
from gt.sharding.spec import DeviceMesh, DimSpec, ShardingSpec

IntArray: TypeAlias = NDArray[np.int64]
StepKind: TypeAlias = Literal[
    "all-gather", "all-reduce", "all-to-all", "broadcast", "gather", "permute", "reduce", "reduce-scatter", "scatter",
    "send", "shift", "slice", "to-partial",
]  # fmt: skip
"""The name of a step of a reshard, as people and events know it. Comparisons with other names do not type-check."""


class WorkerBoxes(NamedTuple):
    """The box of a tensor that each worker of a mesh holds, in the order of the mesh."""

    starts: IntArray  # (dims, workers)
    stops: IntArray  # (dims, workers)
    sizes: IntArray  # (workers,)


@functools.lru_cache(maxsize=1 << 12)
def worker_boxes(spec: ShardingSpec, shape: Shape) -> WorkerBoxes:
    edges = np.empty((2, len(shape), spec.mesh.size), np.int64)
    for dim, axes in enumerate(spec.dims):
        if axes:
            known = _edges(spec.intervals(shape, dim))
            edges[:, dim] = known.take(shard_indices(spec.mesh, axes), axis=1)
        else:
            edges[0, dim], edges[1, dim] = 0, shape[dim]
    return WorkerBoxes(edges[0], edges[1], np.multiply.reduce(edges[1] - edges[0]))


@functools.lru_cache(maxsize=1 << 12)
def _edges(cuts: Cuts) -> IntArray:
    return np.fromiter(chain.from_iterable(cuts), np.int64, 2 * len(cuts)).reshape(-1, 2).T


@functools.lru_cache(maxsize=4096)
def shard_indices(mesh: DeviceMesh, axes: DimSpec) -> IntArray:
    """For every worker of a mesh, the index of its shard of a dim that `axes` cut, (workers,)."""
    indices = np.zeros(mesh.shape, np.int64)
    for axis in axes:
        along = [1] * len(mesh.shape)
        along[mesh.axis_names.index(axis)] = mesh.axis_size(axis)
        indices = indices * mesh.axis_size(axis) + np.arange(mesh.axis_size(axis)).reshape(along)
    return indices.ravel()


@functools.lru_cache(maxsize=4096)
def positions_in(mesh: DeviceMesh, other: DeviceMesh) -> IntArray:
    """For every worker of a mesh, its position in another mesh; -1 if it is not in it, (workers,)."""
    known = {worker: position for position, worker in enumerate(other.workers)}
    return np.array([known.get(worker, -1) for worker in mesh.workers], np.int64)


def group_size(mesh: DeviceMesh, axes: Sequence[str]) -> int:
    return math.prod([mesh.axis_size(axis) for axis in axes])


def reduced_axes(source: ShardingSpec, target: ShardingSpec) -> tuple[str, ...]:
    """The axes along which a hop reduces."""
    return tuple([axis for axis in source.partial if axis not in target.partial])


def new_partial_axes(source: ShardingSpec, target: ShardingSpec) -> tuple[str, ...]:
    """The axes along which a hop makes replicas or shards partial values."""
    return tuple([axis for axis in target.partial if axis not in source.partial])


def changed_axes(source: ShardingSpec, target: ShardingSpec) -> tuple[str, ...]:
    """The axes that cut another dim than before, or the same dim at another level or with other cuts."""
    before, after = _roles(source), _roles(target)
    return tuple([axis for axis in source.mesh.axis_names if before.get(axis) != after.get(axis)])


def _roles(spec: ShardingSpec) -> dict[str, object]:
    return {
        axis: (dim, axes[:level], spec.cuts[dim])
        for dim, axes in enumerate(spec.dims)
        for level, axis in enumerate(axes)
    }


def is_all_reduce(source: ShardingSpec, target: ShardingSpec) -> bool:
    """Whether a reduction changes nothing else about the layout."""
    return source.mesh is target.mesh and source.dims == target.dims and source.cuts == target.cuts


def received(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> IntArray:
    """The elements that every worker of the target receives in one hop, (workers,)."""
    sizes = worker_boxes(target, shape).sizes
    if new_partial_axes(source, target):
        return np.zeros_like(sizes)
    axes = reduced_axes(source, target)
    addends = group_size(source.mesh, axes)
    if not axes or not is_all_reduce(source, target):
        return addends * sizes - _own(shape, source, target)
    share, more = np.divmod(sizes, addends)
    slice_sizes = share + (shard_indices(source.mesh, axes) < more)
    return (addends - 1) * slice_sizes + sizes - slice_sizes


def _own(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> IntArray:
    """The elements of its part of the target that every worker holds already, (workers,)."""
    held, needed = worker_boxes(source, shape), worker_boxes(target, shape)
    starts, stops = held.starts, held.stops
    is_same = source.mesh.workers == target.mesh.workers
    if not is_same:
        at = positions_in(target.mesh, source.mesh)
        starts, stops = starts[:, at], stops[:, at]
    shared = np.minimum(stops, needed.stops) - np.maximum(starts, needed.starts)
    own: IntArray = np.multiply.reduce(np.maximum(shared, 0))
    return own if is_same else own * (at >= 0)


def moved_elements(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> int:
    """The sum of `received`, in a tenth of the time for common layouts."""
    if new_partial_axes(source, target):
        return 0
    axes = reduced_axes(source, target)
    addends = group_size(source.mesh, axes)
    if axes and is_all_reduce(source, target):
        return 2 * (addends - 1) * (stored_elements(shape, target) // addends)
    return addends * stored_elements(shape, target) - kept_elements(shape, source, target)


@functools.lru_cache(maxsize=1 << 13)
def stored_elements(shape: Shape, spec: ShardingSpec) -> int:
    """The elements that all workers together hold, replicas included."""
    if spec.is_skewed:
        return int(np.add.reduce(worker_boxes(spec, shape).sizes))
    lengths = [total_length(cuts) if cuts else size for size, cuts in zip(shape, spec.cuts, strict=True)]
    return math.prod(lengths) * (spec.mesh.size // group_size(spec.mesh, spec.axes))


def kept_elements(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> int:
    """The elements of their parts of the target that all workers together hold already."""
    axes = _nesting(source, target)
    if axes is None:
        return int(np.add.reduce(_own(shape, source, target)))
    return math.prod(shape) * (source.mesh.size // group_size(source.mesh, axes))


def _nesting(source: ShardingSpec, target: ShardingSpec) -> list[str] | None:
    """The axes of the finer of two layouts, if along every dim the shards of one are parts of the other's; else None.
    A worker's part of both layouts is then its part of the finer one."""
    if source.mesh is not target.mesh or any(source.cuts) or any(target.cuts):
        return None
    axes: list[str] = []
    for mine, theirs in zip(source.dims, target.dims, strict=True):
        coarse, fine = (mine, theirs) if len(mine) < len(theirs) else (theirs, mine)
        if fine[: len(coarse)] != coarse:
            return None
        axes += fine
    return axes if len(set(axes)) == len(axes) else None
