"""Pipeline parallel training: the layers of a model on different workers, and micro-batches that follow one another.

    python examples/signals/pipeline.py              # the worker of this process: the same numbers
    python examples/signals/pipeline.py --virtual    # 4 workers inside this process
    python examples/signals/pipeline.py --workers 4  # 4 worker processes

The loop is plain Python: the backward of each micro-batch comes before the forward of the next one, so that stages run
one after another. With all forwards before all backwards they overlap (docs/strategies.md). pipeline.yaml runs the
first stage forward on workers 0 and 1 and its gradients on workers 2 and 3; the second stage is the mirror image.
Activations go from worker to worker.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from running import compare, expect, is_spread, parse_arguments, session, show, where
from torch import Tensor, nn
from torch.nn import functional

import gt

YAML = Path(__file__).with_suffix(".yaml")
BATCH, WIDTH, MICRO_BATCHES = 64, 32, 4
STEPS, QUICK_STEPS = 10, 2
FIRST, SECOND = {0, 1}, {2, 3}


def make_stages() -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))


def run(stages: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor]:
    with gt.signal.context("stage_1"):
        hidden = stages[0](x)
    with gt.signal.context("stage_2"):
        return hidden, stages[1](hidden)


def train_step(stages: nn.ModuleList, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """A step with its batch in parts. Its loss is read by the caller, when all of it is on its way."""
    total = torch.zeros(())
    optimizer.zero_grad()
    for inputs, targets in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
        _, outputs = run(stages, inputs)
        loss = functional.mse_loss(outputs, targets) / MICRO_BATCHES
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return total


def train(stages: nn.ModuleList, x: Tensor, y: Tensor, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(stages.parameters(), lr=0.5)
    return [train_step(stages, optimizer, x, y).item() for _ in range(steps)]


def trace(stages: nn.ModuleList, x: Tensor) -> None:
    """Show where one micro-batch is at each point."""
    with gt.debug.comm() as forward:
        hidden, outputs = run(stages, x)
    gradients = torch.autograd.grad(outputs.sum(), [stages[1][0].weight, hidden, stages[0][0].weight])
    points = ("activations of stage 1", "activations of stage 2", "gradient of the weight of stage 2",
              "gradient of the activations of stage 1", "gradient of the weight of stage 1")  # fmt: skip
    places = (hidden, outputs, *gradients)
    show("one micro-batch", ("what", "where"), zip(points, map(where, places), strict=True))
    if is_spread(hidden):
        workers = [set(tensor.spec.mesh.workers) for tensor in places]
        expect(workers == [FIRST, SECOND, FIRST, FIRST, SECOND], "Each stage is where the signals say.")
        between = {
            pair: count for pair, count in sorted(forward.pairs.items()) if pair[0] in FIRST and pair[1] in SECOND
        }
        expect(sum(between.values()) == hidden.numel() * 4, f"Activations go from worker to worker: {between} bytes.")


def main() -> None:
    options = parse_arguments(__doc__, workers=4)
    steps = QUICK_STEPS if options.quick else STEPS
    gt.load_config(YAML)
    torch.manual_seed(0)
    plain, x, y = make_stages(), torch.randn(BATCH, WIDTH), torch.rand(BATCH, WIDTH)
    with session(options):
        stages, ours_x, ours_y = gt.to(copy.deepcopy(plain)), gt.to(x), gt.to(y)
        losses = train(stages, ours_x, ours_y, steps)
        show("pipeline", ("step", "loss"), list(enumerate(losses, start=1)))
        trace(stages, ours_x[: BATCH // MICRO_BATCHES])
    compare("Losses", losses, train(plain, x, y, steps))


if __name__ == "__main__":
    main()
