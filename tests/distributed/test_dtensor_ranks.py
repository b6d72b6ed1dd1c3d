"""DTensors of a process group of two ranks, to GT and back: each rank has a GT of its own."""

from tests.subprocesses import start

PROGRAM = """
import os, torch, gt
from torch import distributed as dist
from torch.distributed import tensor as dtensor

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", store=dist.FileStore(os.environ["STORE"], 2), rank=rank, world_size=2)
ranks = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
gt.init(workers=2, mode="virtual")
value = torch.arange(15.0).reshape(5, 3)  # uneven along both dims
addend = dtensor.DTensor.from_local(value * (rank + 1) / 3, ranks, [dtensor.Partial()])
placements = dtensor.Shard(0), dtensor.Shard(1), dtensor.Replicate()
laid_out = [dtensor.distribute_tensor(value, ranks, [placement]) for placement in placements]
for theirs, layout in zip([addend, *laid_out], ["-, - + x", "x, -", "-, x", "-, -"], strict=True):
    ours = gt.from_dtensor(theirs)
    assert str(ours.spec) == layout and ours.spec.mesh.workers == (0, 1), ours.spec
    torch.testing.assert_close(ours.cpu(), value)
    back = gt.to_dtensor(ours * 2, ranks)
    own = back.to_local()
    torch.testing.assert_close(back.full_tensor(), value * 2)
    if not ours.spec.partial:
        assert back.placements == theirs.placements and own.shape == theirs.to_local().shape
        torch.testing.assert_close(own, theirs.to_local() * 2)
product = gt.distributed.matmul(gt.from_dtensor(laid_out[0]), gt.from_dtensor(laid_out[1]).mT, out=[gt.Shard(0)])
torch.testing.assert_close((gt.to_dtensor(product, ranks) + 0).full_tensor(), value @ value.mT)
gt.shutdown()
dist.destroy_process_group()
print("done")
"""


def test_tensors_of_two_ranks(tmp_path):
    store = str(tmp_path / "store")
    programs = [start("-c", PROGRAM, RANK=str(rank), STORE=store) for rank in range(2)]
    for program in programs:
        output, errors = program.communicate(timeout=120)
        assert (program.returncode, output.strip()) == (0, "done"), errors
