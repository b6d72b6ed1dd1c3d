"""Where the bytes of a tensor are: meshes of workers, and which part of a tensor each of them holds.

A `ShardingSpec` is a fact about bytes. Shapes are always those of the whole tensor; what one worker holds of it follows
from the spec and the worker's place in the mesh, by the functions of this page alone.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from gt.core.errors import LayoutError
from gt.core.signatures import MeshRecord, SpecRecord

Shape: TypeAlias = tuple[int, ...]
Interval: TypeAlias = tuple[int, int]
Box: TypeAlias = tuple[Interval, ...]
"""Per dim, the first element and the one after the last."""

DimSpec: TypeAlias = tuple[str, ...]
"""The mesh axes that cut one tensor dim, major to minor."""

Cuts: TypeAlias = tuple[Interval, ...]
"""The interval of each shard along a dim, where it is not the default."""

REDUCTIONS = ("sum", "max", "min", "prod", "and", "or")


class DeviceMesh:
    """An N-D grid over any workers in any order. Equal meshes are one object, so they are compared by identity."""

    __slots__ = ("__weakref__", "_places", "axis_names", "name", "shape", "workers")
    shape: Shape
    axis_names: tuple[str, ...]
    workers: tuple[int, ...]
    name: str

    def __new__(
        cls, shape: Sequence[int], axis_names: Sequence[str] = (), workers: Sequence[int] = (), name: str = ""
    ) -> DeviceMesh:
        shape = tuple(shape)
        names = tuple(axis_names) or tuple([f"axis{place}" for place in range(len(shape))])
        ids = tuple(workers) or tuple(range(math.prod(shape)))
        key = (shape, names, ids, name)
        found = _meshes.get(key)
        if found is None:
            _check_mesh(shape, names, ids)
            found = super().__new__(cls)
            found.shape, found.axis_names, found.workers, found.name = key
            found._places = {worker: place for place, worker in enumerate(ids)}  # type: ignore[attr-defined]
            _meshes[key] = found
        return found

    @property
    def size(self) -> int:
        return len(self.workers)

    def axis_size(self, axis: str) -> int:
        return self.shape[self.axis_names.index(axis)]

    def coordinate(self, worker: int) -> Shape:
        """The place of a worker along each axis."""
        place: int = self._places[worker]  # type: ignore[attr-defined]
        coordinate = []
        for size in reversed(self.shape):
            place, along = divmod(place, size)
            coordinate.append(along)
        return tuple(reversed(coordinate))

    def __contains__(self, worker: int) -> bool:
        return worker in self._places  # type: ignore[attr-defined]

    def at(self, coordinate: Sequence[int]) -> int:
        place = 0
        for size, along in zip(self.shape, coordinate, strict=True):
            place = place * size + along
        return self.workers[place]

    def axis_group(self, worker: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The workers that differ from this one along `axes` only, in the order of those axes (major first)."""
        return _axis_groups(self, tuple(axes))[worker]

    def submesh(self, **fixed: int) -> DeviceMesh:
        """The part of the mesh where the named axes have the given coordinates; its axes are the remaining ones."""
        for axis, along in fixed.items():
            if axis not in self.axis_names:
                raise LayoutError(f"mesh {self} has no axis {axis!r}; it has {', '.join(self.axis_names)}")
            if not 0 <= along < self.axis_size(axis):
                raise LayoutError(f"axis {axis!r} of mesh {self} has coordinates 0 to {self.axis_size(axis) - 1}")
        kept = [place for place, axis in enumerate(self.axis_names) if axis not in fixed]
        workers = [
            worker
            for worker in self.workers
            if all(self.coordinate(worker)[self.axis_names.index(axis)] == along for axis, along in fixed.items())
        ]
        names = [self.axis_names[place] for place in kept]
        return DeviceMesh([self.shape[place] for place in kept], names, workers, self.name)

    def record(self) -> MeshRecord:
        return MeshRecord(self.shape, self.axis_names, self.workers, self.name)

    def __reduce__(self) -> Any:
        return DeviceMesh, (self.shape, self.axis_names, self.workers, self.name)

    def __str__(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in zip(self.axis_names, self.shape, strict=True))
        usual = self.workers == tuple(range(self.size))
        return f"{self.name}({axes})" + ("" if usual else f" of workers {list(self.workers)}")

    __repr__ = __str__


_meshes: WeakValueDictionary[Any, DeviceMesh] = WeakValueDictionary()
_NAME = re.compile(r"[A-Za-z_]\w*\Z")


def _check_mesh(shape: Shape, names: tuple[str, ...], workers: tuple[int, ...]) -> None:
    if len(names) != len(shape) or len(set(names)) != len(names):
        raise LayoutError(f"a mesh of shape {shape} needs {len(shape)} different axis names, not {names}")
    for name in names:
        if not _NAME.match(name):
            raise LayoutError(f"{name!r} cannot name a mesh axis: use letters, digits and underscores")
    if min(shape, default=1) < 1:
        raise LayoutError(f"a mesh has at least one worker along every axis; its shape cannot be {shape}")
    if math.prod(shape) != len(workers):
        raise LayoutError(f"a mesh of shape {shape} needs {math.prod(shape)} workers, not {len(workers)}")
    if len(set(workers)) != len(workers):
        raise LayoutError(f"a worker has one place in a mesh; {list(workers)} names one twice")


def mesh_of(record: MeshRecord) -> DeviceMesh:
    return DeviceMesh(record.shape, record.axis_names, record.workers, record.name)


@functools.lru_cache(maxsize=1024)
def _axis_groups(mesh: DeviceMesh, axes: tuple[str, ...]) -> dict[int, tuple[int, ...]]:
    places = [mesh.axis_names.index(axis) for axis in axes]
    groups: dict[Shape, list[tuple[Shape, int]]] = {}
    for worker in mesh.workers:
        coordinate = mesh.coordinate(worker)
        rest = tuple([along for place, along in enumerate(coordinate) if place not in places])
        groups.setdefault(rest, []).append((tuple([coordinate[place] for place in places]), worker))
    ordered = [tuple([worker for _, worker in sorted(members)]) for members in groups.values()]
    return {worker: members for members in ordered for worker in members}


# --- Cuts -------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=65536)
def balanced_cuts(size: int, counts: tuple[int, ...]) -> Cuts:
    """Where a dim is cut over axes of the given sizes, major first: the one rule of GT. Every shard gets its parent's
    share, rounded down or up, the larger ones first. No shard is empty unless the dim is smaller than the number of
    shards, and gathering the minor axis gives the default cuts of the others."""
    cuts: list[Interval] = [(0, size)]
    for count in counts:
        finer: list[Interval] = []
        for start, stop in cuts:
            share, more = divmod(stop - start, count)
            for place in range(count):
                end = start + share + (place < more)
                finer.append((start, end))
                start = end
        cuts = finer
    return tuple(cuts)


def is_partition(cuts: Cuts, size: int) -> bool:
    """Whether intervals, in any order, are all of a dim and share nothing; empty ones may be anywhere."""
    ordered = sorted([(start, stop) for start, stop in cuts if start < stop])
    return [0, *[stop for _, stop in ordered]] == [*[start for start, _ in ordered], size]


# --- Specs ------------------------------------------------------------------------------------------------------------


class ShardingSpec:
    """Which part of a tensor each worker of a mesh holds.

    `dims` names, per tensor dim, the axes that cut it. `partial` names the axes along which what is stored has to be
    reduced (by `kind`) to give the value. Along every other axis the tensor is replicated. `cuts` holds, per dim, the
    intervals of the shards where they are not the default. Equal specs are one object.
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
        """The axes that cut some dim."""
        return tuple([axis for dim in self.dims for axis in dim])

    @property
    def is_whole(self) -> bool:
        """Every worker of the mesh holds the value of the whole tensor."""
        return not self.partial and not any(self.dims)

    def counts(self, dim: int) -> tuple[int, ...]:
        return tuple([self.mesh.axis_size(axis) for axis in self.dims[dim]])

    def shards(self, dim: int) -> int:
        """Into how many shards a dim is cut."""
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
        """Whether the parts are all of a tensor and share nothing, as those of a tensor itself do. A copy that was made
        for an op may be less (an op that skips elements) or have parts that overlap (halos)."""
        return all(cuts is None or is_partition(cuts, size) for cuts, size in zip(self.cuts, shape, strict=True))

    def normal(self, shape: Shape) -> ShardingSpec:
        """The same spec with cuts that happen to be the default ones left out."""
        if not any(self.cuts):
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


def _print_dim(axes: DimSpec, cuts: Cuts | None) -> str:
    if not axes:
        return "-"
    return " ".join(axes) + ("" if cuts is None else "[" + " ".join(f"{start}:{stop}" for start, stop in cuts) + "]")


def print_layout(dims: list[str], partial: tuple[str, ...], kind: str) -> str:
    """A layout from the text of its dims; wishes print the same way."""
    text = ", ".join(dims)
    if not partial:
        return text
    return f"{text} + {' '.join(partial)}".lstrip() + ("" if kind == "sum" else f":{kind}")


@functools.lru_cache(maxsize=1 << 16)
def _interned_spec(
    mesh: DeviceMesh, dims: tuple[DimSpec, ...], partial: tuple[str, ...], kind: str, cuts: tuple[Cuts | None, ...]
) -> ShardingSpec:
    """The one spec that says this. Cached, since the same few are asked for again and again."""
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
        if used.count(axis) > 1:
            raise LayoutError(f"mesh axis {axis!r} is used twice in one spec: an axis cuts one dim, or is partial")
    if kind not in REDUCTIONS:
        raise LayoutError(f"{kind!r} is no reduction of a partial tensor; there are {', '.join(REDUCTIONS)}")
    for axes, intervals in zip(dims, cuts, strict=True):
        if intervals is not None and len(intervals) != math.prod([mesh.axis_size(axis) for axis in axes]):
            raise LayoutError(f"{len(intervals)} intervals do not fit a dim cut by {' '.join(axes)} of mesh {mesh}")
        for start, stop in intervals or ():
            if not 0 <= start <= stop:
                raise LayoutError(f"{start}:{stop} is no interval of a dim cut by {' '.join(axes)}")


def spec_of(record: SpecRecord) -> ShardingSpec:
    return ShardingSpec(mesh_of(record.mesh), record.dims, record.partial, record.kind, record.cuts)


def whole(mesh: DeviceMesh, rank: int) -> ShardingSpec:
    """Replicated on all of the mesh."""
    return ShardingSpec(mesh, ((),) * rank)


# --- What a worker holds ----------------------------------------------------------------------------------------------


def shard_index(spec: ShardingSpec, dim: int, worker: int) -> int:
    """Which shard of a dim a worker holds."""
    coordinate = spec.mesh.coordinate(worker)
    index = 0
    for axis in spec.dims[dim]:
        index = index * spec.mesh.axis_size(axis) + coordinate[spec.mesh.axis_names.index(axis)]
    return index


def local_box(spec: ShardingSpec, shape: Shape, worker: int) -> Box:
    """The part of the tensor that a worker holds."""
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
    """The shape of the tensor whose shards these are; every worker's shard has to fit."""
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
    """The most that a worker holds, by dim. Does not depend on the number of workers, unlike asking each of them."""
    return tuple(
        [
            max(stop - start for start, stop in spec.intervals(shape, dim)) if axes else shape[dim]
            for dim, axes in enumerate(spec.dims)
        ]
    )


def needs_reshard(shape: Shape, source: ShardingSpec, target: ShardingSpec) -> bool:
    """Whether bytes have to move, be cut or be reduced to get from one spec to the other."""
    if source is target:
        return False
    if source.mesh.workers != target.mesh.workers or (source.partial, source.kind) != (target.partial, target.kind):
        return True
    return any(local_box(source, shape, w) != local_box(target, shape, w) for w in source.mesh.workers)


def box_shape(box: Box) -> Shape:
    return tuple([stop - start for start, stop in box])


def box_elements(box: Box) -> int:
    return math.prod([max(stop - start, 0) for start, stop in box])


def intersect(a: Box, b: Box) -> Box | None:
    """The part that two boxes share; None where that is empty."""
    shared = tuple([(max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True)])
    return None if any(start >= stop for start, stop in shared) else shared
