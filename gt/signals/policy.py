"""What a scope asks of the ops in it: from the record that the dispatcher gets to wishes for results."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.signatures import PolicyRecord
from gt.sharding.spec import DimSpec, Shape, ShardingSpec, mesh_of
from gt.sharding.wishes import Constraint, DimWish


class Policy:
    """What a scope asks of the ops in it. Compared by identity: there is one for each definition of a scope."""

    __slots__ = ("_record", "asks", "mesh", "settles")

    def __init__(self, record: PolicyRecord) -> None:
        self.mesh = mesh_of(record.mesh)
        self.asks = record.asks
        self.settles = record.settles
        self._record = record
        for axis in (axis for dim in (*record.lead, *record.tail) for axis in dim):
            self.mesh.axis_size(axis)  # raises for an axis that the mesh does not have

    def wish(self, shape: Shape) -> ShardingSpec | Constraint | None:
        """How a result of this shape is to be laid out, where the scope asks for anything."""
        if not self.asks:
            return None
        dims = self._dims(shape)
        if self._record.closed:
            return ShardingSpec(self.mesh, dims)
        return Constraint(self.mesh, tuple([DimWish(axes) for axes in dims])) if any(dims) else None

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


def place_dims(lead: Sequence[DimSpec], tail: Sequence[DimSpec], rank: int) -> tuple[DimSpec, ...]:
    """The axes of each dim of a tensor. What is meant for dims that it does not have is left out."""
    first = tuple(lead[:rank])
    room = rank - len(first)
    last = tuple(tail[len(tail) - min(room, len(tail)) :])
    return (*first, *[()] * (room - len(last)), *last)
