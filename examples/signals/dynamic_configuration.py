"""Another configuration for every step: small batches on one worker, large ones over four.

    python examples/signals/dynamic_configuration.py              # the worker of this process: the same numbers
    python examples/signals/dynamic_configuration.py --virtual    # 4 workers inside this process
    python examples/signals/dynamic_configuration.py --workers 4  # 4 worker processes

The step itself stays as it is. Registering its signal anew counts from the next op on.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from running import compare, expect, is_spread, parse_arguments, session, show, where
from torch import Tensor, nn

import gt
from gt import ShardConfig, SignalConfig

YAML = Path(__file__).with_suffix(".yaml")
BATCHES, QUICK_BATCHES = (256, 8, 64, 2, 512, 128, 4), (64, 2, 32)
WORTH_CUTTING = 32  # rows; below that a worker alone is faster than four that talk


def configure(batch_size: int) -> None:
    workers = [0, 1, 2, 3] if batch_size >= WORTH_CUTTING else [0]
    gt.register_config("step", SignalConfig(shard=ShardConfig(axis=0, workers=workers)))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> tuple[Tensor, float]:
    with gt.signal.context("step"):
        outputs = model(x)
        loss = (outputs - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return outputs, loss.item()


def main() -> None:
    options = parse_arguments(__doc__, workers=4)
    gt.load_config(YAML)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    batches = [torch.randn(size, 8) for size in (QUICK_BATCHES if options.quick else BATCHES)]
    rows, losses = [], []
    with session(options):
        model = gt.to(copy.deepcopy(plain))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for x in batches:
            configure(len(x))
            outputs, loss = train_step(model, optimizer, gt.to(x))
            rows.append((len(x), where(outputs), loss))
            losses.append(loss)
            if is_spread(model[0].weight):
                wanted = 4 if len(x) >= WORTH_CUTTING else 1
                expect(outputs.spec.mesh.size == wanted, f"A batch of {len(x)} rows is on {wanted} of the workers.")
    show("dynamic configuration", ("rows", "outputs", "loss"), rows)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    compare("Losses", losses, [train_step(plain, optimizer, x)[1] for x in batches])


if __name__ == "__main__":
    main()
