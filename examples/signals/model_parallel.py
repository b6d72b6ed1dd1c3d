"""Model parallel training: each worker has half of the features of every layer.

    python examples/signals/model_parallel.py              # the worker of this process: the same numbers
    python examples/signals/model_parallel.py --virtual    # 2 workers inside this process
    python examples/signals/model_parallel.py --workers 2  # 2 worker processes

Two ways to cut the second weight. By the features that it gives, as the first one: the hidden layer is gathered, and
its gradient reduced. By those that it takes: the hidden layer is used as it lies, and the small result is added up.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from running import compare, expect, is_spread, moves, parse_arguments, session, show, where
from torch import Tensor

import gt

YAML = Path(__file__).with_suffix(".yaml")
BATCH, WIDTH, HIDDEN = 32, 64, 1024
STEPS, QUICK_STEPS = 10, 2

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_features(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    with gt.signal.context("features"):
        return torch.relu(x @ w1) @ w2


def by_inner_features(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    with gt.signal.context("features"):
        hidden = torch.relu(x @ w1)
    return hidden @ w2  # outside: this runs as its operands lie


def train_step(forward: Forward, x: Tensor, y: Tensor, weights: tuple[Tensor, Tensor]) -> float:
    loss = (forward(x, *weights) - y).square().mean()
    loss.backward()
    with torch.no_grad():
        for weight in weights:
            weight -= 0.5 * weight.grad
            weight.grad = None
    return loss.item()


def place(weights: tuple[Tensor, Tensor], second: str) -> tuple[Tensor, Tensor]:
    """Copies of the weights, each cut as a signal says."""
    placed = (gt.signal.tensor(weights[0], name="features"), gt.signal.tensor(weights[1], name=second))
    return tuple(weight.requires_grad_() for weight in placed)


def main() -> None:
    options = parse_arguments(__doc__, workers=2)
    steps = QUICK_STEPS if options.quick else STEPS
    gt.load_config(YAML)
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    plain = (torch.randn(WIDTH, HIDDEN) / 8, torch.randn(HIDDEN, WIDTH) / 32)
    found = {}
    with session(options):
        data = gt.to(x), gt.to(y)
        for forward, second in ((by_features, "features"), (by_inner_features, "inner_features")):
            weights = place(plain, second)
            losses = [train_step(forward, *data, weights) for _ in range(steps)]
            with gt.debug.comm() as comm:
                losses.append(train_step(forward, *data, weights))
            found[forward.__name__] = (losses, moves(comm.events), *map(where, weights))
            spread = is_spread(weights[0])
            widths = {worker: part.shape[1] for worker, part in weights[0].shards().items()}
    show("one training step", ("", "w1", "w2", "what moves"), [(name, *row[2:], row[1]) for name, row in found.items()])
    if spread:
        expect(widths == {0: 512, 1: 512}, f"Each worker has 512 of the {HIDDEN} features: {widths}.")
    own = tuple(weight.clone().requires_grad_() for weight in plain)
    expected = [train_step(lambda x, w1, w2: torch.relu(x @ w1) @ w2, x, y, own) for _ in range(steps + 1)]
    for name, (losses, *_) in found.items():
        compare(f"Losses of {name}", losses, expected)


if __name__ == "__main__":
    main()
