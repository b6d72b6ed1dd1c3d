"""GT tensors as torch's DTensor. Its module takes a second to import, so this one is imported on first use."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import tensor as dtensor

from gt.client.tensor import Tensor
from gt.core.errors import LayoutError
from gt.core.tracebacks import ends_on_users_line
from gt.sharding.placements import Shard, placements_of


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
