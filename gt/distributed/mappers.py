"""Mappers and composers, by the names of TT-NN: how a tensor of this process is spread over a mesh, and how the parts
of workers are put together again."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch

from gt.client.creation import distribute, dtype_of
from gt.client.tensor import Tensor
from gt.client.transfers import tensor_of
from gt.core.errors import LayoutError
from gt.core.tracebacks import ends_on_users_line
from gt.sharding.placements import Placement, Placements, Replicate, Shard, require_mesh
from gt.sharding.spec import DeviceMesh


class TensorToMesh(NamedTuple):
    """A mesh, and a placement for each axis of it.

    >>> gt.init(workers=2, mode="virtual")
    >>> mesh = gt.mesh(2, ("x",))
    >>> gt.distributed.ShardTensorToMesh(mesh, 0).placements
    (Shard(dim=0),)
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]


def ReplicateTensorToMesh(  # noqa: N802
    mesh: DeviceMesh, mesh_shape: Sequence[int] | None = None, mesh_offset: Sequence[int] | None = None
) -> TensorToMesh:
    """Every worker gets the whole tensor: of all mappers, with `mesh_shape` only those of a part of the mesh of that
    shape, which begins at the coordinate `mesh_offset`.

    >>> gt.init(workers=2, mode="virtual")
    >>> mesh = gt.mesh(2, ("x",))
    >>> gt.from_torch(torch.ones(4), mesh_mapper=gt.distributed.ReplicateTensorToMesh(mesh)).spec.is_whole
    True
    """
    part = _part(mesh, mesh_shape, mesh_offset)
    return TensorToMesh(part, (Replicate(),) * len(part.shape))


def ShardTensorToMesh(  # noqa: N802
    mesh: DeviceMesh, dim: int, mesh_shape: Sequence[int] | None = None, mesh_offset: Sequence[int] | None = None
) -> TensorToMesh:
    """A dim is cut over all workers of the mesh, in its order.

    >>> gt.init(workers=2, mode="virtual")
    >>> mesh = gt.mesh(2, ("x",))
    >>> gt.from_torch(torch.ones(4, 6), mesh_mapper=gt.distributed.ShardTensorToMesh(mesh, 1)).spec
    ShardingSpec('-, x' on (x=2))
    """
    part = _part(mesh, mesh_shape, mesh_offset)
    return TensorToMesh(part, (Shard(dim),) * len(part.shape))


def ShardTensor2dMesh(  # noqa: N802
    mesh: DeviceMesh,
    dims: Sequence[int | None],
    mesh_shape: Sequence[int] | None = None,
    mesh_offset: Sequence[int] | None = None,
) -> TensorToMesh:
    """The rows of the mesh cut the first of the dims, and its columns the second; None: they get the same. A mesh of
    as many workers is seen as one of `mesh_shape`.

    >>> gt.init(workers=4, mode="virtual")
    >>> mesh = gt.mesh((2, 2), ("rows", "columns"))
    >>> mapper = gt.distributed.ShardTensor2dMesh(mesh, dims=(0, None), mesh_shape=(2, 2))
    >>> gt.from_torch(torch.ones(4, 6), mesh_mapper=mapper).spec
    ShardingSpec('rows, -' on (rows=2, columns=2))
    """
    placements = [Replicate() if dim is None else Shard(dim) for dim in _pair(dims, "dims")]
    return TensorToMesh(_rows_and_columns(mesh, mesh_shape, mesh_offset), tuple(placements))


class MeshToTensor(NamedTuple):
    """A mesh, and for each axis of it the dim along which the parts of the workers along it are joined.

    >>> gt.init(workers=2, mode="virtual")
    >>> mesh = gt.mesh(2, ("x",))
    >>> gt.distributed.ConcatMeshToTensor(mesh, 0).compose([torch.zeros(1), torch.ones(1)])
    tensor([0., 1.])
    """

    mesh: DeviceMesh
    dims: tuple[int, ...]

    def compose(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the parts of all workers, which are in the order of the mesh."""
        joined = list(parts)
        for dim in self.dims:
            if not isinstance(dim, int) or not -joined[0].dim() <= dim < joined[0].dim():
                raise LayoutError(f"dim={dim!r} names a dim that parts of {joined[0].dim()} dims do not have")
        if len(set(self.dims)) > len({dim % joined[0].dim() for dim in self.dims}):
            raise LayoutError(
                f"dims={self.dims} name one dim of parts of {joined[0].dim()} dims; name two different ones"
            )
        for size, dim in zip(reversed(self.mesh.shape), reversed(self.dims), strict=True):
            joined = [torch.cat(joined[start : start + size], dim) for start in range(0, len(joined), size)]
        return joined[0]


def ConcatMeshToTensor(  # noqa: N802
    mesh: DeviceMesh, dim: int, mesh_shape: Sequence[int] | None = None, mesh_offset: Sequence[int] | None = None
) -> MeshToTensor:
    """The parts of all workers are joined along a dim, in the order of the mesh.

    >>> gt.init(workers=2, mode="virtual")
    >>> mesh = gt.mesh(2, ("x",))
    >>> x = gt.distribute(torch.arange(4), mesh, "x")
    >>> gt.to_torch(x, mesh_composer=gt.distributed.ConcatMeshToTensor(mesh, 0))
    tensor([0, 1, 2, 3])
    """
    part = _part(mesh, mesh_shape, mesh_offset)
    return MeshToTensor(part, (dim,) * len(part.shape))


def ConcatMesh2dToTensor(  # noqa: N802
    mesh: DeviceMesh,
    dims: Sequence[int],
    mesh_shape: Sequence[int] | None = None,
    mesh_offset: Sequence[int] | None = None,
) -> MeshToTensor:
    """The parts along a row of the mesh are joined along the second of the dims, and these along the first.

    >>> gt.init(workers=4, mode="virtual")
    >>> mesh = gt.mesh((2, 2), ("rows", "columns"))
    >>> x = gt.distribute(torch.arange(4).reshape(2, 2), mesh, "rows, columns")
    >>> gt.to_torch(x, mesh_composer=gt.distributed.ConcatMesh2dToTensor(mesh, dims=(0, 1))).tolist()
    [[0, 1], [2, 3]]
    """
    rows, columns = _pair(dims, "dims")
    if rows is None or columns is None or rows == columns:
        raise LayoutError(f"dims={tuple(dims)}: a mesh of rows and columns is joined along two different dims")
    return MeshToTensor(_rows_and_columns(mesh, mesh_shape, mesh_offset), (rows, columns))


def _pair(values: Sequence[int | None], name: str) -> Sequence[int | None]:
    if not isinstance(values, Sequence) or len(values) != 2:
        raise LayoutError(f"{name}={values}: say one for the rows of the mesh and one for its columns")
    return values


def _part(mesh: DeviceMesh, shape: Sequence[int] | None, offset: Sequence[int] | None) -> DeviceMesh:
    own = require_mesh(mesh)
    return own if shape is None and offset is None else own.submesh(shape, offset)


def seen_as(
    mesh: DeviceMesh, shape: Sequence[int] | None = None, offset: Sequence[int] | None = None
) -> DeviceMesh:  # fmt: skip
    """A mesh as one of another shape with as many workers, or the part of it that has a shape."""
    own = require_mesh(mesh)
    if shape is None or offset is not None or own.shape == tuple(shape) or math.prod(shape) != own.size:
        return _part(own, shape, offset)
    return own.reshape(shape, ("rows", "columns") if len(shape) == 2 else ())


def _rows_and_columns(mesh: DeviceMesh, shape: Sequence[int] | None, offset: Sequence[int] | None) -> DeviceMesh:
    _pair(require_mesh(mesh).shape if shape is None else shape, "mesh_shape")
    return seen_as(mesh, shape, offset)


_default: ContextVar[tuple[TensorToMesh | None, MeshToTensor | None]] = ContextVar("mappers", default=(None, None))


@contextlib.contextmanager
def default_mapper(given: TensorToMesh | MeshToTensor) -> Iterator[None]:
    """Inside the `with`, gt.from_torch without a mapper or placements uses this mapper; of a composer, gt.to_torch
    without one. The innermost one counts, in this thread.

    >>> gt.init(workers=2, mode="virtual")
    >>> mesh = gt.mesh(2, ("x",))
    >>> with gt.distributed.default_mapper(gt.distributed.ShardTensorToMesh(mesh, 0)):
    ...     x = gt.from_torch(torch.ones(4))
    >>> x.spec
    ShardingSpec('x' on (x=2))
    """
    mapper, composer = _default.get()
    if isinstance(given, TensorToMesh):
        token = _default.set((given, composer))
    elif isinstance(given, MeshToTensor):
        token = _default.set((mapper, given))
    else:
        raise LayoutError(f"{given!r} is no mapper or composer: make one, as with ShardTensorToMesh(mesh, dim)")
    try:
        yield
    finally:
        _default.reset(token)


def current_mapper() -> TensorToMesh | None:
    """The mapper of the innermost default_mapper."""
    return _default.get()[0]


@ends_on_users_line
def from_torch(
    x: torch.Tensor | np.ndarray[Any, Any],
    dtype: torch.dtype | str | None = None,
    *,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    mesh_mapper: TensorToMesh | None = None,
) -> Tensor:
    """A copy of a tensor or array on GT, spread over a mesh as a mapper or placements say; whole on every worker of the
    mesh without them.

    >>> gt.init(workers=2, mode="virtual")
    >>> mesh = gt.mesh(2, ("x",))
    >>> gt.from_torch(torch.ones(4), mesh=mesh, placements=[gt.Shard(0)]).spec
    ShardingSpec('x' on (x=2))
    """
    wanted = dtype_of(dtype)
    value = x if wanted is None else tensor_of(x).to(wanted)
    mesh_mapper = current_mapper() if mesh_mapper is None and placements is None else mesh_mapper
    if mesh_mapper is None:
        return distribute(value, mesh, placements)
    if not isinstance(mesh_mapper, TensorToMesh):
        raise LayoutError(f"mesh_mapper={mesh_mapper!r} is no mapper: make one, as with ShardTensorToMesh(mesh, dim)")
    if placements is not None:
        raise LayoutError("mesh_mapper= and placements= both say how the tensor is spread: give one of them")
    if mesh is not None and not set(mesh_mapper.mesh.workers) <= set(mesh.workers):
        raise LayoutError(f"the mapper is of mesh {mesh_mapper.mesh}, which is no part of mesh={mesh}")
    return distribute(value, mesh_mapper.mesh, mesh_mapper.placements)


@ends_on_users_line
def to_torch(
    x: torch.Tensor, dtype: torch.dtype | str | None = None, *, mesh_composer: MeshToTensor | None = None
) -> torch.Tensor:
    """The value of a tensor as a plain one. With a composer it is what the workers hold, joined: a tensor that several
    workers hold whole comes several times, as in TT-NN.

    >>> gt.init(workers=2, mode="virtual")
    >>> mesh = gt.mesh(2, ("x",))
    >>> gt.to_torch(gt.shard(torch.arange(4), mesh))
    tensor([0, 1, 2, 3])
    """
    wanted = dtype_of(dtype)
    mesh_composer = _default.get()[1] if mesh_composer is None else mesh_composer
    if mesh_composer is not None and not isinstance(mesh_composer, MeshToTensor):
        raise LayoutError(
            f"mesh_composer={mesh_composer!r} is no composer: make one, as with ConcatMeshToTensor(mesh, dim)"
        )
    value = x.cpu() if mesh_composer is None else mesh_composer.compose(_parts(x, mesh_composer.mesh))
    return value if wanted is None else value.to(wanted)


def _parts(x: torch.Tensor, mesh: DeviceMesh) -> list[torch.Tensor]:
    if not isinstance(x, Tensor):
        raise LayoutError("a plain tensor has no parts on workers: leave the composer out")
    if x.spec.partial:
        raise LayoutError(f"[{x.spec}] is partial, and parts of it are no parts of its value: redistribute it first")
    held = x.shards()
    if set(held) != set(mesh.workers):
        raise LayoutError(f"the tensor is on workers {sorted(held)}, and the composer is of mesh {mesh}")
    value = x.cpu()
    return [value[held[worker].slice] for worker in mesh.workers]
