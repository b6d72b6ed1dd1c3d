"""Layouts as DTensor writes them: one placement for each axis of a mesh."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from gt.core.errors import LayoutError
from gt.core.meta import TensorMeta
from gt.core.signatures import AlgorithmRequest
from gt.sharding.boxes import is_partition
from gt.sharding.spec import REDUCTIONS, DeviceMesh, ShardingSpec
from gt.sharding.spec_text import parse_spec


class Shard(NamedTuple):
    """The axis cuts a dim of the tensor. If several axes cut one dim, the first is the major one.

    >>> gt.init(workers=2, mode="virtual")
    >>> gt.ones(4, 6, mesh=gt.mesh(2), placements=gt.Shard(0)).shards()[1].slice[0]
    slice(2, 4, None)
    """

    dim: int


class Replicate(NamedTuple):
    """All workers along the axis hold the same elements.

    >>> gt.init(workers=2, mode="virtual")
    >>> gt.ones(4, mesh=gt.mesh(2), placements=gt.Replicate()).shards()[1].shape
    (4,)
    """


class Partial(NamedTuple):
    """The value is the reduction of the tensors that the workers along the axis hold.

    >>> gt.init(workers=2, mode="virtual")
    >>> x = gt.ones(4, mesh=gt.mesh(2, ("tp",)), placements=gt.Partial())
    >>> x.spec, x.tolist()
    (ShardingSpec('- + tp' on (tp=2)), [1.0, 1.0, 1.0, 1.0])
    """

    kind: str = "sum"


Placement: TypeAlias = Shard | Replicate | Partial
Placements: TypeAlias = Placement | Sequence[Placement] | str | ShardingSpec
"""A layout as users write it: a placement per axis (one alone for a 1-D mesh), the text of a spec, or a spec."""


class Layout(NamedTuple):
    """A layout requested by the user, for tensors of any rank."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...] | str | ShardingSpec

    def spec(self, meta: TensorMeta) -> ShardingSpec:
        return spec_from(self.placements, self.mesh, meta)


class OpRequest(NamedTuple):
    """What the user asks of one op: the layout of its results (None: any), and the algorithm by which it runs. With
    `is_undivided` an op that torch composes of others is one instruction."""

    layout: Layout | None = None
    algorithm: AlgorithmRequest | None = None
    is_undivided: bool = False


def require_mesh(mesh: Any) -> DeviceMesh:
    if mesh is None:
        raise LayoutError(
            "no mesh is given, and none is open: say mesh=gt.mesh((2, 2), ('dp', 'tp')), or once for several calls, "
            "with gt.open_mesh((2, 2), ('dp', 'tp')):"
        )
    if not isinstance(mesh, DeviceMesh):
        raise LayoutError(
            f"{mesh!r} is not a mesh of workers: make one, with gt.mesh(2) or gt.mesh((2, 2), ('dp', 'tp'))"
        )
    return mesh


def placement_per_axis(placements: Any) -> tuple[Placement, ...]:
    """Placements that are neither the text of a spec nor a spec; one placement may be written without a list."""
    given = placements if isinstance(placements, Iterable) and not _is_placement(placements) else [placements]
    each = tuple([_own_placement(placement) for placement in given])
    for placement in each:
        if not _is_placement(placement):
            raise LayoutError(f"{placement!r} is not a placement: use gt.Shard(dim), gt.Replicate() or gt.Partial()")
        if isinstance(placement, Shard):
            _require_dim_number(placement)
    return each


_TORCH_REDUCTIONS = {"product": "prod"}


def _own_placement(placement: Any) -> Any:
    """The placement that one of torch's DTensor means; anything else as it is. Recognised by the name of its class, as
    importing torch.distributed.tensor takes a second."""
    if not type(placement).__module__.startswith("torch.distributed"):
        return placement
    kind = type(placement).__name__
    if kind == "Shard":
        return Shard(placement.dim)
    if kind == "Replicate":
        return Replicate()
    reduction = _TORCH_REDUCTIONS.get(placement.reduce_op, placement.reduce_op) if kind == "Partial" else kind
    if reduction not in REDUCTIONS:
        raise LayoutError(
            f"GT has no placement like torch's {placement}: use Shard, Replicate, or Partial by sum, product, max, min"
        )
    return Partial(reduction)


def _is_placement(value: Any) -> bool:
    return isinstance(value, Shard | Replicate | Partial)


def _require_dim_number(placement: Shard) -> None:
    try:
        operator.index(placement.dim)
    except TypeError:
        raise LayoutError(
            f"{placement} names no dim: a dim is a whole number, from 0, or from -1 for the last, as in gt.Shard(0)"
        ) from None


def spec_from(placements: Placements, mesh: DeviceMesh, meta: TensorMeta) -> ShardingSpec:
    """The spec of a tensor with these placements."""
    spec = _spec_from(placements, mesh, len(meta.shape))
    if spec.mesh is not mesh:
        raise LayoutError(f"[{spec}] is a spec of mesh {spec.mesh}, not of mesh {mesh}")
    return require_fit(spec, meta).normal(meta.shape)


def require_fit(spec: ShardingSpec, meta: TensorMeta) -> ShardingSpec:
    """Raise unless a layout fits a tensor."""
    shape = meta.shape
    if len(spec.dims) != len(shape):
        raise LayoutError(f"[{spec}] lays out a tensor of {len(spec.dims)} dims, and this one has {len(shape)}")
    if spec.is_skewed:
        raise LayoutError(f"[{spec}] cuts several dims by one axis, which leaves out elements: an axis cuts one dim")
    for dim, cuts in enumerate(spec.cuts):
        if cuts is not None and not is_partition(cuts, shape[dim]):
            raise LayoutError(f"[{spec}] does not cut dim {dim}, which has {shape[dim]} elements, into disjoint parts")
    if spec.partial and spec.kind in ("and", "or") and meta.dtype != "bool":
        raise LayoutError(f"[{spec}] reduces truth values, and this tensor is of {meta.dtype}")
    if spec.partial and spec.kind in ("max", "min") and meta.dtype.startswith("complex"):
        raise LayoutError(
            f"[{spec}] takes the {spec.kind} of partial values, and this tensor is of {meta.dtype}, "
            f"which has no order: make it partial by sum or prod, or not partial"
        )
    return spec


def _spec_from(placements: Placements, mesh: DeviceMesh, rank: int) -> ShardingSpec:
    if isinstance(placements, ShardingSpec):
        return placements
    if isinstance(placements, str):
        return parse_spec(placements, mesh)
    each = placement_per_axis(placements)
    if len(each) != len(mesh.shape):
        raise LayoutError(f"mesh {mesh} needs a placement for each of its {len(mesh.shape)} axes, not {len(each)}")
    dims: list[list[str]] = [[] for _ in range(rank)]
    partial: dict[str, str] = {}
    for axis, placement in zip(mesh.axis_names, each, strict=True):
        if isinstance(placement, Shard):
            if not -rank <= placement.dim < rank:
                raise LayoutError(f"{placement} names a dim that a tensor of {rank} dims does not have")
            dims[placement.dim].append(axis)
        elif isinstance(placement, Partial):
            partial[axis] = placement.kind
    if len(set(partial.values())) > 1:
        given = ", ".join([f"{axis}: {kind}" for axis, kind in partial.items()])
        raise LayoutError(
            f"a tensor cannot be partial by different kinds at once ({given}): which of them is reduced first would "
            f"change its value; make all partial axes of one kind, or replicate along some of them"
        )
    return ShardingSpec(mesh, dims, tuple(partial), next(iter(partial.values()), "sum"))


def placements_of(spec: ShardingSpec) -> tuple[Placement, ...]:
    """A placement for each axis of the spec's mesh. The order of axes that cut one dim, and cuts other than the default
    ones, are lost."""
    dim_of = {axis: dim for dim, axes in enumerate(spec.dims) for axis in axes}
    return tuple(
        [
            Shard(dim_of[axis]) if axis in dim_of else Partial(spec.kind) if axis in spec.partial else Replicate()
            for axis in spec.mesh.axis_names
        ]
    )
