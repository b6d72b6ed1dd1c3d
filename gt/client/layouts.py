"""Layouts of tensors: `gt.mesh`, the layout of a tensor, and the part of it that each worker holds."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from gt.client import active_session
from gt.client.session_reads import fetch_part, locate
from gt.client.storage import TensorRef
from gt.core.errors import LayoutError
from gt.core.messages import hosts_of
from gt.core.tracebacks import ends_on_users_line
from gt.sharding.boxes import Shape, box_elements, box_shape
from gt.sharding.host_order import default_mesh, mesh_of_workers
from gt.sharding.placements import Placement, placements_of, require_mesh
from gt.sharding.spec import DeviceMesh, ShardingSpec, local_box, local_slices

log = logging.getLogger("gt.client")


@dataclass(frozen=True)
class LocalShard:
    """The part of a tensor that one worker holds.

    >>> gt.ones(2, 3).shards()[0]
    LocalShard(slice=(slice(0, 2, None), slice(0, 3, None)), shape=(2, 3), bytes=24)
    """

    slice: tuple[slice, ...]
    shape: Shape
    bytes: int
    _worker: int = field(repr=False)
    _ref: TensorRef = field(repr=False, compare=False)

    @property
    @ends_on_users_line
    def data(self) -> torch.Tensor:
        """What the worker holds, as a plain tensor: read from it each time. Of a partial tensor it is an addend, not
        a part of the value.

        >>> gt.init(workers=2, mode="virtual")
        >>> gt.shard(torch.arange(4), gt.mesh(2)).shards()[1].data
        tensor([2, 3])
        """
        self._require_part_of(read_layout(self._ref))
        value, layout = fetch_part(self._ref, self._worker)
        self._require_part_of(layout)
        return value

    def _require_part_of(self, layout: ShardingSpec) -> None:
        shape = tuple(self._ref.geometry.shape)
        if self._worker not in layout.mesh or local_slices(layout, shape, self._worker) != self.slice:
            raise LayoutError(
                f"the tensor is laid out as [{layout}] on {layout.mesh} now, where worker {self._worker} does not hold "
                f"{list(self.slice)}: call shards() again"
            )


@ends_on_users_line
def mesh(
    shape: int | Sequence[int], axis_names: Sequence[str] = (), workers: Sequence[int] = (), name: str = ""
) -> DeviceMesh:
    """A grid of workers: `gt.mesh((2, 4), ("dp", "tp"))`. Without `workers` it takes the first connected ones; of
    several machines, those of one machine are next to each other along the last axis. Workers that are named are taken
    in the given order.

    >>> gt.init(workers=4, mode="virtual")
    >>> gt.mesh((2, 2), ("dp", "tp")).coordinate(3)
    (1, 1)
    """
    sizes = _mesh_sizes(shape)
    hosts = hosts_of(active_session.current().workers)
    connected = list(hosts)
    count = math.prod(sizes)
    missing = [worker for worker in workers if worker not in hosts]
    if missing or (not workers and len(connected) < count):
        asked = f"workers {missing}" if missing else f"{count} workers"
        enough = max([count, *[worker + 1 for worker in missing]])
        raise LayoutError(
            f"a mesh of shape {tuple(sizes)} needs {asked}, and there are {connected}; "
            f"start more with gt.init(workers={enough}) or GT_WORKERS={enough}"
        )
    if workers:
        return mesh_of_workers(sizes, axis_names, workers, hosts, name)
    return default_mesh(sizes, axis_names, hosts, name)


def require_workers(mesh: Any) -> DeviceMesh:
    """A mesh that the user gives. Raises LayoutError if it has a worker that the session never had: it may be of a
    session before."""
    own = require_mesh(mesh)
    session = active_session.current()
    unknown = [worker for worker in own.workers if worker not in session.known_workers]
    if unknown:
        there = [info.worker for info in session.workers]
        raise LayoutError(
            f"mesh {own} has workers {unknown}, and there are {there}: start more with gt.init, or make the mesh again "
            f"with gt.mesh, if it is of a session before"
        )
    return own


def _mesh_sizes(shape: Any) -> list[int]:
    try:
        return [operator.index(size) for size in (shape if isinstance(shape, Iterable) else [shape])]
    except TypeError:
        raise LayoutError(
            f"a mesh has a whole number of workers along each axis; its shape cannot be {shape!r}: say it as in "
            f"gt.mesh(2) or gt.mesh((2, 4), ('dp', 'tp'))"
        ) from None


def read_layout(ref: TensorRef) -> ShardingSpec:
    """The layout of a tensor, which the dispatcher is asked for."""
    return locate(ref)


class Topology(NamedTuple):
    """Where a tensor is: its mesh, a placement for each axis of the mesh, and the coordinate of each worker.

    >>> gt.init(workers=2, mode="virtual")
    >>> mesh = gt.mesh(2, ("x",))
    >>> gt.shard(torch.ones(4), mesh).topology.placements
    (Shard(dim=0),)
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    coordinates: dict[int, Shape]


def read_topology(ref: TensorRef) -> Topology:
    """The layout of a tensor, in the words of DTensor and TT-NN."""
    spec = read_layout(ref)
    return Topology(spec.mesh, placements_of(spec), spec.mesh.coordinates())


def read_shards(ref: TensorRef) -> dict[int, LocalShard]:
    """The part of a tensor that each worker holds."""
    spec, geometry = read_layout(ref), ref.geometry
    held = {worker: local_box(spec, tuple(geometry.shape), worker) for worker in spec.mesh.workers}
    return {
        worker: LocalShard(
            tuple(slice(*interval) for interval in box),
            box_shape(box),
            box_elements(box) * geometry.dtype.itemsize,
            worker,
            ref,
        )
        for worker, box in held.items()
    }


class SavedLayout(NamedTuple):
    """A layout in a file, in builtin types."""

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    workers: tuple[int, ...]
    name: str
    dims: tuple[tuple[str, ...], ...]
    cuts: tuple[Any, ...]


def layout_to_save(ref: TensorRef) -> tuple[Any, ...] | None:
    """The layout of a tensor over several workers as a SavedLayout; None if it is on one."""
    spec = None if ref.session.alone else read_layout(ref)
    if spec is None or spec.mesh.size == 1:
        return None
    mesh = spec.mesh
    return tuple(SavedLayout(mesh.shape, mesh.axis_names, mesh.workers, mesh.name, spec.dims, spec.cuts))


def saved_layout(saved: Sequence[Any] | None, rank: int) -> ShardingSpec | None:
    """The layout that a file gives a tensor of `rank` dims. None if the file gives none, or if the session does not
    have all its workers."""
    hosts = hosts_of(active_session.current().workers)
    if saved is None or len(hosts) == 1:
        return None
    layout = SavedLayout(*saved)
    missing = tuple(sorted({*layout.workers} - {*hosts}))
    if missing:
        _warn_of_missing(missing, tuple(hosts))
        return None
    if len(layout.dims) != rank:
        raise LayoutError(f"the file gives a tensor of {rank} dims a layout of {len(layout.dims)}: {layout.dims}")
    mesh = mesh_of_workers(layout.shape, layout.axis_names, layout.workers, hosts, layout.name)
    return ShardingSpec(mesh, layout.dims, cuts=layout.cuts)


@functools.cache
def _warn_of_missing(missing: tuple[int, ...], connected: tuple[int, ...]) -> None:
    log.warning(
        "tensors were saved in layouts over workers %s, which this session does not have (it has %s): each is loaded "
        "whole, on one worker, until gt.to(model) or optimizer.load_state_dict lays it out",
        list(missing),
        list(connected),
    )


_open: ContextVar[DeviceMesh | None] = ContextVar("open_mesh", default=None)


@contextlib.contextmanager
def open_mesh(
    shape: int | Sequence[int] | DeviceMesh,
    axis_names: Sequence[str] = (),
    workers: Sequence[int] = (),
    name: str = "",
) -> Iterator[DeviceMesh]:
    """A mesh for the calls inside, as `with gt.open_mesh((2, 4), ("dp", "tp")) as mesh:` wherever `placements=` or
    `out=` is given without `mesh=`, and for tensors that the functions of gt.distributed lay out. A mesh that exists
    may be given in place of a shape. The innermost one counts, in this thread.

    >>> gt.init(workers=4, mode="virtual")
    >>> with gt.open_mesh((2, 2), ("dp", "tp")):
    ...     x = gt.ones(4, 6, placements="dp, tp")
    >>> x.spec
    ShardingSpec('dp, tp' on (dp=2, tp=2))
    """
    opened = require_workers(shape) if isinstance(shape, DeviceMesh) else mesh(shape, axis_names, workers, name)
    token = _open.set(opened)
    try:
        yield opened
    finally:
        _open.reset(token)


def current_mesh() -> DeviceMesh | None:
    """The mesh of the innermost open_mesh; None outside of any."""
    return _open.get()
