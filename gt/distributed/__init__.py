"""Explicit layouts of tensors over workers: meshes, placements, mappers, collectives, and products.

>>> gt.init(workers=2, mode="virtual")
>>> mesh = gt.distributed.mesh(2, ("tp",))
>>> gt.distributed.shard(torch.ones(4, 2), mesh).spec
ShardingSpec('tp, -' on (tp=2))

`gt.mesh`, `gt.distribute`, `gt.shard`, `gt.replicate` and the classes of layouts are the same under both names.
"""

from typing import TYPE_CHECKING, Any

import torch.distributed

if TYPE_CHECKING:
    from torch.distributed import *  # noqa: F403

from gt.client.creation import distribute, replicate, shard
from gt.client.layouts import LocalShard, Topology, mesh, open_mesh
from gt.core.errors import nearest
from gt.distributed.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter, send
from gt.distributed.interchange import from_device_mesh, from_dtensor, from_shards
from gt.distributed.mappers import (
    ConcatMesh2dToTensor,
    ConcatMeshToTensor,
    MeshToTensor,
    ReplicateTensorToMesh,
    ShardTensor2dMesh,
    ShardTensorToMesh,
    TensorToMesh,
    default_mapper,
    from_torch,
    to_torch,
)
from gt.distributed.matmul import matmul
from gt.distributed.permutations import axis_index, ppermute
from gt.distributed.plans import ProductPlan, explain
from gt.distributed.product_grids import VirtualGrid
from gt.sharding.placements import Partial, Replicate, Shard
from gt.sharding.spec import DeviceMesh, ShardingSpec

__all__ = [
    "ConcatMesh2dToTensor",
    "ConcatMeshToTensor",
    "DeviceMesh",
    "LocalShard",
    "MeshToTensor",
    "Partial",
    "ProductPlan",
    "Replicate",
    "ReplicateTensorToMesh",
    "Shard",
    "ShardTensor2dMesh",
    "ShardTensorToMesh",
    "ShardingSpec",
    "TensorToMesh",
    "Topology",
    "VirtualGrid",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis_index",
    "broadcast",
    "default_mapper",
    "distribute",
    "explain",
    "from_device_mesh",
    "from_dtensor",
    "from_shards",
    "from_torch",
    "matmul",
    "mesh",
    "open_mesh",
    "ppermute",
    "reduce_scatter",
    "replicate",
    "send",
    "shard",
    "to_torch",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Other names are torch's: a script that does `import gt as torch` may ask whether it `is_initialized()`."""
        if name.startswith("__") or hasattr(torch.distributed, name):
            return getattr(torch.distributed, name)
        hint = nearest(name, [*__all__, *dir(torch.distributed)])
        hint = hint if hint.startswith("did you mean") else nearest(name, __all__)
        raise AttributeError(f"module 'gt.distributed' has no attribute {name!r}, and neither has torch; {hint}")
