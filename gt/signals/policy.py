"""What a scope asks of the ops in it: from the record that the dispatcher gets to wishes for results."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

from gt.core.errors import LayoutError
from gt.core.signatures import PolicyRecord
from gt.sharding.constraints import Constraint, DimConstraint
from gt.sharding.spec import DeviceMesh, DimSpec, Shape, ShardingSpec, mesh_of


class Policy:
    """What a scope asks of the ops in it. Equal policies are one object, so they are compared by identity."""

    __slots__ = ("__weakref__", "_record", "asks", "mesh", "settles")
    mesh: DeviceMesh
    asks: bool
    settles: bool
    _record: PolicyRecord

    def __new__(cls, record: PolicyRecord) -> Policy:
        found = _policies.get(record)
        if found is None:
            mesh = mesh_of(record.mesh)
            _check_axes(record, mesh)
            found = super().__new__(cls)
            found.mesh, found.asks, found.settles, found._record = mesh, record.asks, record.settles, record
            _policies[record] = found
        return found

    def __reduce__(self) -> tuple[type[Policy], tuple[PolicyRecord]]:
        return Policy, (self._record,)

    def wish(self, shape: Shape) -> ShardingSpec | Constraint | None:
        """How a result of this shape is to be laid out, where the scope asks for anything."""
        if not self.asks:
            return None
        dims = self._dims(shape)
        if self._record.closed:
            return ShardingSpec(self.mesh, dims)
        return Constraint(self.mesh, tuple([DimConstraint(axes) for axes in dims])) if any(dims) else None

    def layout(self, shape: Shape) -> ShardingSpec:
        """How a tensor that is created in the scope is laid out."""
        return ShardingSpec(self.mesh, self._dims(shape))

    def _dims(self, shape: Shape) -> list[DimSpec]:
        """A dim of one element is not cut: it is there to be broadcast."""
        placed = place_dims(self._record.lead, self._record.tail, len(shape))
        return [
            tuple([axis for axis in axes if self.mesh.axis_size(axis) > 1]) if size > 1 else ()
            for axes, size in zip(placed, shape, strict=True)
        ]


_policies: WeakValueDictionary[PolicyRecord, Policy] = WeakValueDictionary()


def _check_axes(record: PolicyRecord, mesh: DeviceMesh) -> None:
    """The dims of a tensor are cut along axes that the mesh has, and each along others."""
    axes = [axis for dim in (*record.lead, *record.tail) for axis in dim]
    unknown = [axis for axis in axes if axis not in mesh.axis_names]
    if unknown or len(set(axes)) < len(axes):
        raise LayoutError(f"a scope cannot cut dims along axes {axes} of the mesh {mesh}; each axis of it cuts one dim")


def place_dims(lead: Sequence[DimSpec], tail: Sequence[DimSpec], rank: int) -> tuple[DimSpec, ...]:
    """The axes of each dim of a tensor. What is meant for dims that it does not have is left out."""
    first = tuple(lead[:rank])
    room = rank - len(first)
    last = tuple(tail[len(tail) - min(room, len(tail)) :])
    return (*first, *[()] * (room - len(last)), *last)
