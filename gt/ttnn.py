"""TT-NN's names on GT: `import gt.ttnn as ttnn` in place of `import ttnn`.

A tensor has one value and the shape of the whole, as everywhere in GT; layouts say what each worker holds of it. So a
product or a sum over a dim that is cut is that of the whole, and a collective only changes a layout. Arguments about
the devices of TT-NN (`layout`, `memory_config`, `num_links`, ...) are accepted and have no meaning.

>>> import gt.ttnn as ttnn
>>> gt.init(workers=2, mode="virtual")
>>> mesh_device = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
>>> mapper = ttnn.ShardTensorToMesh(mesh_device, dim=1)
>>> x = ttnn.from_torch(torch.ones(2, 4), layout=ttnn.TILE_LAYOUT, device=mesh_device, mesh_mapper=mapper)
>>> ttnn.to_torch(ttnn.all_gather(x, dim=1, num_links=1)).shape
torch.Size([2, 4])
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from gt.client import active_session, creation
from gt.client.layouts import mesh
from gt.client.tensor import Tensor, to_gt
from gt.core.errors import LayoutError, nearest
from gt.core.tracebacks import ends_on_users_line
from gt.debug.layout_pictures import visualize_sharding
from gt.distributed import collectives, mappers
from gt.sharding.placements import Placement, Replicate, Shard
from gt.sharding.spec import DeviceMesh

_imported = frozenset(globals())
MeshDevice = DeviceMesh
bfloat16, float32, int32, uint8 = torch.bfloat16, torch.float32, torch.int32, torch.uint8
bfloat8_b = bfloat4_b = torch.bfloat16  # more precise
uint16, uint32 = torch.int32, torch.int64  # torch has few functions of unsigned numbers
TILE_LAYOUT, ROW_MAJOR_LAYOUT = "TILE", "ROW_MAJOR"
DRAM_MEMORY_CONFIG, L1_MEMORY_CONFIG = "DRAM", "L1"

ConcatMeshToTensor, MeshToTensor = mappers.ConcatMeshToTensor, mappers.MeshToTensor
ReplicateTensorToMesh, ShardTensorToMesh = mappers.ReplicateTensorToMesh, mappers.ShardTensorToMesh
TensorToMesh = mappers.TensorToMesh
replicate_tensor_to_mesh_mapper, shard_tensor_to_mesh_mapper = ReplicateTensorToMesh, ShardTensorToMesh
concat_mesh_to_tensor_composer = ConcatMeshToTensor
PlacementReplicate, PlacementShard = Replicate, Shard
distribute = mappers.default_mapper
visualize_mesh_device = visualize_tensor = visualize_sharding

_OF_DEVICES = """
    layout memory_config compute_kernel_config program_config core_grid num_links topology queue_id cq_id tile pad_value
    mesh_device cache_file_name fast_and_approximate_mode subdevice_id chunks_per_sync
    num_workers_per_link num_buffers_per_channel"""
_SAME_IN_TORCH = """
    abs add argmax ceil clamp clone concat cos divide eq erf exp floor ge gt le log log1p logical_and logical_not
    logical_or lt maximum mean minimum mul multiply ne neg ones_like permute pow prod reciprocal relu reshape rsqrt rsub
    sigmoid sign sin split sqrt square squeeze sub subtract sum tanh transpose tril triu unsqueeze where zeros_like"""
_ignored, _same_in_torch = frozenset(_OF_DEVICES.split()), frozenset(_SAME_IN_TORCH.split())


def _without_devices(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that ignores arguments about devices, and takes `dtype` for the dtype of its result."""

    @functools.wraps(function)
    @ends_on_users_line
    def call(*args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.pop("dtype", None)
        result = function(*args, **{name: value for name, value in kwargs.items() if name not in _ignored})
        return result if dtype is None else result.to(dtype)

    return call


class MeshShape(tuple[int, ...]):
    """The shape of a mesh: `MeshShape(2, 4)` or `MeshShape([2, 4])`."""

    __slots__ = ()

    def __new__(cls, *sizes: Any) -> MeshShape:
        return super().__new__(cls, sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)


class MeshCoordinate(MeshShape):
    """The place of a worker in a mesh: `MeshCoordinate(0, 2)`."""

    __slots__ = ()


class Layout:
    """The layouts of TT-NN's memory, which have no meaning."""

    TILE, ROW_MAJOR = TILE_LAYOUT, ROW_MAJOR_LAYOUT


class Topology:
    """The ways of TT-NN's collectives, which have no meaning."""

    Linear, Ring, Mesh, Torus = "LINEAR", "RING", "MESH", "TORUS"


class MeshMapperConfig(NamedTuple):
    """A placement for each axis of a mesh, or of the part of it with another shape."""

    placements: Sequence[Placement]
    mesh_shape_override: Sequence[int] | None = None


class MeshComposerConfig(NamedTuple):
    """The dim along which the parts along each axis of a mesh are joined."""

    dims: Sequence[int]
    mesh_shape_override: Sequence[int] | None = None


@ends_on_users_line
def open_mesh_device(
    mesh_shape: Sequence[int] | None = None,
    *_: object,
    offset: Sequence[int] | None = None,
    physical_device_ids: Sequence[int] = (),
    **__: object,
) -> MeshDevice:
    """A mesh of the first workers, or of those with the ids, by default of all in one row. Settings of devices have no
    meaning."""
    if offset is not None and any(offset):
        raise LayoutError(
            f"offset={tuple(offset)}: workers have no places of their own; name them, physical_device_ids="
        )
    count = len(physical_device_ids) or len(active_session.current().workers)
    shape = (1, count) if mesh_shape is None else tuple(mesh_shape)
    names = ("rows", "columns") if len(shape) == 2 else [f"axis{number}" for number in range(len(shape))]
    return mesh(shape, names, physical_device_ids)


def open_device(device_id: int = 0, **_: object) -> MeshDevice:
    """The mesh of one worker."""
    return open_mesh_device((1, 1), physical_device_ids=(device_id,))


def close_mesh_device(_: MeshDevice | None = None) -> None:
    """Wait for all ops so far. The workers go on, and end with the program or by gt.shutdown()."""
    active_session.current().synchronize()


close_device = synchronize_device = close_mesh_device


def get_num_devices() -> int:
    return len(active_session.current().workers)


@contextlib.contextmanager
def create_mesh_device(*args: Any, **settings: Any) -> Iterator[MeshDevice]:
    """A mesh for a block of the program."""
    opened = open_mesh_device(*args, **settings)
    yield opened
    close_mesh_device(opened)


def create_mesh_mapper(mesh_device: MeshDevice, config: MeshMapperConfig) -> mappers.TensorToMesh:
    return TensorToMesh(mappers.seen_as(mesh_device, config.mesh_shape_override), tuple(config.placements))


def create_mesh_composer(mesh_device: MeshDevice, config: MeshComposerConfig) -> mappers.MeshToTensor:
    return MeshToTensor(mappers.seen_as(mesh_device, config.mesh_shape_override), tuple(config.dims))


def ShardTensor2dMesh(  # noqa: N802
    mesh_device: MeshDevice, mesh_shape: Sequence[int], dims: Sequence[int | None]
) -> mappers.TensorToMesh:
    """That of gt.distributed, with the arguments in TT-NN's order."""
    return mappers.ShardTensor2dMesh(mesh_device, dims, mesh_shape)


def ConcatMesh2dToTensor(  # noqa: N802
    mesh_device: MeshDevice, mesh_shape: Sequence[int], dims: Sequence[int]
) -> mappers.MeshToTensor:
    """That of gt.distributed, with the arguments in TT-NN's order."""
    return mappers.ConcatMesh2dToTensor(mesh_device, dims, mesh_shape)


@_without_devices
def from_torch(
    tensor: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    device: MeshDevice | None = None,
    mesh_mapper: mappers.TensorToMesh | None = None,
) -> torch.Tensor:
    """A copy of a tensor on a mesh, whole on each worker without a mapper. Without both it stays in this process."""
    if device is None and mesh_mapper is None and mappers.current_mapper() is None:
        return tensor if dtype is None else tensor.to(dtype)
    return mappers.from_torch(tensor, dtype, mesh=device, mesh_mapper=mesh_mapper)


as_tensor = from_torch


def distribute_tensor(
    tensor: torch.Tensor, mapper: mappers.TensorToMesh, mesh_device: MeshDevice | None = None
) -> torch.Tensor:
    return from_torch(tensor, device=mesh_device, mesh_mapper=mapper)  # type: ignore[no-any-return]


@_without_devices
def to_torch(
    tensor: torch.Tensor, *, mesh_composer: mappers.MeshToTensor | None = None, device: MeshDevice | None = None
) -> torch.Tensor:
    """The value of a tensor as a plain one; with a composer what the workers hold, joined."""
    return mappers.to_torch(tensor, mesh_composer=mesh_composer)


@_without_devices
def to_device(tensor: torch.Tensor, device: MeshDevice) -> torch.Tensor:
    """The tensor on a mesh: as it lies there, if it does, and otherwise whole on each worker."""
    if isinstance(tensor, Tensor) and set(tensor.spec.mesh.workers) <= set(device.workers):
        return tensor
    return collectives.broadcast(tensor, mesh=device)


@_without_devices
def to_layout(tensor: torch.Tensor, _: object = None) -> torch.Tensor:
    """The tensor itself: tiles and kinds of memory are of TT-NN's devices."""
    return tensor


to_memory_config = to_layout


@_without_devices
def from_device(tensor: torch.Tensor) -> torch.Tensor:
    """The value as a plain tensor."""
    return tensor.cpu()


@_without_devices
def typecast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype)


def deallocate(_: torch.Tensor, *__: object) -> None:
    """Nothing: memory is freed when Python drops the last tensor that needs it."""


def get_device_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What each worker holds, as plain tensors in the order of the mesh."""
    return [shard.data for shard in to_gt(tensor).shards().values()]


@_without_devices
def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    activation: str | None = None,
) -> torch.Tensor:
    product = (a.mT if transpose_a else a) @ (b.mT if transpose_b else b)
    return product if activation is None else _activation(activation)(product)


@_without_devices
def linear(
    a: torch.Tensor, b: torch.Tensor, *, bias: torch.Tensor | None = None, activation: str | None = None, **options: Any
) -> torch.Tensor:
    product = matmul(a, b, **options)
    result = product if bias is None else product + bias
    return result if activation is None else _activation(activation)(result)


def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    known = {"relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu, "sigmoid": torch.sigmoid}
    if name not in known:
        raise LayoutError(f"activation={name!r} is none of GT's; {nearest(name, known)}")
    return known[name]


@_without_devices
def softmax(tensor: torch.Tensor, dim: int = -1, **_: object) -> torch.Tensor:
    return torch.softmax(tensor, dim)


@_without_devices
def layer_norm(
    tensor: torch.Tensor,
    *,
    epsilon: float = 1e-12,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    return functional.layer_norm(tensor, tensor.shape[-1:], _flat(weight), _flat(bias), epsilon)


@_without_devices
def rms_norm(tensor: torch.Tensor, *, epsilon: float = 1e-12, weight: torch.Tensor | None = None) -> torch.Tensor:
    return functional.rms_norm(tensor, tensor.shape[-1:], _flat(weight), epsilon)


def _flat(weight: torch.Tensor | None) -> torch.Tensor | None:
    return None if weight is None else weight.reshape(-1)


gelu, silu = _without_devices(functional.gelu), _without_devices(functional.silu)
embedding = _without_devices(functional.embedding)


def _on_mesh(create: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A factory whose tensors are whole on each worker of a mesh."""
    return _without_devices(lambda shape, *values, device=None: create(tuple(shape), *values, mesh=device))


zeros, ones, full, rand = map(_on_mesh, (creation.zeros, creation.ones, creation.full, creation.rand))


@_without_devices
def all_gather(tensor: torch.Tensor, dim: int, *, cluster_axis: int | None = None) -> Tensor:
    """The tensor, no longer cut in a dim along an axis of the mesh, by default along all."""
    own = to_gt(tensor)
    axes = [axis for axis in own.spec.dims[dim] if axis in _cluster(own, cluster_axis)]
    if not axes:
        raise LayoutError(f"[{own.spec}] is not cut in dim {dim} there: there is nothing to gather")
    return collectives.all_gather(own, axis=axes)


@_without_devices
def reduce_scatter(tensor: torch.Tensor, dim: int, *, cluster_axis: int | None = None) -> Tensor:
    """The sum of a partial tensor along an axis of the mesh, by default along all, with a dim cut along it."""
    own = to_gt(tensor)
    return collectives.reduce_scatter(own, axis=_partial_axes(own, cluster_axis), dim=dim)


@_without_devices
def all_reduce(tensor: torch.Tensor, *, cluster_axis: int | None = None) -> Tensor:
    """The sum of a partial tensor along an axis of the mesh, by default along all."""
    own = to_gt(tensor)
    return collectives.all_reduce(own, axis=_partial_axes(own, cluster_axis))


def _cluster(tensor: Tensor, cluster_axis: int | None) -> tuple[str, ...]:
    names = tensor.spec.mesh.axis_names
    if cluster_axis is None:
        return names
    if cluster_axis not in range(len(names)):
        raise LayoutError(f"cluster_axis={cluster_axis} is no axis of mesh {tensor.spec.mesh}: it has {len(names)}")
    return (names[cluster_axis],)


def _partial_axes(tensor: Tensor, cluster_axis: int | None) -> list[str]:
    axes = [axis for axis in tensor.spec.partial if axis in _cluster(tensor, cluster_axis)]
    if not axes:
        raise LayoutError(
            f"[{tensor.spec}] is not partial there: its parts are no addends. A product over a dim that is cut gives a "
            f"partial tensor, and a tensor that several workers hold whole is one value, not several"
        )
    return axes


def __getattr__(name: str) -> Any:
    if name in _same_in_torch:
        return _without_devices(getattr(torch, name))
    known = [*_same_in_torch, *[each for each in globals() if not each.startswith("_") and each not in _imported]]
    raise AttributeError(f"gt.ttnn has no {name!r}; {nearest(name, known)}: use torch's function, which works as well")
