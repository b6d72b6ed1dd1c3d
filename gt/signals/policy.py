"""Policies: the layouts that a scope asks for, from the record that the client sends to the dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

from gt.core.errors import LayoutError
from gt.core.signatures import PolicyRecord
from gt.sharding.boxes import Shape
from gt.sharding.constraints import Constraint, DimConstraint, Target
from gt.sharding.spec import DeviceMesh, DimSpec, ShardingSpec, mesh_of


class Policy:
    """Where the ops of a scope run, and the layouts of their results. Equal policies are one object, compared by
    identity.

    - `mesh`: where the ops run
    - `places`: whether tensors created in the scope keep their layout; if False, the next scope that uses such a tensor
      moves it for good
    """

    __slots__ = ("__weakref__", "_record", "mesh", "places")
    mesh: DeviceMesh
    places: bool
    _record: PolicyRecord

    def __new__(cls, record: PolicyRecord) -> Policy:
        found = _policies.get(record)
        if found is None:
            mesh = mesh_of(record.mesh)
            _check_axes(record, mesh)
            found = super().__new__(cls)
            found.mesh, found.places, found._record = mesh, record.places, record
            _policies[record] = found
        return found

    def __reduce__(self) -> tuple[type[Policy], tuple[PolicyRecord]]:
        return Policy, (self._record,)

    def target(self, shape: Shape) -> Target:
        """The layout that a result of an op in the scope should have; None if the scope does not constrain results."""
        if not self._record.constrains:
            return None
        dims = self._dims(shape)
        if self._record.closed:
            return ShardingSpec(self.mesh, dims)
        if not any(dims):
            return None
        wanted = tuple([DimConstraint(axes) for axes in dims])
        return Constraint(self.mesh, wanted, keeps_partial=self._record.keeps_partial)

    def layout(self, shape: Shape) -> ShardingSpec:
        """The layout of a tensor that is created in the scope."""
        return ShardingSpec(self.mesh, self._dims(shape))

    def _dims(self, shape: Shape) -> list[DimSpec]:
        """The axes that cut each dim. A dim of one element is not cut, since it will be broadcast."""
        aligned = align_dims(self._record.lead, self._record.tail, len(shape))
        return [
            tuple([axis for axis in axes if self.mesh.axis_size(axis) > 1]) if size > 1 else ()
            for axes, size in zip(aligned, shape, strict=True)
        ]


_policies: WeakValueDictionary[PolicyRecord, Policy] = WeakValueDictionary()


def _check_axes(record: PolicyRecord, mesh: DeviceMesh) -> None:
    """Raise unless the mesh has all axes of a policy and each cuts one dim."""
    axes = [axis for dim in (*record.lead, *record.tail) for axis in dim]
    unknown = [axis for axis in axes if axis not in mesh.axis_names]
    if unknown or len(set(axes)) < len(axes):
        raise LayoutError(f"a scope cannot cut dims along axes {axes} of the mesh {mesh}; each axis of it cuts one dim")


def align_dims(lead: Sequence[DimSpec], tail: Sequence[DimSpec], rank: int) -> tuple[DimSpec, ...]:
    """The axes of each dim of a tensor, from those of the first and of the last dims. Axes of dims that the tensor does
    not have are left out."""
    first = tuple(lead[:rank])
    rest = rank - len(first)
    last = tuple(tail[len(tail) - min(rest, len(tail)) :])
    return (*first, *[()] * (rest - len(last)), *last)
