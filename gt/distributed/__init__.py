"""Explicit layouts of tensors over workers: meshes, placements, and products in a given layout."""

from typing import Any

import torch.distributed

from gt.client.creation import distribute, replicate, shard
from gt.client.layouts import LocalShard, mesh
from gt.distributed.matmul import matmul
from gt.sharding.placements import Partial, Replicate, Shard
from gt.sharding.spec import DeviceMesh, ShardingSpec

__all__ = [
    "DeviceMesh",
    "LocalShard",
    "Partial",
    "Replicate",
    "Shard",
    "ShardingSpec",
    "distribute",
    "matmul",
    "mesh",
    "replicate",
    "shard",
]


def __getattr__(name: str) -> Any:
    """Other names are torch's: a script that does `import gt as torch` may ask whether it `is_initialized()`."""
    return getattr(torch.distributed, name)
