"""Resharding: the steps from one layout of a tensor to another, and the boxes that each worker sends and receives.

`plan_reshard` gives the steps, which are the same for all workers. Each worker derives its sends and receives in a step
from the specs and its own id:

* a step without reduction: the worker sends the boxes of `pushes` and assembles its new part from the boxes of
  `pulls`, one of which may be its own. A "to-partial" step sends nothing; elements in no box are the identity of the
  reduction;
* "reduce-scatter" and "reduce": the boxes are addends. `contributions` groups them by addend, in the order of
  reduction, so that results do not depend on timing;
* "all-reduce": each worker of an `exchange_group` reduces one slice of the flat local tensor for the others.

Between two workers at most one box travels in a step, in each direction.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from gt.core.ids import is_dispatcher_id
from gt.sharding.boxes import Box, Cuts, Shape, balanced_cuts, box_elements, box_shape, intersect
from gt.sharding.hop_traffic import (
    IntArray,
    StepKind,
    WorkerBoxes,
    changed_axes,
    group_size,
    is_all_reduce,
    new_partial_axes,
    positions_in,
    reduced_axes,
    shard_indices,
    worker_boxes,
)
from gt.sharding.routes import IDEMPOTENT, cheapest_route
from gt.sharding.spec import DeviceMesh, DimSpec, ShardingSpec, compute_local_shape, local_box


class ReshardStep(NamedTuple):
    """One step of a reshard. `kind` names the collective for people and events; workers distinguish only "to-partial",
    "reduce", "reduce-scatter" and "all-reduce". `axes` are the mesh axes of the collective; empty between meshes."""

    kind: StepKind
    source: ShardingSpec
    target: ShardingSpec
    axes: tuple[str, ...]

    def __str__(self) -> str:
        along = f" along {' '.join(self.axes)}" if self.axes else ""
        return f"{self.kind}{along}: {_print(self.source)} -> {_print(self.target)}"


class ReshardPlan(NamedTuple):
    """The steps of a reshard. No steps: every worker of the target holds exactly its part already."""

    steps: tuple[ReshardStep, ...]
    step_bytes: tuple[int, ...]
    """The bytes that all workers together receive from others in each step."""

    @property
    def bytes(self) -> int:
        return sum(self.step_bytes)


class Pull(NamedTuple):
    """A box of the whole tensor that a worker takes from `peer`, which may be the worker itself."""

    peer: int
    box: Box


class Push(NamedTuple):
    """A box of the whole tensor that a worker sends to `peer`, another worker."""

    peer: int
    box: Box


@functools.lru_cache(maxsize=1 << 14)
def plan_reshard(shape: Shape, itemsize: int, source: ShardingSpec, target: ShardingSpec) -> ReshardPlan:
    """The plan that moves the fewest bytes; of equal ones, the fewest steps."""
    specs, received = cheapest_route(shape, source, target)
    steps = [_name(shape, *hop, moved) for hop, moved in zip(pairwise(specs), received, strict=True)]
    return ReshardPlan(tuple(steps), tuple([itemsize * moved for moved in received]))


def explain(plan: ReshardPlan) -> str:
    """A line for each step, its bytes first."""
    lines = [f"{nbytes:>15,} B  {step}" for step, nbytes in zip(plan.steps, plan.step_bytes, strict=True)]
    return "\n".join(lines) or "nothing to do"


def _print(spec: ShardingSpec) -> str:
    return f"[{spec}] on {spec.mesh}"


# --- Names of steps ---------------------------------------------------------------------------------------------------


def _name(shape: Shape, source: ShardingSpec, target: ShardingSpec, moved: int) -> ReshardStep:
    reduced, new = reduced_axes(source, target), new_partial_axes(source, target)
    if new:
        return ReshardStep("to-partial", source, target, new)
    if reduced:
        return ReshardStep(
            _name_of_reduction(source, target), source, target, reduced if source.mesh is target.mesh else ()
        )
    if source.mesh is not target.mesh:
        return ReshardStep(_name_between(shape, source, target, moved), source, target, ())
    return ReshardStep(_name_within(shape, source, target, moved), source, target, changed_axes(source, target))


def _name_of_reduction(source: ShardingSpec, target: ShardingSpec) -> StepKind:
    if is_all_reduce(source, target):
        return "all-reduce"
    parts = group_size(target.mesh, target.axes)
    return "reduce-scatter" if 1 < parts == target.mesh.size // group_size(target.mesh, target.partial) else "reduce"


def _name_within(shape: Shape, source: ShardingSpec, target: ShardingSpec, moved: int) -> StepKind:
    if not moved:
        return "slice"
    if source.dims == target.dims:
        return _name_of_windows(shape, source, target)
    if all(map(_is_gathered, source.dims, target.dims, source.cuts, target.cuts)):
        return "all-gather"
    return "permute" if _are_parts_equal(shape, source, target) else "all-to-all"


def _name_of_windows(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> StepKind:
    """The name of a move to other windows of the same dims: workers get the parts of others, as in a ring, or all the
    same window, or something else."""
    pairs = [
        (source.intervals(shape, dim), target.intervals(shape, dim)) for dim in range(len(shape)) if target.dims[dim]
    ]
    changed = [(old, new) for old, new in pairs if old != new]
    if all(sorted(old) == sorted(new) for old, new in changed):
        return "shift"
    return "broadcast" if all(len(set(new)) < len(new) for _, new in changed) else "send"


def _is_gathered(before: DimSpec, after: DimSpec, cuts_before: Cuts | None, cuts_after: Cuts | None) -> bool:
    """Whether every worker keeps all its elements along a dim."""
    if not after or before == after:
        return cuts_after is None or cuts_before == cuts_after
    return before[: len(after)] == after and cuts_before is cuts_after is None


def _name_between(shape: Shape, source: ShardingSpec, target: ShardingSpec, moved: int) -> StepKind:
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
    """Whether both layouts have the same shards, so that workers exchange whole shards."""
    return all(source.intervals(shape, dim) == target.intervals(shape, dim) for dim in range(len(shape)))


# --- One worker's part ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def pulls(step: ReshardStep, shape: Shape, worker: int) -> tuple[Pull, ...]:
    """The boxes that make up a worker's part of the target, its own elements included. Not for an all-reduce."""
    if worker not in step.target.mesh:
        return ()
    box = local_box(step.target, shape, worker)
    if new_partial_axes(step.source, step.target):
        own = intersect(local_box(step.source, shape, worker), box) if _keeps(step, worker) else None
        return () if own is None else (Pull(worker, own),)
    mesh, axes = step.source.mesh, reduced_axes(step.source, step.target)
    home = _homes(step.source, axes, step.target.mesh)[step.target.mesh.workers.index(worker)]
    holders = np.flatnonzero(_replicas(step.source, axes) == home)
    return tuple([Pull(mesh.workers[at], part) for at, part in _parts(worker_boxes(step.source, shape), holders, box)])


@functools.lru_cache(maxsize=4096)
def pushes(step: ReshardStep, shape: Shape, worker: int) -> tuple[Push, ...]:
    """The boxes that a worker sends to others: the `pulls` of the others from this worker. Not for an all-reduce."""
    if worker not in step.source.mesh or new_partial_axes(step.source, step.target):
        return ()
    mesh, axes = step.target.mesh, reduced_axes(step.source, step.target)
    replica = _replicas(step.source, axes)[step.source.mesh.workers.index(worker)]
    takers = np.flatnonzero(_homes(step.source, axes, mesh) == replica)
    parts = _parts(worker_boxes(step.target, shape), takers, local_box(step.source, shape, worker))
    return tuple([Push(mesh.workers[at], part) for at, part in parts if mesh.workers[at] != worker])


@functools.lru_cache(maxsize=4096)
def contributions(step: ReshardStep, shape: Shape, worker: int) -> tuple[tuple[Pull, ...], ...]:
    """The pulls of a reducing step, one tuple for each addend of the worker's part, in the order of reduction."""
    mesh = step.source.mesh
    indices = shard_indices(mesh, reduced_axes(step.source, step.target))
    addend = {peer: int(index) for peer, index in zip(mesh.workers, indices, strict=True)}
    in_order = sorted(pulls(step, shape, worker), key=lambda pull: addend[pull.peer])
    return tuple([tuple(group) for _, group in groupby(in_order, key=lambda pull: addend[pull.peer])])


@functools.lru_cache(maxsize=4096)
def exchange_group(step: ReshardStep, worker: int) -> tuple[int, ...]:
    """The workers that exchange boxes with each other in a step, this one included: those along the axes that the step
    changes or, between meshes, all workers of both. All of a group name the same group. Members along reduced axes are
    in the order of reduction."""
    source, target = step.source, step.target
    if source.mesh is not target.mesh:
        return tuple(sorted({*source.mesh.workers, *target.mesh.workers}))
    changed = {*reduced_axes(source, target), *changed_axes(source, target)}
    return source.mesh.axis_group(worker, tuple([axis for axis in source.mesh.axis_names if axis in changed]))


@functools.lru_cache(maxsize=4096)
def has_equal_boxes(step: ReshardStep, shape: Shape, members: tuple[int, ...]) -> bool:
    """Whether every member of a group takes one box from every member, all of one shape, as in the collectives of
    process groups."""
    if step.kind == "all-reduce":
        return True
    if step.kind not in ("all-gather", "reduce-scatter", "all-to-all"):
        return False
    taken = [pulls(step, shape, member) for member in members]
    shapes = {box_shape(pull.box) for member in taken for pull in member}
    return len(shapes) == 1 and all(sorted(pull.peer for pull in member) == sorted(members) for member in taken)


def may_overlap(kind: StepKind | None, inputs: Sequence[int], outputs: Sequence[int]) -> bool:
    """Whether workers only begin the exchange of a command with these ids, and go on: it is a gather of copies, or a
    reduction of gradients that replaces them."""
    if kind == "all-gather":
        return all(map(is_dispatcher_id, outputs))
    return kind == "all-reduce" and inputs == outputs


def source_replica(step: ReshardStep, worker: int) -> int:
    """The index of the replica of the source that a worker takes its boxes from. Two workers that take from one replica
    and have the same part of the target take the same boxes."""
    axes = reduced_axes(step.source, step.target)
    return int(_homes(step.source, axes, step.target.mesh)[step.target.mesh.workers.index(worker)])


def _keeps(step: ReshardStep, worker: int) -> bool:
    """Whether a worker's elements become partial values: those of one worker of each set of replicas, or of all of them
    if the reduction is idempotent. The others hold the identity."""
    mesh = step.source.mesh
    if worker not in mesh or step.target.kind in IDEMPOTENT:
        return worker in mesh
    replicating = [axis for axis in new_partial_axes(step.source, step.target) if axis not in step.source.axes]
    coordinate = dict(zip(mesh.axis_names, mesh.coordinate(worker), strict=True))
    return not any(coordinate.get(axis) for axis in replicating)


@functools.lru_cache(maxsize=4096)
def _replicas(source: ShardingSpec, reduced: tuple[str, ...]) -> IntArray:
    """For every worker of the source, the index of the replica that it belongs to, (workers,). The workers of one
    replica hold each element of each addend once."""
    return shard_indices(source.mesh, _replicating_axes(source, reduced))


@functools.lru_cache(maxsize=4096)
def _homes(source: ShardingSpec, reduced: tuple[str, ...], mesh: DeviceMesh) -> IntArray:
    """For every worker of the target, the replica of the source that it pulls from, (workers,): its own replica, or one
    in turn for workers outside the source."""
    at = positions_in(mesh, source.mesh)
    turns = np.arange(mesh.size) % group_size(source.mesh, _replicating_axes(source, reduced))
    homes: IntArray = np.where(at >= 0, _replicas(source, reduced)[at], turns)
    return homes


def _replicating_axes(source: ShardingSpec, reduced: tuple[str, ...]) -> tuple[str, ...]:
    """The axes along which a source is replicated, or stays partial: a worker then needs its own addend only."""
    return tuple([axis for axis in source.mesh.axis_names if axis not in source.axes and axis not in reduced])


def _parts(held: WorkerBoxes, at: IntArray, box: Box) -> list[tuple[int, Box]]:
    """The parts of a box that the workers at the positions `at` of a mesh hold, empty parts left out."""
    low, high = np.array(box, np.int64).reshape(-1, 2, 1).transpose(1, 0, 2)  # (dims, 1)
    starts, stops = np.maximum(held.starts[:, at], low), np.minimum(held.stops[:, at], high)
    full = (starts < stops).all(axis=0)
    edges = np.stack([starts[:, full], stops[:, full]], axis=2).transpose(1, 0, 2)  # (parts, dims, 2)
    found = [tuple(map(tuple, part)) for part in edges.tolist()]
    return list(zip(at[full].tolist(), found, strict=True))


def bytes_by_pair(step: ReshardStep, shape: Shape, itemsize: int) -> Counter[tuple[int, int]]:
    """Bytes by (sender, receiver)."""
    found: Counter[tuple[int, int]] = Counter()
    for worker in step.target.mesh.workers:
        received = _reduced_with(step, shape, worker) if step.kind == "all-reduce" else _pulled(step, shape, worker)
        for peer, elements in received.items():
            if peer != worker and elements:
                found[peer, worker] += elements * itemsize
    return found


def _pulled(step: ReshardStep, shape: Shape, worker: int) -> dict[int, int]:
    return {peer: box_elements(box) for peer, box in pulls(step, shape, worker)}


def _reduced_with(step: ReshardStep, shape: Shape, worker: int) -> dict[int, int]:
    """Of each member of a group, its addend of the slice that this worker reduces, and the slice that it reduced."""
    members = exchange_group(step, worker)
    elements = math.prod(compute_local_shape(step.source, shape, worker))
    lengths = [stop - start for start, stop in balanced_cuts(elements, (len(members),))]
    own = lengths[members.index(worker)]
    return {member: own + length for member, length in zip(members, lengths, strict=True)}
