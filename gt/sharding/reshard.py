"""From one layout of a tensor to another: the steps, and what each worker does in them.

`plan_reshard` gives the steps; they are the same for all workers. What a worker sends and receives in a step it works
out by itself, from the specs and its place in the meshes:

* a step that does not reduce: send what `pushes` names, and put every box of `pulls` in its place in the new part; one
  of them may be the worker's own. A "to-partial" step sends nothing, and where no box is put, the part is filled with
  the identity of the reduction;
* "reduce-scatter" and "reduce": as before, but the boxes are addends. `contributions` gives them addend by addend:
  the first is put in its place, the others are reduced into it in that order, so that results do not depend on timing;
* "all-reduce": `segments`. Every worker of a group reduces one segment of the flat local tensor and sends it to all.

Between two workers at most one box travels in a step, in each direction.
"""

from __future__ import annotations

import functools
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from gt.sharding.routes import (
    IDEMPOTENT,
    Boxes,
    IntArray,
    boxes,
    cheapest_route,
    group_size,
    is_all_reduce,
    new_partial_axes,
    places,
    reduced_axes,
    shard_numbers,
)
from gt.sharding.spec import Box, Cuts, DeviceMesh, DimSpec, Shape, ShardingSpec, balanced_cuts, intersect, local_box


class Step(NamedTuple):
    """`kind` is a word for people and events, of which only "to-partial", "reduce", "reduce-scatter" and "all-reduce"
    matter to a worker. `axes` are those that the step works along; none between meshes."""

    kind: str
    source: ShardingSpec
    target: ShardingSpec
    axes: tuple[str, ...]

    def __str__(self) -> str:
        along = f" along {' '.join(self.axes)}" if self.axes else ""
        return f"{self.kind}{along}: {_print(self.source)} -> {_print(self.target)}"


class ReshardPlan(NamedTuple):
    """No steps: every worker of the target holds its part of it already, and nothing else."""

    steps: tuple[Step, ...]
    step_bytes: tuple[int, ...]
    """What all workers together receive from others in each step."""

    @property
    def bytes(self) -> int:
        return sum(self.step_bytes)


class Pull(NamedTuple):
    """A box, in elements of the whole tensor, that comes from `peer`: the worker itself where it is its own."""

    peer: int
    box: Box


class Push(NamedTuple):
    """A box that goes to `peer`, another worker."""

    peer: int
    box: Box


class Segments(NamedTuple):
    """The workers of an all-reduce, in the order in which their addends are reduced, and the interval of the flat local
    tensor that each of them reduces."""

    peers: tuple[int, ...]
    cuts: Cuts


@functools.lru_cache(maxsize=65536)
def plan_reshard(shape: Shape, itemsize: int, source: ShardingSpec, target: ShardingSpec) -> ReshardPlan:
    """The steps that move the fewest bytes; of those, the fewest steps."""
    specs, received = cheapest_route(shape, source, target)
    steps = [_name(shape, *hop, moved) for hop, moved in zip(pairwise(specs), received, strict=True)]
    return ReshardPlan(tuple(steps), tuple([itemsize * moved for moved in received]))


def explain(plan: ReshardPlan) -> str:
    """A line for each step, its bytes first."""
    lines = [f"{nbytes:>15,} B  {step}" for step, nbytes in zip(plan.steps, plan.step_bytes, strict=True)]
    return "\n".join(lines) or "nothing to do"


def _print(spec: ShardingSpec) -> str:
    return f"[{spec}] on {spec.mesh}"


# --- Names ------------------------------------------------------------------------------------------------------------


def _name(shape: Shape, source: ShardingSpec, target: ShardingSpec, moved: int) -> Step:
    reduced, new = reduced_axes(source, target), new_partial_axes(source, target)
    if new:
        return Step("to-partial", source, target, new)
    if reduced:
        return Step(_name_of_reduction(source, target), source, target, reduced if source.mesh is target.mesh else ())
    if source.mesh is not target.mesh:
        return Step(_name_between(shape, source, target, moved), source, target, ())
    return Step(_name_within(shape, source, target, moved), source, target, _changed(source, target))


def _name_of_reduction(source: ShardingSpec, target: ShardingSpec) -> str:
    if is_all_reduce(source, target):
        return "all-reduce"
    parts = group_size(target.mesh, target.axes)
    return "reduce-scatter" if 1 < parts == target.mesh.size // group_size(target.mesh, target.partial) else "reduce"


def _name_within(shape: Shape, source: ShardingSpec, target: ShardingSpec, moved: int) -> str:
    if not moved:
        return "slice"
    if source.dims == target.dims:
        return "send"
    if all(map(_is_gathered, source.dims, target.dims, source.cuts, target.cuts)):
        return "all-gather"
    return "permute" if _are_parts_equal(shape, source, target) else "all-to-all"


def _is_gathered(before: DimSpec, after: DimSpec, cuts_before: Cuts | None, cuts_after: Cuts | None) -> bool:
    """Whether every worker keeps what it has of a dim."""
    if not after or before == after:
        return cuts_after is None or cuts_before == cuts_after
    return before[: len(after)] == after and cuts_before is cuts_after is None


def _name_between(shape: Shape, source: ShardingSpec, target: ShardingSpec, moved: int) -> str:
    if not moved:
        return "slice"
    if source.is_whole:
        if not target.is_whole:
            return "scatter"
        return "broadcast" if target.mesh.size > source.mesh.size else "send"
    if target.mesh.size == 1:
        return "gather"
    same_workers = {*source.mesh.workers} == {*target.mesh.workers}
    return "permute" if same_workers and _are_parts_equal(shape, source, target) else "send"


def _are_parts_equal(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> bool:
    """Whether both cut the tensor at the same places, so that whole parts change hands."""
    return all(source.intervals(shape, dim) == target.intervals(shape, dim) for dim in range(len(shape)))


def _changed(source: ShardingSpec, target: ShardingSpec) -> tuple[str, ...]:
    """The axes that cut another dim than before, or the same one at another level or at other places."""
    before, after = _roles(source), _roles(target)
    return tuple([axis for axis in source.mesh.axis_names if before.get(axis) != after.get(axis)])


def _roles(spec: ShardingSpec) -> dict[str, object]:
    return {
        axis: (dim, axes[:level], spec.cuts[dim])
        for dim, axes in enumerate(spec.dims)
        for level, axis in enumerate(axes)
    }


# --- What a worker does -----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def pulls(step: Step, shape: Shape, worker: int) -> tuple[Pull, ...]:
    """What makes up a worker's part of the target (of any step but an all-reduce), its own elements included."""
    if worker not in step.target.mesh:
        return ()
    box = local_box(step.target, shape, worker)
    if new_partial_axes(step.source, step.target):
        own = intersect(local_box(step.source, shape, worker), box) if _keeps(step, worker) else None
        return () if own is None else (Pull(worker, own),)
    mesh, axes = step.source.mesh, reduced_axes(step.source, step.target)
    home = _homes(step.source, axes, step.target.mesh)[step.target.mesh.workers.index(worker)]
    holders = np.flatnonzero(_replicas(step.source, axes) == home)
    return tuple([Pull(mesh.workers[at], part) for at, part in _parts(boxes(step.source, shape), holders, box)])


@functools.lru_cache(maxsize=4096)
def pushes(step: Step, shape: Shape, worker: int) -> tuple[Push, ...]:
    """What a worker sends to others (in any step but an all-reduce): `pulls` of the others, seen from its side."""
    if worker not in step.source.mesh or new_partial_axes(step.source, step.target):
        return ()
    mesh, axes = step.target.mesh, reduced_axes(step.source, step.target)
    replica = _replicas(step.source, axes)[step.source.mesh.workers.index(worker)]
    takers = np.flatnonzero(_homes(step.source, axes, mesh) == replica)
    parts = _parts(boxes(step.target, shape), takers, local_box(step.source, shape, worker))
    return tuple([Push(mesh.workers[at], part) for at, part in parts if mesh.workers[at] != worker])


@functools.lru_cache(maxsize=4096)
def contributions(step: Step, shape: Shape, worker: int) -> tuple[tuple[Pull, ...], ...]:
    """The pulls of a reducing step, one tuple for each addend of the worker's part, in the order of reduction."""
    mesh = step.source.mesh
    numbers = shard_numbers(mesh, reduced_axes(step.source, step.target))
    addend = {peer: int(number) for peer, number in zip(mesh.workers, numbers, strict=True)}
    in_order = sorted(pulls(step, shape, worker), key=lambda pull: addend[pull.peer])
    return tuple([tuple(group) for _, group in groupby(in_order, key=lambda pull: addend[pull.peer])])


def segments(step: Step, shape: Shape, worker: int) -> Segments:
    """Who takes part in an all-reduce, and who reduces what."""
    mesh = step.source.mesh
    peers = mesh.axis_group(worker, reduced_axes(step.source, step.target))
    elements = int(boxes(step.source, shape).sizes[mesh.workers.index(worker)])
    return Segments(peers, balanced_cuts(elements, (len(peers),)))


def _keeps(step: Step, worker: int) -> bool:
    """Whether a worker's elements go into the partial values: one of each set of replicas, or all of them where the
    reduction does not mind. The others hold the identity."""
    mesh = step.source.mesh
    if worker not in mesh or step.target.kind in IDEMPOTENT:
        return worker in mesh
    copying = [axis for axis in new_partial_axes(step.source, step.target) if axis not in step.source.axes]
    coordinate = dict(zip(mesh.axis_names, mesh.coordinate(worker), strict=True))
    return not any(coordinate.get(axis) for axis in copying)


@functools.lru_cache(maxsize=4096)
def _replicas(source: ShardingSpec, reduced: tuple[str, ...]) -> IntArray:
    """For every worker of the source, which copy of the tensor (of its addends, where it is reduced) it belongs to.
    Workers that belong to one copy have one box of each addend between them."""
    return shard_numbers(source.mesh, _copying(source, reduced))


@functools.lru_cache(maxsize=4096)
def _homes(source: ShardingSpec, reduced: tuple[str, ...], mesh: DeviceMesh) -> IntArray:
    """For every worker of the target, the copy that serves it: the one it belongs to; others take turns."""
    at = places(mesh, source.mesh)
    turns = np.arange(mesh.size) % group_size(source.mesh, _copying(source, reduced))
    homes: IntArray = np.where(at >= 0, _replicas(source, reduced)[at], turns)
    return homes


def _copying(source: ShardingSpec, reduced: tuple[str, ...]) -> tuple[str, ...]:
    """The axes along which a source is replicated, or partial and stays so: then only the worker's own addend is asked
    for, which its copy is."""
    return tuple([axis for axis in source.mesh.axis_names if axis not in source.axes and axis not in reduced])


def _parts(held: Boxes, at: IntArray, box: Box) -> list[tuple[int, Box]]:
    """What the workers at some places of a mesh hold of a box, empty parts left out."""
    low, high = np.array(box, np.int64).reshape(-1, 2, 1).transpose(1, 0, 2)  # (dims, 1)
    starts, stops = np.maximum(held.starts[:, at], low), np.minimum(held.stops[:, at], high)
    full = (starts < stops).all(axis=0)
    edges = np.stack([starts[:, full], stops[:, full]], axis=2).transpose(1, 0, 2)  # (parts, dims, 2)
    found = [tuple(map(tuple, part)) for part in edges.tolist()]
    return list(zip(at[full].tolist(), found, strict=True))
