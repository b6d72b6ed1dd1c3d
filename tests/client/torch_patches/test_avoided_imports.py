"""Programs start without dynamo, which still works for those that use it."""

from __future__ import annotations

import pytest
import torch
import torch._compile
from torch._C._dynamo import eval_frame

from gt.client.torch_patches.avoided_imports import wrapped_function
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


OPS = """
import gc, sys, torch, gt
def count_searches(): return gc.get_stats()[2]["collections"]  # among all objects: 0.1 s each
create, before = gt.ones, count_searches()
create(1)
searches = count_searches() - before
model = gt.to(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.GELU(), torch.nn.Linear(4, 2)))
loss = torch.nn.functional.cross_entropy(model(gt.randn(8, 4)).relu(), gt.zeros(8, dtype=torch.int64))
loss.backward()
x = gt.ones(2, 3)
torch.cat([x * 2 + x[0], torch.where(x > 0, x, 0)]).softmax(-1).mean(0).tolist()
with torch.inference_mode():
    y = gt.ones(2, 2)
    torch.nn.functional.linear(y @ y, y).tolist()
torch.native_dropout(gt.ones(3), 0.5, True)
HEAVY = ("torch._dynamo", "torch.distributed.tensor")
print(sorted(name for name in sys.modules if name in HEAVY), gc.isenabled(), searches)
"""

PLAIN = """
def double(x): return torch.nn.functional.gelu(x) * x.shape[0]
compiled = torch.compile(double, backend="eager", dynamic=True)
print(all(torch.equal(compiled(torch.ones(n)), double(torch.ones(n))) for n in (3, 5)))
"""

ON_GT = """
w = gt.ones(3, 3)
def f(a): return (torch.nn.functional.gelu(a @ w) * 2 + a.shape[0]).sum()
compiled = torch.compile(f, backend="eager")
print(compiled(gt.ones(2, 3)).item() == f(gt.ones(2, 3)).item())
"""


@pytest.mark.parametrize("use", [PLAIN, ON_GT], ids=["plain tensors", "GT tensors"])
def test_ops_import_neither_dynamo_nor_dtensor_and_dynamo_works_after_them(use: str) -> None:
    code, out, err = finish(start_interpreter("-c", OPS + use))
    assert (code, out.split("\n")[:2]) == (0, ["[] True 0", "True"]), err


def test_torchs_wrappers_are_recognised() -> None:
    wrapped = wrapped_function(torch._refs.nn.functional.gelu)
    assert wrapped is not None, "keep_dynamo_out() finds no shape functions: each program start imports dynamo (0.7 s)"
    source = torch._compile.__file__
    with open(source, encoding="utf-8") as file:
        assert "__dynamo_disable" in file.read(), "torch._compile reads another attribute: the first op imports dynamo"


def test_code_can_be_hidden_from_dynamo() -> None:
    names = ("_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy")
    assert all(hasattr(eval_frame, name) for name in names), "torch.compile would trace GT's dispatch and fail"
