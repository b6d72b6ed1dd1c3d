"""The time of an exchange between workers: messages and bytes, within hosts and between them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from gt.sharding.calibration import Calibration
from gt.sharding.cost import seconds
from gt.sharding.host_order import host_share, widest_spread
from gt.sharding.spec import DeviceMesh


def step_seconds(kind: str, axes: Sequence[str], nbytes: int, mesh: DeviceMesh, machine: Calibration) -> float:
    """The time of one collective in which all workers of a mesh together receive `nbytes`. If it crosses hosts, its
    messages are those between hosts."""
    if not nbytes:
        return 0.0
    known = _known(axes, mesh)
    group = max(math.prod([mesh.axis_size(axis) for axis in known]), 2)
    if not _crosses(known, mesh, machine):
        return seconds(kind, nbytes / mesh.size, group, machine.link(known))
    return seconds(kind, 0, group, machine.host_link) + transfer_seconds(kind, axes, nbytes, mesh, machine)


def transfer_seconds(kind: str, axes: Sequence[str], nbytes: int, mesh: DeviceMesh, machine: Calibration) -> float:
    """The time of the bytes alone: of those that each worker receives and, between hosts, of those that all workers of
    a host receive by its one link."""
    known = _known(axes, mesh)
    each = nbytes / mesh.size
    if not _crosses(known, mesh, machine):
        return each * machine.link(known).beta
    crossing = host_share(kind, known, mesh)
    sharing = max(Counter(mesh.hosts).values())
    return each * ((1 - crossing) * machine.link(()).beta + crossing * sharing * machine.host_link.beta)


def _known(axes: Sequence[str], mesh: DeviceMesh) -> tuple[str, ...]:
    """The axes of an exchange; all of the mesh if it is between meshes."""
    return tuple([axis for axis in axes if axis in mesh.axis_names]) or mesh.axis_names


def _crosses(axes: tuple[str, ...], mesh: DeviceMesh, machine: Calibration) -> bool:
    """Whether the speeds between hosts count: not along axes whose speeds the user has given."""
    return bool(mesh.hosts) and machine.axes.keys().isdisjoint(axes) and widest_spread(mesh, axes).hosts > 1
