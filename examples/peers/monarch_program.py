"""Data-parallel training with Monarch: a controller calls two actors, which average their gradients with Gloo.

    pip install torchmonarch torch
    python examples/peers/monarch_program.py

Written for torchmonarch 0.7.0.
"""

import torch
import torch.distributed as dist
from monarch.actor import Actor, current_rank, endpoint, this_host
from monarch.spmd import setup_torch_elastic_env


class Trainer(Actor):
    def __init__(self):
        dist.init_process_group("gloo")  # from variables that setup_torch_elastic_env has set
        x = torch.linspace(-1, 1, 32).reshape(8, 4)
        self.x = x.chunk(2)[current_rank().rank]
        self.w1 = torch.linspace(-0.5, 0.5, 64).reshape(4, 16).requires_grad_()
        self.w2 = torch.linspace(-0.4, 0.6, 16).reshape(16, 1).requires_grad_()
        self.optimizer = torch.optim.SGD([self.w1, self.w2], lr=0.1)

    @endpoint
    def step(self) -> float:
        loss = (torch.tanh(self.x @ self.w1) @ self.w2 - self.x.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        for weight in (self.w1, self.w2):
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()
        self.optimizer.step()
        return loss.item()


if __name__ == "__main__":
    processes = this_host().spawn_procs(per_host={"workers": 2})
    setup_torch_elastic_env(processes)
    trainers = processes.spawn("trainers", Trainer)
    for _ in range(5):
        losses = list(trainers.step.call().get().values())
        print(f"{sum(losses) / len(losses):.4f}")
