"""Data-parallel training with torch's DTensor: two processes run the whole script.

python examples/peers/dtensor_program.py
"""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def train(rank, world_size, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))

    x = distribute_tensor(torch.linspace(-1, 1, 32).reshape(8, 4), mesh, [Shard(0)])
    w1 = distribute_tensor(torch.linspace(-0.5, 0.5, 64).reshape(4, 16), mesh, [Replicate()]).requires_grad_()
    w2 = distribute_tensor(torch.linspace(-0.4, 0.6, 16).reshape(16, 1), mesh, [Replicate()]).requires_grad_()
    optimizer = torch.optim.SGD([w1, w2], lr=0.1)
    for _ in range(5):
        loss = (torch.tanh(x @ w1) @ w2 - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.full_tensor()  # an all-reduce: every process has to call it
        if rank == 0:
            print(f"{value.item():.4f}")
    if rank == 0:
        print(x.placements, w1.placements)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.spawn(train, args=(2, port), nprocs=2)
