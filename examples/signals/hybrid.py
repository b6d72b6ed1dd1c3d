"""Two strategies in one model: layer by layer, and along the axes of a mesh.

    python examples/signals/hybrid.py              # the worker of this process: the same numbers
    python examples/signals/hybrid.py --virtual    # 4 workers inside this process
    python examples/signals/hybrid.py --workers 4  # 4 worker processes

Layer by layer: the first layer is data parallel (a small weight), the second model parallel (a large one), each over
all four workers. On a 2x2 mesh: the batch is cut along one axis, the large weight along the other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from running import compare, expect, is_spread, moves, parse_arguments, session, show, where
from torch import Tensor

import gt

YAML = Path(__file__).with_suffix(".yaml")
BATCH, WIDTH, HIDDEN, OUT = 64, 16, 32, 256
STEPS, QUICK_STEPS = 10, 2

Weights = tuple[Tensor, Tensor]
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def layer_by_layer(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    with gt.signal.context("layer_1"):
        hidden = torch.relu(x @ w1)
    with gt.signal.context("layer_2"):
        return hidden @ w2


def on_a_mesh(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    with gt.signal.context("batch"):
        return torch.relu(x @ w1) @ w2


def place(weights: Weights, second: str) -> Weights:
    """The first weight goes where a scope first needs it; the second is cut from the start."""
    return gt.to(weights[0]), gt.signal.tensor(weights[1], name=second)


def train_step(forward: Forward, x: Tensor, y: Tensor, weights: Weights) -> float:
    loss = (forward(x, *weights) - y).square().mean()
    loss.backward()
    with torch.no_grad():
        for weight in weights:
            weight -= 0.5 * weight.grad
            weight.grad = None
    return loss.item()


def train(
    name: str, forward: Forward, x: Tensor, y: Tensor, weights: Weights, steps: int
) -> tuple[list[float], tuple[str, ...]]:
    """The losses, and a row that says where the weights are and what moved in the last step."""
    weights = tuple(weight.detach().requires_grad_() for weight in weights)
    losses = [train_step(forward, x, y, weights) for _ in range(steps)]
    with gt.debug.comm() as comm:
        losses.append(train_step(forward, x, y, weights))
    return losses, (name, *map(where, weights), moves(comm.events))


def main() -> None:
    options = parse_arguments(__doc__, workers=4)
    steps = QUICK_STEPS if options.quick else STEPS
    gt.load_config(YAML)
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, OUT)
    plain = (torch.randn(WIDTH, HIDDEN) / 4, torch.randn(HIDDEN, OUT) / 6)
    with session(options):
        data = gt.to(x), gt.to(y)
        by_layer, first = train("layer by layer", layer_by_layer, *data, place(plain, "layer_2"), steps)
        on_mesh, second = train("2x2 mesh", on_a_mesh, *data, place(plain, "columns"), steps)
        show("one training step", ("", "w1", "w2", "what moves"), (first, second))
        outputs = on_a_mesh(data[0], *place(plain, "columns"))
        if is_spread(outputs):
            expect(str(outputs.spec) == "dp, tp", f"Results on the mesh are cut along both axes: [{outputs.spec}].")
    own = tuple(weight.clone().requires_grad_() for weight in plain)
    expected = [train_step(layer_by_layer, x, y, own) for _ in range(steps + 1)]
    compare("Losses layer by layer", by_layer, expected)
    compare("Losses on a mesh", on_mesh, expected)


if __name__ == "__main__":
    main()
