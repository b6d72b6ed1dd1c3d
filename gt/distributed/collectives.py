"""Collectives by name, for programs that change layouts explicitly. Each is a change of layout along axes of a mesh:
none changes a value, and none does anything where the tensor lies so already.

Without the keyword that says where (`axis`, `mesh`, `to`) a call is one of torch.distributed's function of this name: a
script that does `import gt as torch` gets torch's own behaviour with plain tensors, and an error with GT tensors that
says what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch.distributed

from gt.client.tensor import Tensor, to_gt
from gt.client.transfers import tensor_of
from gt.core.errors import LayoutError
from gt.core.tracebacks import ends_on_users_line
from gt.sharding.placements import require_mesh
from gt.sharding.spec import DeviceMesh, ShardingSpec, whole

Axes: TypeAlias = str | Sequence[str]


@ends_on_users_line
def all_gather(x: Any, *args: Any, axis: Axes | None = None, **kwargs: Any) -> Any:
    """The tensor, no longer cut along an axis: each worker along it gets the parts of all.

    >>> gt.init(workers=2, mode="virtual")
    >>> x = gt.distribute(torch.ones(4, 4), gt.mesh(2, ("x",)), "x, -")
    >>> gt.distributed.all_gather(x, axis="x").spec
    ShardingSpec('-, -' on (x=2))
    """
    if axis is None:
        return torch.distributed.all_gather(x, *args, **kwargs)
    own = to_gt(x)
    return _moved(own, _without(own.spec, _axes(own.spec, axis), is_reduced=False))


@ends_on_users_line
def all_reduce(x: Any, *args: Any, axis: Axes | None = None, **kwargs: Any) -> Any:
    """The tensor, no longer partial along an axis: each worker along it gets the reduced value.

    >>> gt.init(workers=2, mode="virtual")
    >>> x = gt.distribute(torch.ones(4, 4), gt.mesh(2, ("x",)), "-, - + x")
    >>> gt.distributed.all_reduce(x, axis="x").spec
    ShardingSpec('-, -' on (x=2))
    """
    if axis is None:
        return torch.distributed.all_reduce(x, *args, **kwargs)
    own = to_gt(x)
    spec, axes = own.spec, _axes(own.spec, axis)
    return _moved(own, spec.replace(partial=[each for each in spec.partial if each not in axes]))


@ends_on_users_line
def reduce_scatter(x: Any, *args: Any, axis: Axes | None = None, dim: int = 0, **kwargs: Any) -> Any:
    """The tensor with a dim cut along an axis, along which it was partial: each worker along it gets a part of the
    reduced value.

    >>> gt.init(workers=2, mode="virtual")
    >>> x = gt.distribute(torch.ones(4, 4), gt.mesh(2, ("x",)), "-, - + x")
    >>> gt.distributed.reduce_scatter(x, axis="x", dim=1).spec
    ShardingSpec('-, x' on (x=2))
    """
    if axis is None:
        return torch.distributed.reduce_scatter(x, *args, **kwargs)
    return _cut(to_gt(x), axis, dim)


@ends_on_users_line
def all_to_all(x: Any, *args: Any, axis: Axes | None = None, dim: int = 0, **kwargs: Any) -> Any:
    """The tensor with a dim cut along an axis, which has cut another dim before.

    >>> gt.init(workers=2, mode="virtual")
    >>> x = gt.distribute(torch.ones(4, 4), gt.mesh(2, ("x",)), "x, -")
    >>> gt.distributed.all_to_all(x, axis="x", dim=1).spec
    ShardingSpec('-, x' on (x=2))
    """
    if axis is None:
        return torch.distributed.all_to_all(x, *args, **kwargs)
    return _cut(to_gt(x), axis, dim)


@ends_on_users_line
def broadcast(x: Any, *args: Any, mesh: DeviceMesh | None = None, **kwargs: Any) -> Any:
    """The tensor, whole on every worker of a mesh.

    >>> gt.init(workers=2, mode="virtual")
    >>> mesh = gt.mesh(2, ("x",))
    >>> gt.distributed.broadcast(torch.ones(4), mesh=mesh).spec.is_whole
    True
    """
    if mesh is None:
        return torch.distributed.broadcast(x, *args, **kwargs)
    own = to_gt(tensor_of(x))
    return _moved(own, whole(require_mesh(mesh), own.dim()))


@ends_on_users_line
def send(x: Any, *args: Any, to: int | DeviceMesh | None = None, **kwargs: Any) -> Any:
    """The tensor on other workers: whole on one, or in the same layout on a mesh of the same shape.

    >>> gt.init(workers=2, mode="virtual")
    >>> x = gt.distribute(torch.ones(4, 4), gt.mesh(2, ("x",)), "x, -")
    >>> gt.distributed.send(x, to=1).spec.mesh.workers
    (1,)
    """
    if to is None:
        return torch.distributed.send(x, *args, **kwargs)
    own = to_gt(tensor_of(x))
    spec = own.spec
    if isinstance(to, int) and not isinstance(to, bool):
        return _moved(own, whole(DeviceMesh((1,), ("worker",), (to,)), own.dim()))
    if not isinstance(to, DeviceMesh):
        raise LayoutError(f"to={to!r} is neither the number of a worker nor a mesh")
    if (to.shape, to.axis_names) != (spec.mesh.shape, spec.mesh.axis_names):
        raise LayoutError(f"a tensor on mesh {spec.mesh} keeps its layout on a mesh of the same axes, not on {to}")
    return _moved(own, spec.replace(mesh=to))


def _axes(spec: ShardingSpec, axis: Axes) -> tuple[str, ...]:
    if not isinstance(axis, Iterable):
        raise LayoutError(
            f"axis={axis!r} is no name of an axis; mesh {spec.mesh} has {', '.join(spec.mesh.axis_names)}"
        )
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    for each in axes:
        if each not in spec.mesh.axis_names:
            raise LayoutError(f"mesh {spec.mesh} has no axis {each!r}; it has {', '.join(spec.mesh.axis_names)}")
    return axes


def _without(spec: ShardingSpec, axes: Sequence[str], *, is_reduced: bool) -> ShardingSpec:
    """The layout without axes that cut dims, and if `is_reduced` without partial ones."""
    dims = [tuple([each for each in dim if each not in axes]) for dim in spec.dims]
    cuts = [cut if dim == new else None for dim, new, cut in zip(spec.dims, dims, spec.cuts, strict=True)]
    partial = [each for each in spec.partial if not is_reduced or each not in axes]
    return ShardingSpec(spec.mesh, dims, partial, spec.kind, cuts)


def _cut(x: Tensor, axis: Axes, dim: int) -> Tensor:
    spec, axes = x.spec, _axes(x.spec, axis)
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise LayoutError(f"dim={dim} names a dim that a tensor of {x.dim()} dims does not have")
    place = dim % x.dim()
    if spec.dims[place][-len(axes) :] == axes:
        return x
    rest = _without(spec, axes, is_reduced=True)
    dims = [(*cut, *axes) if number == place else cut for number, cut in enumerate(rest.dims)]
    cuts = [None if number == place else cut for number, cut in enumerate(rest.cuts)]
    return _moved(x, ShardingSpec(rest.mesh, dims, rest.partial, rest.kind, cuts))


def _moved(x: Tensor, spec: ShardingSpec) -> Tensor:
    return x if x.spec is spec else x.redistribute(placements=spec)
