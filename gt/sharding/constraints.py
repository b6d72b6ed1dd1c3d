"""How a tensor should be laid out. A constraint, unlike a spec, says nothing about bytes that exist."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from gt.sharding.spec import DeviceMesh, DimSpec, ShardingSpec, print_layout


class DimConstraint(NamedTuple):
    """The axes that should cut a dim. An `is_open` dim may be cut further. Lower priorities are propagated first."""

    axes: DimSpec = ()
    is_open: bool = True
    priority: int = 0


class Constraint(NamedTuple):
    """How a tensor should be laid out on a mesh. With `keeps_partial` a tensor that is partial along axes of the
    constraint is left as it is: it is reduced when its value is needed, to the layout that is needed then."""

    mesh: DeviceMesh
    dims: tuple[DimConstraint, ...]
    partial: tuple[str, ...] = ()
    kind: str = "sum"
    keeps_partial: bool = False

    def __str__(self) -> str:
        dims = [
            " ".join(dim.axes or ("-",)) + ("?" if dim.is_open else "") + (f"@{dim.priority}" if dim.priority else "")
            for dim in self.dims
        ]
        return print_layout(dims, self.partial, self.kind)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that should cut some dim."""
        return tuple([axis for dim in self.dims for axis in dim.axes])


Target: TypeAlias = ShardingSpec | Constraint | None
"""The layout that a result should have: exactly, in part, or any."""


def satisfy(constraint: Constraint, given: ShardingSpec) -> ShardingSpec:
    """The layout nearest to `given` that satisfies a constraint: the constraint's axes cut the dims that it names, and
    open dims keep their other axes."""
    constrained = set(constraint.axes)
    if constraint.keeps_partial and constrained.intersection(given.partial):
        return given
    dims, cuts = [], []
    for dim, axes, cut in zip(constraint.dims, given.dims, given.cuts, strict=True):
        others = tuple([axis for axis in axes if axis not in constrained]) if dim.is_open else ()
        stays = set(axes) == {*dim.axes, *others}
        dims.append(axes if stays else (*others, *dim.axes))  # existing shards are cut further
        cuts.append(cut if stays else None)
    partial = tuple([axis for axis in given.partial if axis not in constrained])
    return given.replace(dims=tuple(dims), cuts=tuple(cuts), partial=partial)
