"""Data-parallel training with Ray: two actors compute gradients, the driver averages them and updates the weights.

pip install ray torch
python examples/peers/ray_program.py
"""

import ray
import torch


@ray.remote
class Trainer:
    def __init__(self, rows):
        self.x = rows

    def gradients(self, weights):
        w1, w2 = [weight.requires_grad_() for weight in weights]
        loss = (torch.tanh(self.x @ w1) @ w2 - self.x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss.item(), w1.grad, w2.grad


ray.init(address="local", num_cpus=2, include_dashboard=False)
x = torch.linspace(-1, 1, 32).reshape(8, 4)
weights = [
    torch.linspace(-0.5, 0.5, 64).reshape(4, 16),
    torch.linspace(-0.4, 0.6, 16).reshape(16, 1),
]
trainers = [Trainer.remote(rows) for rows in x.chunk(2)]
for _ in range(5):
    shared = ray.put(weights)  # into the object store, once for both
    losses, *gradients = zip(*ray.get([trainer.gradients.remote(shared) for trainer in trainers]), strict=True)
    weights = [weight - 0.1 * sum(parts) / len(parts) for weight, parts in zip(weights, gradients, strict=True)]
    print(f"{sum(losses) / len(losses):.4f}")
ray.shutdown()
