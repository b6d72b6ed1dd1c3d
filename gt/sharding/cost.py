"""The cost of layouts: bytes to reshard, and memory. Plans use these two only.

Only tests use `seconds`, an estimate of the time of a collective, and `lower_bound`, the bytes that any resharding
scheme has to move.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gt.sharding.boxes import Shape
from gt.sharding.hop_traffic import IntArray, group_size, positions_in, shard_indices, worker_boxes
from gt.sharding.routes import cheapest_route
from gt.sharding.spec import ShardingSpec, largest_local_shape


def reshard_bytes(shape: Shape, itemsize: int, source: ShardingSpec, target: ShardingSpec) -> int:
    """Bytes received from other workers, by all workers together."""
    return itemsize * sum(cheapest_route(shape, source, target).received)


def memory_bytes(spec: ShardingSpec, shape: Shape, itemsize: int) -> int:
    """The bytes of the largest shard."""
    return itemsize * math.prod(largest_local_shape(spec, shape))


# --- Time -------------------------------------------------------------------------------------------------------------


class LinkSpeed(NamedTuple):
    """The speed of a link. `alpha`: seconds a message; `beta`: seconds a byte."""

    alpha: float
    beta: float


# Measured with two processes on a 2-core machine. Gloo: an all-reduce of 4 KB, which is two messages for each of two
# ranks, took 1.07 ms; one of 64 MB ran at 1.4 GB/s. Memory: a ZeroMQ round trip over ipc, which is two messages, took
# 80 to 100 us; memcpy ran at 11.5 GB/s.
GLOO = LinkSpeed(alpha=1.07e-3 / 2, beta=1 / 1.4e9)
MEMORY = LinkSpeed(alpha=45e-6, beta=1 / 11.5e9)

_LOCAL = ("slice", "to-partial")
_SINGLE = ("permute", "send")


def seconds(kind: str, nbytes: float, group: int, link: LinkSpeed = GLOO) -> float:
    """The time of a reshard step in groups of `group` workers, the busiest of which sends or receives `nbytes`."""
    if kind in _LOCAL or group < 2:
        return 0.0
    messages = 1 if kind in _SINGLE else (group - 1) * (2 if kind == "all-reduce" else 1)
    return messages * link.alpha + nbytes * link.beta


# --- Lower bound ------------------------------------------------------------------------------------------------------


def lower_bound(shape: Shape, itemsize: int, source: ShardingSpec, target: ShardingSpec) -> int:
    """The bytes that workers receive in any scheme.

    A group is one worker of the target, or the workers whose partial values make up one value. For each element, every
    addend that the first group lacks has to travel once; then each other group that lacks some addend has to receive
    at least one element."""
    cells, held, needed = _cells(shape, source, target)
    addends = group_size(source.mesh, source.partial)
    groups = target.mesh.size // group_size(target.mesh, target.partial)
    value_axes = tuple([axis for axis in target.mesh.axis_names if axis not in target.partial])
    group, addend = shard_indices(target.mesh, value_axes), shard_indices(source.mesh, source.partial)
    wanted = np.zeros((len(cells), groups), bool)
    wanted[:, group] = needed
    knows = np.zeros((len(cells), groups, addends), bool)
    for position, at in enumerate(positions_in(target.mesh, source.mesh)):
        if at >= 0:
            knows[:, group[position], addend[at]] |= held[:, at]
    known = np.where(wanted, knows.sum(2), -1)
    most = known.max(1)
    waiting = (wanted & (known < addends)).sum(1)
    least = np.where(most < addends, addends - most + waiting - 1, waiting)
    return itemsize * int((cells * least)[wanted.any(1)].sum())


def _cells(
    shape: Shape, source: ShardingSpec, target: ShardingSpec
) -> tuple[IntArray, NDArray[np.bool_], NDArray[np.bool_]]:
    """The tensor cut at the edges of both layouts: the size of each cell, and whether each worker holds and needs it,
    (cells, workers)."""
    both = worker_boxes(source, shape), worker_boxes(target, shape)
    sizes = np.ones(1, np.int64)
    within = [np.ones((1, len(side.sizes)), bool) for side in both]
    for dim in range(len(shape)):
        edges = np.unique(np.concatenate([edge[dim] for side in both for edge in (side.starts, side.stops)]))
        first = edges[:-1, None]
        sizes = np.outer(sizes, np.diff(edges)).ravel()
        for number, side in enumerate(both):
            along = (side.starts[dim] <= first) & (first < side.stops[dim])  # (cells of the dim, workers)
            within[number] = (within[number][:, None] & along).reshape(-1, along.shape[1])
    return sizes, within[0], within[1]
