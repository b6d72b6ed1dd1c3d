"""How a tensor should lie: a wish, which says nothing about bytes that exist. Those are the business of specs."""

from __future__ import annotations

from typing import NamedTuple

from gt.sharding.spec import DeviceMesh, DimSpec, ShardingSpec, print_layout


class DimConstraint(NamedTuple):
    """`axes` should cut the dim; an `is_open` dim may be cut further. Lower priorities are served first."""

    axes: DimSpec = ()
    is_open: bool = True
    priority: int = 0


class Constraint(NamedTuple):
    """How a tensor should be laid out. Unlike a spec it says nothing about bytes that exist."""

    mesh: DeviceMesh
    dims: tuple[DimConstraint, ...]
    partial: tuple[str, ...] = ()
    kind: str = "sum"

    def __str__(self) -> str:
        dims = [
            " ".join(wish.axes or ("-",))
            + ("?" if wish.is_open else "")
            + (f"@{wish.priority}" if wish.priority else "")
            for wish in self.dims
        ]
        return print_layout(dims, self.partial, self.kind)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the wish speaks of."""
        return tuple([axis for wish in self.dims for axis in wish.axes])


def fulfil(constraint: Constraint, given: ShardingSpec) -> ShardingSpec:
    """The layout that is nearest to a given one and as wished: axes that the wish speaks of cut the dims that it names,
    and what it leaves open stays as it is."""
    spoken = set(constraint.axes)
    dims, cuts = [], []
    for wish, axes, cut in zip(constraint.dims, given.dims, given.cuts, strict=True):
        others = tuple([axis for axis in axes if axis not in spoken]) if wish.is_open else ()
        stays = set(axes) == {*wish.axes, *others}
        dims.append(axes if stays else (*others, *wish.axes))  # what is cut already is cut further
        cuts.append(cut if stays else None)
    partial = tuple([axis for axis in given.partial if axis not in spoken])
    return given.replace(dims=tuple(dims), cuts=tuple(cuts), partial=partial)
