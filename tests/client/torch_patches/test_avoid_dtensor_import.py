"""Programs start without DTensor, which still works for those that use it."""

from __future__ import annotations

import torch

from tests.client.torch_patches.test_avoid_dynamo_import import OPS
from tests.subprocesses import finish, start_interpreter

USE = """
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
y = (x @ x).relu()
print(type(y) is DTensor and bool((y.full_tensor() == 4).all()) and (gt.ones(2) + 1).tolist() == [2, 2])
dist.destroy_process_group()
"""


def test_dtensor_works_after_ops_on_gt() -> None:
    code, out, err = finish(start_interpreter("-c", OPS + USE))
    said = [line for line in out.splitlines() if not line.startswith("[Gloo]")]  # torch 2.10 prints such lines
    assert (code, said) == (0, ["[] True 0", "True"]), err


def test_torch_lists_its_ops() -> None:
    names = torch._C._dispatch_get_all_op_names()
    assert "aten::add.Tensor" in names, "no op is registered for GT tensors: the first one imports DTensor (1 s)"
