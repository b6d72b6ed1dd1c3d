"""Tensors from the parts of workers, and from torch's DTensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed import tensor as dtensor

from gt.client.creation import distribute
from gt.client.layouts import current_mesh
from gt.client.layouts import mesh as make_mesh
from gt.client.tensor import Tensor
from gt.client.torch_strides import strides_without_gaps
from gt.client.transfers import tensor_of
from gt.core.errors import LayoutError
from gt.core.meta import TensorMeta, contiguous_strides, dense_strides
from gt.core.tracebacks import ends_on_users_line
from gt.sharding.placements import Placements, Replicate, Shard, placements_of, require_mesh, spec_from
from gt.sharding.spec import DeviceMesh, ShardingSpec, compute_global_shape, local_slices

_REDUCE = {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}
_REDUCE |= {"and": torch.logical_and, "or": torch.logical_or}


@ends_on_users_line
def from_shards(
    shards: Sequence[torch.Tensor | np.ndarray[Any, Any]] | Mapping[int, torch.Tensor | np.ndarray[Any, Any]],
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> Tensor:
    """The tensor of which each worker of a mesh holds a part: in the order of the mesh, or by worker. Parts that
    several workers hold must be equal. Parts along a partial axis are addends; only their sum is kept.

    >>> gt.init(workers=2, mode="virtual")
    >>> mesh = gt.mesh(2, ("x",))
    >>> gt.from_shards([torch.zeros(2), torch.ones(2)], mesh, [gt.Shard(0)]).tolist()
    [0.0, 0.0, 1.0, 1.0]
    """
    own = require_mesh(mesh or current_mesh())
    parts = dict(shards) if isinstance(shards, Mapping) else dict(zip(own.workers, shards, strict=False))
    if set(parts) != set(own.workers) or len(parts) != len(shards):
        raise LayoutError(f"{len(shards)} parts do not fit mesh {own}, which needs one for each of its workers")
    values = {worker: _value_of(worker, part) for worker, part in parts.items()}
    first = values[own.workers[0]]
    for worker, value in values.items():
        if value.dtype is not first.dtype:
            raise LayoutError(
                f"worker {worker} holds {value.dtype}, and worker {own.workers[0]} {first.dtype}: the parts of a "
                "tensor have one dtype"
            )
    spec = _spec(own, placements, first)
    shape = compute_global_shape(spec, {worker: tuple(value.shape) for worker, value in values.items()})
    return distribute(_joined(spec, shape, values, first), own, spec)


def _value_of(worker: int, part: Any) -> torch.Tensor:
    value = tensor_of(part)
    if not isinstance(value, torch.Tensor):
        raise LayoutError(f"the part of worker {worker} is no tensor, but of type {type(part).__name__}")
    return value.cpu()


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two parts are the same. NaN is equal to NaN here."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _spec(mesh: DeviceMesh, placements: Placements | None, part: torch.Tensor) -> ShardingSpec:
    given = [Replicate()] * len(mesh.shape) if placements is None else placements
    shape = tuple(part.shape)
    meta = TensorMeta(shape, contiguous_strides(shape), 0, str(part.dtype).removeprefix("torch."))
    return spec_from(given, mesh, meta)


def _joined(
    spec: ShardingSpec, shape: Sequence[int], values: Mapping[int, torch.Tensor], first: torch.Tensor
) -> torch.Tensor:
    """The tensor of these parts, with the dims in memory in the order that they have in the `first` one."""
    stride = strides_without_gaps(first)
    whole_stride = stride if tuple(first.shape) == tuple(shape) else dense_strides(shape, stride)
    whole = torch.empty_strided(tuple(shape), whole_stride, dtype=first.dtype)
    addends: dict[tuple[int, ...], torch.Tensor] = {}
    for worker in spec.mesh.workers:  # the first addend of a part comes first
        value = values[worker]
        coordinate = spec.mesh.coordinate(worker)
        key = tuple([coordinate[spec.mesh.axis_names.index(axis)] for axis in (*spec.axes, *spec.partial)])
        if key in addends and not _are_equal(addends[key], value):
            raise LayoutError(f"worker {worker} holds other values than a worker with the same part by [{spec}]")
        if key in addends:
            continue
        addends[key] = value
        target = whole[local_slices(spec, tuple(shape), worker)]
        is_first = not any(key[len(spec.axes) :])
        target.copy_(value if is_first else _REDUCE[spec.kind](target, value))
    return whole


# --- torch's DTensor -------------------------------------------------------------------------------------------------


@ends_on_users_line
def from_device_mesh(device_mesh: Any) -> DeviceMesh:
    """The mesh of workers whose ids are the ranks of a torch.distributed.DeviceMesh.

    >>> import tempfile
    >>> from torch import distributed as dist
    >>> store = dist.FileStore(tempfile.mktemp(), 1)
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> ranks = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    >>> gt.distributed.from_device_mesh(ranks)
    (x=1)
    >>> dist.destroy_process_group()
    """
    names = device_mesh.mesh_dim_names or ()
    return make_mesh(tuple(device_mesh.mesh.shape), names, device_mesh.mesh.flatten().tolist())


@ends_on_users_line
def from_dtensor(x: Any, mesh: DeviceMesh | None = None) -> Tensor:
    """A copy of a torch DTensor in the same placements, on a mesh of the same shape: the given one, or the workers
    whose ids are its ranks. All ranks of the DTensor must call this, since it is gathered.

    >>> import tempfile
    >>> from torch import distributed as dist
    >>> store = dist.FileStore(tempfile.mktemp(), 1)
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> ranks = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    >>> theirs = dist.tensor.distribute_tensor(torch.ones(4), ranks, [dist.tensor.Shard(0)])
    >>> gt.from_dtensor(theirs).spec
    ShardingSpec('x' on (x=1))
    >>> dist.destroy_process_group()
    """
    own = from_device_mesh(x.device_mesh) if mesh is None else require_mesh(mesh)
    if own.shape != tuple(x.device_mesh.mesh.shape):
        raise LayoutError(f"the DTensor is on a mesh of shape {tuple(x.device_mesh.mesh.shape)}, not on one like {own}")
    return distribute(x.detach().full_tensor(), own, list(x.placements))


@ends_on_users_line
def to_dtensor(x: torch.Tensor, device_mesh: Any) -> Any:
    """This rank's part of a torch DTensor with the value of `x`, on a torch DeviceMesh of the same number of axes.
    Partial tensors are reduced, and a dim that several axes cut is cut by them in the order of the mesh. Nothing is
    exchanged between ranks.

    >>> import tempfile
    >>> from torch import distributed as dist
    >>> store = dist.FileStore(tempfile.mktemp(), 1)
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> ranks = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    >>> x = gt.distribute(torch.ones(4), gt.mesh(1, ("x",)), "x")
    >>> gt.to_dtensor(x, ranks).placements
    (Shard(dim=0),)
    >>> dist.destroy_process_group()
    """
    placements = torch_placements(x)
    if len(placements) != device_mesh.mesh.dim():
        shape = tuple(device_mesh.mesh.shape)
        raise LayoutError(f"a tensor as {placements} does not fit a DeviceMesh of shape {shape}")
    return dtensor.distribute_tensor(x.detach().cpu(), device_mesh, placements, src_data_rank=None)


@ends_on_users_line
def torch_placements(x: torch.Tensor) -> list[Any]:
    """The placements of a tensor as torch's own, with Replicate in place of Partial.

    >>> gt.init(workers=2, mode="virtual")
    >>> mesh = gt.mesh(2, ("x",))
    >>> gt.torch_placements(gt.shard(torch.ones(4), mesh))
    [Shard(dim=0)]
    """
    if not isinstance(x, Tensor):
        raise LayoutError("a plain tensor has no layout over workers; gt.distribute gives it one")
    return [
        dtensor.Shard(each.dim) if isinstance(each, Shard) else dtensor.Replicate() for each in placements_of(x.spec)
    ]
