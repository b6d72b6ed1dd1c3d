"""Meshes of workers on several hosts: the order of their workers, and the hosts of a group of them.

Links within a host are faster than those between hosts, and neighbours along the last axis of a mesh exchange most. So
a mesh for which nobody names the workers has those of one host next to each other along its last axes, in whatever
order they have joined.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gt.sharding.spec import DeviceMesh

log = logging.getLogger("gt.sharding")
_RINGS = ("all-reduce", "all-gather")


def default_mesh(
    shape: Sequence[int], axis_names: Sequence[str], hosts: Mapping[int, str], name: str = ""
) -> DeviceMesh:
    """A mesh of connected workers, given by their hosts. There must be enough of them. Says once if its last axis does
    not stay within hosts."""
    mesh = mesh_of_workers(shape, axis_names, order_workers(shape, hosts), hosts, name)
    if mesh.hosts:
        _tell_of_split_rows(mesh)
    return mesh


def mesh_of_workers(
    shape: Sequence[int], axis_names: Sequence[str], workers: Sequence[int], hosts: Mapping[int, str], name: str = ""
) -> DeviceMesh:
    """A mesh of the given workers in the given order."""
    return DeviceMesh(shape, axis_names, workers, name, [hosts[worker] for worker in workers])


def order_workers(shape: Sequence[int], hosts: Mapping[int, str]) -> tuple[int, ...]:
    """The workers of a mesh for which nobody has named them, in its order: those of one host are next to each other
    along as many of the last axes as possible. On one host these are the first workers by their ids.

    The mesh is filled with blocks, which are all workers along some last axes: the largest blocks that a host has
    workers for come first, and the last ones are made of the workers that are left on several hosts."""
    free: dict[str, list[int]] = {}
    for worker in sorted(hosts):
        free.setdefault(hosts[worker], []).append(worker)  # hosts are in the order of their first workers
    ordered: list[int] = []
    count = math.prod(shape)
    for size in [*[max(math.prod(shape[axis:]), 1) for axis in range(len(shape))], 1]:
        for own in free.values():
            while len(own) >= size and len(ordered) + size <= count:
                ordered += own[:size]
                del own[:size]
    return tuple(ordered)


@functools.lru_cache(maxsize=256)
def _tell_of_split_rows(mesh: DeviceMesh) -> None:
    rows = [axis for axis, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1]
    if len(rows) < 2 or not mesh.crosses_hosts(rows[-1]):
        return
    counts = " and ".join(map(str, Counter(mesh.hosts).values()))
    log.warning(
        "axis %r of mesh %s crosses hosts, where exchanges are slower: it has %d workers, and hosts have %s of them; "
        "a size that divides these numbers would keep it within hosts",
        rows[-1],
        mesh,
        mesh.axis_size(rows[-1]),
        counts,
    )


class HostSpread(NamedTuple):
    """A group of workers on several hosts: the number of hosts, and of the workers on the host that has most."""

    hosts: int
    most: int


@functools.lru_cache(maxsize=4096)
def widest_spread(mesh: DeviceMesh, axes: tuple[str, ...]) -> HostSpread:
    """The spread over hosts of the groups of workers along some axes: of the group on most hosts."""
    size = math.prod([mesh.axis_size(axis) for axis in axes])
    if not mesh.hosts:
        return HostSpread(1, size)
    host_of = dict(zip(mesh.workers, mesh.hosts, strict=True))
    groups = {mesh.axis_group(worker, axes) for worker in mesh.workers}
    counts = [Counter([host_of[worker] for worker in group]).values() for group in groups]
    return max(HostSpread(len(each), max(each)) for each in counts)


def host_share(kind: str, axes: Sequence[str], mesh: DeviceMesh) -> float:
    """The share of the bytes of an exchange that travel between hosts, from 0 to 1. Without axes of the mesh it is an
    exchange between meshes.

    All-reduces and all-gathers are rings in the order of the mesh, in which one worker of each host receives from
    another host. In other exchanges each worker receives from all others."""
    known = tuple([axis for axis in axes if axis in mesh.axis_names]) or mesh.axis_names
    group = math.prod([mesh.axis_size(axis) for axis in known])
    hosts, most = widest_spread(mesh, known)
    if hosts == 1:
        return 0.0
    return hosts / group if kind in _RINGS else (group - most) / (group - 1)
