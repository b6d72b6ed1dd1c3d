"""Meshes of workers, and specs: the part of a tensor that each worker of a mesh holds.

A `ShardingSpec` is a fact about bytes that exist. Shapes are those of the whole tensor; a worker's shard follows from
the spec and the worker's coordinate in the mesh, by the functions of this module alone.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from gt.core.errors import LayoutError
from gt.core.signatures import MeshRecord, SpecRecord
from gt.sharding.boxes import Box, Cuts, Shape, balanced_cuts, box_shape, is_partition
from gt.sharding.layout_html import mesh_html, spec_html

DimSpec: TypeAlias = tuple[str, ...]
"""The mesh axes that cut one tensor dim, major to minor."""

REDUCTIONS = ("sum", "max", "min", "prod", "and", "or")


class DeviceMesh:
    """An N-D grid over any workers in any order. Equal meshes are one object, so they are compared by identity.

    `gt.mesh` makes one of connected workers. `hosts` tells the machine of each worker, as any names or numbers, so that
    plans know which links are slow; a mesh numbers its machines from 0, and has none of them if there is only one.

    >>> mesh = gt.DeviceMesh((2, 2), ("dp", "tp"))
    >>> mesh.size, mesh.coordinate(2), mesh.at((1, 1)), mesh.submesh(dp=1).workers
    (4, (1, 0), 3, (2, 3))
    """

    __slots__ = ("__weakref__", "_positions", "axis_names", "hosts", "name", "shape", "workers")
    shape: Shape
    axis_names: tuple[str, ...]
    workers: tuple[int, ...]
    name: str
    hosts: tuple[int, ...]

    def __new__(
        cls,
        shape: Sequence[int],
        axis_names: Sequence[str] = (),
        workers: Sequence[int] = (),
        name: str = "",
        hosts: Sequence[Hashable] = (),
    ) -> DeviceMesh:
        shape = tuple(shape)
        names = tuple(axis_names) or tuple([f"axis{position}" for position in range(len(shape))])
        ids = tuple(workers) or tuple(range(math.prod(shape)))
        key = (shape, names, ids, name, _numbered(hosts))
        found = _meshes.get(key)
        if found is None:
            _check_mesh(shape, names, ids, hosts)
            _check_mesh_name(name)
            found = super().__new__(cls)
            found.shape, found.axis_names, found.workers, found.name, found.hosts = key
            found._positions = {worker: position for position, worker in enumerate(ids)}  # type: ignore[attr-defined]
            _meshes[key] = found
        return found

    @property
    def size(self) -> int:
        return len(self.workers)

    def axis_size(self, axis: str) -> int:
        return self.shape[self.axis_names.index(axis)]

    def coordinate(self, worker: int) -> Shape:
        """The coordinate of a worker: its index along each axis."""
        try:
            position: int = self._positions[worker]  # type: ignore[attr-defined]
        except KeyError:
            raise LayoutError(f"worker {worker} is not in mesh {self}") from None
        coordinate = []
        for size in reversed(self.shape):
            position, along = divmod(position, size)
            coordinate.append(along)
        return tuple(reversed(coordinate))

    def __contains__(self, worker: int) -> bool:
        return worker in self._positions  # type: ignore[attr-defined]

    def at(self, coordinate: Sequence[int]) -> int:
        """The worker with a coordinate."""
        is_within = [0 <= along < size for along, size in zip(coordinate, self.shape, strict=False)]
        if len(coordinate) != len(self.shape) or not all(is_within):
            last = tuple([size - 1 for size in self.shape])
            raise LayoutError(f"mesh {self} has no coordinate {tuple(coordinate)}; its last one is {last}")
        position = 0
        for size, along in zip(self.shape, coordinate, strict=True):
            position = position * size + along
        return self.workers[position]

    def axis_group(self, worker: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The workers whose coordinates differ from this one's along `axes` only, ordered by these axes, major
        first."""
        return _axis_groups(self, tuple(axes))[worker]

    def coordinates(self) -> dict[int, Shape]:
        """The coordinate of each worker."""
        return {worker: self.coordinate(worker) for worker in self.workers}

    def neighbor(self, worker: int, axis: str, offset: int = 1) -> int:
        """The worker `offset` places further along an axis, which is a ring: the first follows the last."""
        if worker not in self:
            raise LayoutError(f"worker {worker} is not in mesh {self}")
        ring = self.axis_group(worker, (self._axis(axis),))
        return ring[(ring.index(worker) + offset) % len(ring)]

    def reshape(self, shape: Sequence[int], axis_names: Sequence[str] = ()) -> DeviceMesh:
        """The same workers in the same order as a grid of another shape."""
        if math.prod(shape) != self.size:
            raise LayoutError(f"mesh {self} has {self.size} workers, and {tuple(shape)} needs {math.prod(shape)}")
        return DeviceMesh(shape, axis_names, self.workers, self.name, self.hosts)

    def subset(
        self, shape: Sequence[int], axis_names: Sequence[str], workers: Sequence[int], name: str = ""
    ) -> DeviceMesh:
        """A mesh of some of these workers, which knows their hosts."""
        at: dict[int, int] = self._positions  # type: ignore[attr-defined]
        return DeviceMesh(shape, axis_names, workers, name, self.hosts and [self.hosts[at[each]] for each in workers])

    def crosses_hosts(self, *axes: str) -> bool:
        """Whether workers that differ along some axes only, by default along all, are on several machines.

        >>> mesh = gt.DeviceMesh((2, 2), ("dp", "tp"), hosts=["a", "a", "b", "b"])
        >>> mesh.crosses_hosts("dp"), mesh.crosses_hosts("tp")
        (True, False)
        """
        if not self.hosts:
            return False
        host_of = dict(zip(self.workers, self.hosts, strict=True))
        groups = _axis_groups(self, axes or self.axis_names).values()
        return any(len({host_of[worker] for worker in group}) > 1 for group in groups)

    def _axis(self, axis: str) -> str:
        if axis not in self.axis_names:
            raise LayoutError(f"mesh {self} has no axis {axis!r}; it has {', '.join(self.axis_names)}")
        return axis

    def submesh(
        self, shape: Sequence[int] | None = None, offset: Sequence[int] | None = None, /, **fixed: int
    ) -> DeviceMesh:  # fmt: skip
        """The part of the mesh at the given coordinates of the named axes; its axes are the remaining ones. Or the part
        of a shape, with the same axes, whose first worker is at the coordinate `offset`.

        >>> gt.DeviceMesh((2, 4)).submesh((2, 2), (0, 1)).workers
        (1, 2, 5, 6)
        """
        if shape is not None or offset is not None:
            if fixed:
                raise LayoutError(f"submesh() takes a shape and an offset, or {', '.join(fixed)}=, and not both")
            return self._rectangle(shape, offset)
        for axis, along in fixed.items():
            if along not in range(self.axis_size(self._axis(axis))):
                raise LayoutError(f"axis {axis!r} of mesh {self} has coordinates 0 to {self.axis_size(axis) - 1}")
        kept = [position for position, axis in enumerate(self.axis_names) if axis not in fixed]
        workers = [
            worker
            for worker in self.workers
            if all(self.coordinate(worker)[self.axis_names.index(axis)] == along for axis, along in fixed.items())
        ]
        names = [self.axis_names[position] for position in kept]
        return self.subset([self.shape[position] for position in kept], names, workers, self.name)

    def _rectangle(self, shape: Sequence[int] | None, offset: Sequence[int] | None) -> DeviceMesh:
        starts = (0,) * len(self.shape) if offset is None else tuple(offset)
        rest = [size - start for start, size in zip(starts, self.shape, strict=False)]
        sizes = tuple(rest if shape is None else shape)
        fits = [start >= 0 and 0 < size <= most for start, size, most in zip(starts, sizes, rest, strict=False)]
        if {len(starts), len(sizes)} != {len(self.shape)} or not all(fits):
            raise LayoutError(f"mesh {self} has no part of shape {sizes} at offset {starts}")
        ranges = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        return self.subset(sizes, self.axis_names, [self.at(each) for each in itertools.product(*ranges)], self.name)

    def record(self) -> MeshRecord:
        return MeshRecord(self.shape, self.axis_names, self.workers, self.name, self.hosts)

    def __reduce__(self) -> Any:
        return DeviceMesh, (self.shape, self.axis_names, self.workers, self.name, self.hosts)

    def __str__(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in zip(self.axis_names, self.shape, strict=True))
        usual = self.workers == tuple(range(self.size))
        return f"{self.name}({axes})" + ("" if usual else f" of workers {list(self.workers)}")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return mesh_html(self)


_meshes: WeakValueDictionary[Any, DeviceMesh] = WeakValueDictionary()
_NAME = re.compile(r"[A-Za-z_]\w{0,63}\Z")
_MAX_MESH_NAME = 64


def _numbered(hosts: Sequence[Hashable]) -> tuple[int, ...]:
    """The hosts of workers as numbers in the order of their first workers; none of them if there is only one."""
    numbers: dict[Hashable, int] = {}
    found = tuple([numbers.setdefault(host, len(numbers)) for host in hosts])
    return found if len(numbers) > 1 else ()


def _check_mesh_name(name: str) -> None:
    if len(name) > _MAX_MESH_NAME or not name.isprintable():
        raise LayoutError(f"{name!r} cannot name a mesh: use up to {_MAX_MESH_NAME} characters that can be printed")


def _check_mesh(shape: Shape, names: tuple[str, ...], workers: tuple[int, ...], hosts: Sequence[Hashable]) -> None:
    if len(names) != len(shape) or len(set(names)) != len(names):
        raise LayoutError(f"a mesh of shape {shape} needs {len(shape)} different axis names, not {names}")
    for name in names:
        if not _NAME.match(name):
            raise LayoutError(f"{name!r} cannot name a mesh axis: use up to 64 letters, digits and underscores")
    if min(shape, default=1) < 1:
        raise LayoutError(f"a mesh has at least one worker along every axis; its shape cannot be {shape}")
    if math.prod(shape) != len(workers):
        raise LayoutError(f"a mesh of shape {shape} needs {math.prod(shape)} workers, not {len(workers)}")
    if len(set(workers)) != len(workers):
        raise LayoutError(f"a worker has one place in a mesh; {list(workers)} names one twice")
    if hosts and len(hosts) != len(workers):
        raise LayoutError(f"a mesh of {len(workers)} workers has a host for each of them, not {len(hosts)}")


def mesh_of(record: MeshRecord) -> DeviceMesh:
    if not record.workers:  # a program may leave them out, as its shape tells their number: here a peer gave the shape
        raise LayoutError(f"a mesh of shape {record.shape} names no workers")
    return DeviceMesh(record.shape, record.axis_names, record.workers, record.name, record.hosts)


@functools.lru_cache(maxsize=1024)
def _axis_groups(mesh: DeviceMesh, axes: tuple[str, ...]) -> dict[int, tuple[int, ...]]:
    positions = [mesh.axis_names.index(axis) for axis in axes]
    groups: dict[Shape, list[tuple[Shape, int]]] = {}
    for worker in mesh.workers:
        coordinate = mesh.coordinate(worker)
        rest = tuple([along for position, along in enumerate(coordinate) if position not in positions])
        groups.setdefault(rest, []).append((tuple([coordinate[position] for position in positions]), worker))
    ordered = [tuple([worker for _, worker in sorted(members)]) for members in groups.values()]
    return {worker: members for members in ordered for worker in members}


# --- Specs ------------------------------------------------------------------------------------------------------------


class ShardingSpec:
    """The part of a tensor that each worker of a mesh holds. Equal specs are one object.

    - `dims`: per tensor dim, the axes that cut it
    - `partial`: the axes along which workers hold partial values, to be reduced by `kind`; the tensor is replicated
      along axes in neither
    - `cuts`: per dim, the intervals of the shards, or None for the default

    A spec is *skewed* if an axis cuts several dims: the shards of these dims are then chosen together, as in Cannon's
    algorithm, where worker (i, j) holds block (i, i + j). Only steps within an op have such layouts.

    >>> mesh = gt.DeviceMesh((2, 2), ("dp", "tp"))
    >>> spec = gt.ShardingSpec(mesh, [["dp"], []], partial=["tp"])
    >>> print(spec)
    dp, - + tp
    >>> spec.shards(0), spec.is_whole
    (2, False)
    """

    __slots__ = ("__weakref__", "cuts", "dims", "kind", "mesh", "partial")
    mesh: DeviceMesh
    dims: tuple[DimSpec, ...]
    partial: tuple[str, ...]
    kind: str
    cuts: tuple[Cuts | None, ...]

    def __new__(
        cls,
        mesh: DeviceMesh,
        dims: Sequence[Sequence[str]],
        partial: Sequence[str] = (),
        kind: str = "sum",
        cuts: Sequence[Cuts | None] = (),
    ) -> ShardingSpec:
        return _interned_spec(mesh, tuple(map(tuple, dims)), tuple(partial), kind, tuple(cuts))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that cut a dim."""
        return tuple(dict.fromkeys([axis for dim in self.dims for axis in dim]))

    @property
    def is_skewed(self) -> bool:
        """Whether some axis cuts several dims."""
        return sum(map(len, self.dims)) > len(self.axes)

    @property
    def is_whole(self) -> bool:
        """Whether every worker of the mesh holds the whole tensor: `Replicate()` along every axis."""
        return not self.partial and not any(self.dims)

    def counts(self, dim: int) -> tuple[int, ...]:
        return tuple([self.mesh.axis_size(axis) for axis in self.dims[dim]])

    def shards(self, dim: int) -> int:
        """The number of shards of a dim."""
        return math.prod(self.counts(dim))

    def intervals(self, shape: Shape, dim: int) -> Cuts:
        """The interval of each shard of a dim, in the order of its axes."""
        return self.cuts[dim] or balanced_cuts(shape[dim], self.counts(dim))

    def replace(self, **changes: Any) -> ShardingSpec:
        fields: dict[str, Any] = {
            "mesh": self.mesh,
            "dims": self.dims,
            "partial": self.partial,
            "kind": self.kind,
            "cuts": self.cuts,
        }
        return ShardingSpec(**(fields | changes))

    def is_partition(self, shape: Shape) -> bool:
        """Whether the shards cover a tensor without overlap. The shards of a copy made for one op may not: they may
        skip elements, or overlap in halos."""
        parts = zip(self.cuts, shape, strict=True)
        return not self.is_skewed and all(cuts is None or is_partition(cuts, size) for cuts, size in parts)

    def normal(self, shape: Shape) -> ShardingSpec:
        """The same spec with None for cuts that equal the default."""
        if not any(self.cuts) or self.is_skewed:
            return self
        cuts = [
            None if cut == balanced_cuts(size, self.counts(dim)) else cut
            for dim, (cut, size) in enumerate(zip(self.cuts, shape, strict=True))
        ]
        return self.replace(cuts=cuts)

    def record(self) -> SpecRecord:
        return SpecRecord(self.mesh.record(), self.dims, self.partial, self.kind, self.cuts)

    def __reduce__(self) -> Any:
        return ShardingSpec, (self.mesh, self.dims, self.partial, self.kind, self.cuts)

    def __str__(self) -> str:
        dims = [_print_dim(axes, cuts) for axes, cuts in zip(self.dims, self.cuts, strict=True)]
        return print_layout(dims, self.partial, self.kind)

    def __repr__(self) -> str:
        return f"ShardingSpec({str(self)!r} on {self.mesh})"

    def _repr_html_(self) -> str:
        return spec_html(self)


def _print_dim(axes: DimSpec, cuts: Cuts | None) -> str:
    if not axes:
        return "-"
    return " ".join(axes) + ("" if cuts is None else "[" + " ".join(f"{start}:{stop}" for start, stop in cuts) + "]")


def print_layout(dims: list[str], partial: tuple[str, ...], kind: str) -> str:
    """The text of a spec or constraint, from the texts of its dims."""
    text = ", ".join(dims)
    if not partial:
        return text
    return f"{text} + {' '.join(partial)}".lstrip() + ("" if kind == "sum" else f":{kind}")


@functools.lru_cache(maxsize=1 << 16)
def _interned_spec(
    mesh: DeviceMesh, dims: tuple[DimSpec, ...], partial: tuple[str, ...], kind: str, cuts: tuple[Cuts | None, ...]
) -> ShardingSpec:
    """The one object for a spec. Cached, since the same few specs are constructed over and over."""
    if cuts and len(cuts) != len(dims):
        raise LayoutError(f"cuts of {len(cuts)} dims do not fit a spec of {len(dims)} dims")
    in_order = tuple(sorted(partial, key=mesh.axis_names.index)) if _known(mesh, partial) else partial
    own_cuts = tuple([cut if axes else None for cut, axes in zip(cuts or (None,) * len(dims), dims, strict=True)])
    key = (mesh, dims, in_order, kind if partial else "sum", own_cuts)
    found = _specs.get(key)
    if found is None:
        _check_spec(*key)
        found = object.__new__(ShardingSpec)
        found.mesh, found.dims, found.partial, found.kind, found.cuts = key
        _specs[key] = found
    return found


_specs: WeakValueDictionary[Any, ShardingSpec] = WeakValueDictionary()


def _known(mesh: DeviceMesh, axes: Sequence[str]) -> bool:
    return all(axis in mesh.axis_names for axis in axes)


def _check_spec(
    mesh: DeviceMesh, dims: tuple[DimSpec, ...], partial: tuple[str, ...], kind: str, cuts: tuple[Cuts | None, ...]
) -> None:
    used = [axis for dim in dims for axis in dim] + list(partial)
    for axis in used:
        if axis not in mesh.axis_names:
            raise LayoutError(f"mesh {mesh} has no axis {axis!r}; it has {', '.join(mesh.axis_names) or 'none'}")
        if used.count(axis) > 1 and (axis in partial or not _has_own_cuts(axis, dims, cuts)):
            raise LayoutError(f"mesh axis {axis!r} is used twice in one spec: an axis cuts one dim, or is partial")
    if kind not in REDUCTIONS:
        raise LayoutError(f"{kind!r} is no reduction of a partial tensor; there are {', '.join(REDUCTIONS)}")
    for axes, intervals in zip(dims, cuts, strict=True):
        if intervals is not None and len(intervals) != math.prod([mesh.axis_size(axis) for axis in axes]):
            raise LayoutError(f"{len(intervals)} intervals do not fit a dim cut by {' '.join(axes)} of mesh {mesh}")
        for start, stop in intervals or ():
            if not 0 <= start <= stop:
                raise LayoutError(f"{start}:{stop} is no interval of a dim cut by {' '.join(axes)}")


def _has_own_cuts(axis: str, dims: tuple[DimSpec, ...], cuts: tuple[Cuts | None, ...]) -> bool:
    """Whether the shards along an axis are given in all dims that it cuts, and it cuts each once: a skewed spec."""
    cut = [(axes, own) for axes, own in zip(dims, cuts, strict=True) if axis in axes]
    return all(own is not None and axes.count(axis) == 1 for axes, own in cut)


def spec_of(record: SpecRecord) -> ShardingSpec:
    return ShardingSpec(mesh_of(record.mesh), record.dims, record.partial, record.kind, record.cuts)


def whole(mesh: DeviceMesh, rank: int) -> ShardingSpec:
    """The spec of a tensor that every worker of the mesh has whole: `Replicate()` along every axis."""
    return ShardingSpec(mesh, ((),) * rank)


# --- The shard of one worker ------------------------------------------------------------------------------------------


def shard_index(spec: ShardingSpec, dim: int, worker: int) -> int:
    """The index of a worker's shard along a dim."""
    coordinate = spec.mesh.coordinate(worker)
    index = 0
    for axis in spec.dims[dim]:
        index = index * spec.mesh.axis_size(axis) + coordinate[spec.mesh.axis_names.index(axis)]
    return index


def local_box(spec: ShardingSpec, shape: Shape, worker: int) -> Box:
    """The box of the tensor that a worker holds."""
    return tuple(
        [
            spec.intervals(shape, dim)[shard_index(spec, dim, worker)] if axes else (0, shape[dim])
            for dim, axes in enumerate(spec.dims)
        ]
    )


def local_slices(spec: ShardingSpec, shape: Shape, worker: int) -> tuple[slice, ...]:
    return tuple([slice(start, stop) for start, stop in local_box(spec, shape, worker)])


def compute_local_shape(spec: ShardingSpec, shape: Shape, worker: int) -> Shape:
    return box_shape(local_box(spec, shape, worker))


def compute_global_shape(spec: ShardingSpec, local_shapes: Mapping[int, Shape]) -> Shape:
    """The shape of the whole tensor, from the shapes of all its shards. Raises if they do not fit the spec."""
    shape = []
    for dim in range(len(spec.dims)):
        sizes = {shard_index(spec, dim, worker): local[dim] for worker, local in local_shapes.items()}
        if len(sizes) != spec.shards(dim):
            raise LayoutError(f"dim {dim} of {spec} has {spec.shards(dim)} shards; shapes of {len(sizes)} were given")
        shape.append(sum(sizes.values()))
    for worker, local in local_shapes.items():
        expected = compute_local_shape(spec, tuple(shape), worker)
        if expected != tuple(local):
            raise LayoutError(f"worker {worker} holds {tuple(local)}, but its shard of {shape} by {spec} is {expected}")
    return tuple(shape)


def largest_local_shape(spec: ShardingSpec, shape: Shape) -> Shape:
    """The largest size of a shard along each dim. Costs the same for any number of workers."""
    return tuple(
        [
            max(stop - start for start, stop in spec.intervals(shape, dim)) if axes else shape[dim]
            for dim, axes in enumerate(spec.dims)
        ]
    )
