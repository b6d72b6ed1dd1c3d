"""Records of tensors: with a value, without one, and before a failed write. `State` owns and changes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gt.core.meta import ITEM_BYTES, TensorMeta
from gt.dispatcher.instruction_errors import Cause
from gt.dispatcher.planner import TensorMove
from gt.sharding.cost import memory_bytes
from gt.sharding.spec import DeviceMesh, ShardingSpec, whole


class TensorRecord(NamedTuple):
    """A tensor on workers. Many tensors share one record, so it has no id. `nbytes` is the largest number of bytes that
    one worker holds of it. `placed`: the user or a scope has chosen the layout; any other tensor is moved for good by
    the first scope that uses it. One that was `created` in a scope has the layout of that, until the first use shows
    that it is needed whole."""

    meta: TensorMeta
    spec: ShardingSpec
    nbytes: int
    placed: bool
    created: bool = False

    @classmethod
    def of(cls, meta: TensorMeta, spec: ShardingSpec, placed: bool | None = None) -> TensorRecord:
        """With `placed` None, a tensor on several workers counts as placed and one on a single worker does not."""
        nbytes = memory_bytes(spec, meta.shape, ITEM_BYTES[meta.dtype])
        return cls(meta, spec, nbytes, spec.mesh.size > 1 if placed is None else placed)

    def may_move_to(self, spec: ShardingSpec) -> bool:
        """Whether a scope that needs another layout moves the tensor for good. One that a scope has cut when it was
        created is moved only if its workers hold their parts then too, so that no later use of these moves more."""
        if self.placed:
            return False
        return not self.created or (spec.is_whole and set(spec.mesh.workers) >= set(self.spec.mesh.workers))

    def with_placing(self, other: TensorRecord) -> TensorRecord:
        """As placed as another tensor: the version before."""
        if (self.placed, self.created) == (other.placed, other.created):
            return self
        return self._replace(placed=other.placed, created=other.created)


@dataclass
class SessionUse:
    """The tensors of a session, with a value, and their bytes on each worker of a mesh, copies included."""

    tensors: int = 0
    bytes_on: dict[DeviceMesh, int] = field(default_factory=dict)

    def add(self, tensors: Sequence[TensorRecord]) -> None:
        """Count new tensors."""
        self.tensors += len(tensors)
        for tensor in tensors:
            mesh = tensor.spec.mesh
            self.bytes_on[mesh] = self.bytes_on.get(mesh, 0) + tensor.nbytes

    def take(self, tensor: TensorRecord) -> None:
        """Count a tensor no more."""
        self.tensors -= 1
        self.bytes_on[tensor.spec.mesh] -= tensor.nbytes

    def bytes_at(self, worker: int) -> int:
        return sum(nbytes for mesh, nbytes in self.bytes_on.items() if nbytes and worker in mesh)


class MissingValue(NamedTuple):
    """A tensor without a value, and the cause."""

    meta: TensorMeta
    cause: Cause


class PreviousValue(NamedTuple):
    """The value of a tensor before a write that failed: `ident` is its id on the workers, `until` the id that the first
    failed write should have given it."""

    ident: int
    tensor: TensorRecord
    until: int


class GradientRecord(NamedTuple):
    """A gradient of a parameter, partial or reduced already: the move that reduces it to the layout of its parameter,
    the key of that move's exchange, which gradients with the same key may share, and the bytes that a worker holds of
    the gradient while it is partial."""

    move: TensorMove
    exchange: tuple[object, ...]
    nbytes: int


class PublishedTensor(NamedTuple):
    """A value that a session has published: the id of this version, the session that holds it, and the names of other
    keys whose sessions may subscribe."""

    ident: int
    session: int
    to: tuple[str, ...]


class Losses(NamedTuple):
    """Consequences of a lost worker. `useless` are parts on other workers that must be freed, with their meshes.
    `promoted` are tensors whose copy takes their place, with the ids of the copies. `missing` have no value now."""

    useless: list[tuple[int, DeviceMesh]]
    promoted: list[tuple[int, int]]
    missing: list[tuple[int, TensorMeta]]


def mesh_without(mesh: DeviceMesh, *workers: int) -> DeviceMesh | None:
    """The other workers of a mesh as a one-dimensional mesh; None if there are none."""
    rest = [member for member in mesh.workers if member not in workers]
    return mesh.subset([len(rest)], ["w"], rest) if rest else None


def spec_without(spec: ShardingSpec, worker: int) -> ShardingSpec | None:
    """The layout of a tensor on workers of its mesh that hold all of it without a lost one; None if elements are lost.

    Of a tensor that is not whole these are the workers at other coordinates of an axis along which it is replicated:
    of the longest such axis, because all workers at the coordinate of the lost one are left out."""
    mesh = spec.mesh
    if spec.is_whole:
        rest = mesh_without(mesh, worker)
        return None if rest is None else whole(rest, len(spec.dims))
    size, axis = max(
        [(mesh.axis_size(axis), axis) for axis in mesh.axis_names if axis not in (*spec.axes, *spec.partial)],
        default=(1, ""),
    )
    if size == 1:
        return None
    position = mesh.axis_names.index(axis)
    lost = mesh.coordinate(worker)[position]
    workers = [member for member in mesh.workers if mesh.coordinate(member)[position] != lost]
    shape = [size - (name == axis) for name, size in zip(mesh.axis_names, mesh.shape, strict=True)]
    return spec.replace(mesh=mesh.subset(shape, mesh.axis_names, workers))


def spec_on(mesh: DeviceMesh, tensor: TensorRecord) -> ShardingSpec:
    """The layout of a tensor on another mesh with the same axes, which may be shorter. A partial one is reduced."""
    spec, shape = tensor.spec, tensor.meta.shape
    kept = [all(mesh.axis_size(axis) == spec.mesh.axis_size(axis) for axis in axes) for axes in spec.dims]
    cuts = [own if is_kept else None for own, is_kept in zip(spec.cuts, kept, strict=True)]
    return spec.replace(mesh=mesh, partial=(), cuts=cuts).normal(shape)
