"""What resharding costs: bytes, time and memory; and the bytes that no scheme can do without."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gt.sharding.routes import IntArray, boxes, cheapest_route, group_size, places, shard_numbers
from gt.sharding.spec import Shape, ShardingSpec, largest_local_shape


def reshard_bytes(shape: Shape, itemsize: int, source: ShardingSpec, target: ShardingSpec) -> int:
    """Bytes received from other workers, by all workers together."""
    return itemsize * sum(cheapest_route(shape, source, target).received)


def memory_bytes(spec: ShardingSpec, shape: Shape, itemsize: int) -> int:
    """The most that one worker holds."""
    return itemsize * math.prod(largest_local_shape(spec, shape))


# --- Time -------------------------------------------------------------------------------------------------------------


class LinkSpeed(NamedTuple):
    """`alpha`: seconds a message; `beta`: seconds a byte."""

    alpha: float
    beta: float


# Measured with two processes on a 2-core machine (shared/design.md, "Numbers that exist"). Gloo: an all-reduce of 4 KB,
# which is two messages for each of two ranks, took 1.07 ms; one of 64 MB ran at 1.4 GB/s. Memory: a ZeroMQ round trip
# over ipc, which is two messages, took 80 to 100 us; memcpy ran at 11.5 GB/s.
GLOO = LinkSpeed(alpha=1.07e-3 / 2, beta=1 / 1.4e9)
MEMORY = LinkSpeed(alpha=45e-6, beta=1 / 11.5e9)

_LOCAL = ("slice", "to-partial")
_SINGLE = ("permute", "send")


def seconds(kind: str, nbytes: float, group: int, link: LinkSpeed = GLOO) -> float:
    """How long a step takes whose busiest worker receives or sends `nbytes`, among `group` workers each."""
    if kind in _LOCAL or group < 2:
        return 0.0
    messages = 1 if kind in _SINGLE else (group - 1) * (2 if kind == "all-reduce" else 1)
    return messages * link.alpha + nbytes * link.beta


# --- What no scheme can beat ------------------------------------------------------------------------------------------


def lower_bound(shape: Shape, itemsize: int, source: ShardingSpec, target: ShardingSpec) -> int:
    """Bytes that any scheme has to receive. For every element: until a first group of workers (one worker, or those
    whose partial values make up the value) can know it, each addend that the group lacks has to travel once; after
    that every other group that does not hold all addends has to hear at least once."""
    cells, held, needed = _cells(shape, source, target)
    addends = group_size(source.mesh, source.partial)
    groups = target.mesh.size // group_size(target.mesh, target.partial)
    settled = tuple([axis for axis in target.mesh.axis_names if axis not in target.partial])
    group, addend = shard_numbers(target.mesh, settled), shard_numbers(source.mesh, source.partial)
    wanted = np.zeros((len(cells), groups), bool)
    wanted[:, group] = needed
    knows = np.zeros((len(cells), groups, addends), bool)
    for place, at in enumerate(places(target.mesh, source.mesh)):
        if at >= 0:
            knows[:, group[place], addend[at]] |= held[:, at]
    known = np.where(wanted, knows.sum(2), -1)
    most = known.max(1)
    waiting = (wanted & (known < addends)).sum(1)
    least = np.where(most < addends, addends - most + waiting - 1, waiting)
    return itemsize * int((cells * least)[wanted.any(1)].sum())


def _cells(
    shape: Shape, source: ShardingSpec, target: ShardingSpec
) -> tuple[IntArray, NDArray[np.bool_], NDArray[np.bool_]]:
    """The tensor cut at all edges of both layouts: the size of each cell, and which workers hold and need it,
    (cells, workers)."""
    both = boxes(source, shape), boxes(target, shape)
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
