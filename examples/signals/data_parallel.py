"""Data parallel training: each worker has the whole model and a part of every batch.

    python examples/signals/data_parallel.py              # the worker of this process: the same numbers
    python examples/signals/data_parallel.py --virtual    # 4 workers inside this process
    python examples/signals/data_parallel.py --workers 4  # 4 worker processes

The model and the data are made outside of any scope. data_parallel.yaml says what the three scopes of the loop mean.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from running import compare, expect, is_spread, moves, parse_arguments, session, show
from torch import Tensor, nn
from torch.nn import functional

import gt
from gt.debug import Comm

YAML = Path(__file__).with_suffix(".yaml")
STEPS, QUICK_STEPS = 10, 3
LOSS_BYTES = 24  # to add up one number over 4 workers


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))


def make_data() -> tuple[Tensor, Tensor]:
    X_train = torch.randn(256, 16)  # noqa: N806
    return X_train, X_train[:, :8].sin()


def train(
    model: nn.Module,
    X_train: Tensor,  # noqa: N803
    y_train: Tensor,
    steps: int,
    watch: Callable[[], None],
) -> list[float]:
    """The training loop. It runs with plain tensors as well: signals then mean nothing."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        with gt.signal.context("forward_pass"):
            loss = functional.mse_loss(model(X_train), y_train)
        optimizer.zero_grad()
        loss.backward()  # in the scope backward_pass, as forward_pass says
        with gt.signal.context("parameter_updates"):
            optimizer.step()
        losses.append(loss.item())
        watch()
    return losses


class Traffic:
    """What moves between workers, step by step."""

    def __init__(self) -> None:
        self.steps: list[Comm] = []
        self._open()

    def __call__(self) -> None:
        self._comm.__exit__()
        self.steps.append(self._comm)
        self._open()

    def _open(self) -> None:
        self._comm = gt.debug.comm()
        self._comm.__enter__()


def check(model: nn.Module, traffic: Traffic) -> None:
    count = len(list(model.parameters()))
    broadcasts = [comm.count("broadcast") for comm in traffic.steps]
    expect(broadcasts == [count] + [0] * (len(broadcasts) - 1), "Weights are broadcast in the first step only.")
    expect(all(reductions(comm) == count for comm in traffic.steps), "Each gradient is reduced once in every step.")


def reductions(comm: Comm) -> int:
    """How many tensors were added up over the workers, but for the loss itself."""
    reduced = [event for event in comm.events if event.kind == "all-reduce" and event.bytes > LOSS_BYTES]
    return sum(event.tensors for event in reduced)


def main() -> None:
    options = parse_arguments(__doc__, workers=4)
    steps = QUICK_STEPS if options.quick else STEPS
    gt.load_config(YAML)
    torch.manual_seed(0)
    plain, data = make_model(), make_data()
    with session(options):
        model = gt.to(copy.deepcopy(plain))
        X_train, y_train = map(gt.to, data)  # noqa: N806
        traffic = Traffic()
        losses = train(model, X_train, y_train, steps, traffic)
        moved = [moves(comm.events) for comm in traffic.steps]
        show("data parallel", ("step", "loss", "what moved"), zip(range(1, steps + 1), losses, moved, strict=True))
        if is_spread(model[0].weight):
            check(model, traffic)
        weights = torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])
    expected = train(plain, *data, steps, lambda: None)
    compare("Losses", losses, expected)
    compare("Weights", weights, torch.cat([parameter.flatten() for parameter in plain.parameters()]))


if __name__ == "__main__":
    main()
