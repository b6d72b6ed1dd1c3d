"""Draws the pictures of `docs/timelines`, which `monitoring.md` shows: `python docs/draw_timelines.py [NAME ...]`.

Each picture is one step of a small model on two worker processes: the fastest of several, because other programs of the
machine disturb some. The steps before them move the weights to their places.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import gt
from gt.monitor.timeline_model import read_timeline
from gt.scripts.visualize import draw_log
from gt.signals.registry import registry

PICTURES = Path(__file__).with_name("timelines")
WARM_UP, TRACED = 3, 5
DEPTH, WIDTH, BATCH, MICRO_BATCHES = 4, 1024, 512, 4

CONFIG = """
batch:
  shard: {axis: 0, workers: [0, 1]}
first_half:
  shard: {axis: 0, workers: [0]}
second_half:
  shard: {axis: 0, workers: [1]}
"""
TENSOR_PARALLEL = """
model:
  mesh: {tp: 2}
  "*.expand.weight": [tp, -]
  "*.expand.bias": [tp]
  "*.shrink.weight": [-, tp]
"""
WEIGHTS_IN_PARTS = """
model:
  mesh: {w: 2}
  "*.weight": [w, -]
"""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 2 * width)
        self.shrink = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shrink(functional.gelu(self.expand(x)))


def blocks(depth: int = DEPTH, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(depth)])


Step = Callable[[], None]


def trained(model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    """A step of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        value.item()

    return step


def data_parallel() -> Step:
    """Each worker has all weights and half of the batch."""
    model, x = gt.to(blocks()), gt.to(torch.randn(BATCH, WIDTH))

    def loss() -> Tensor:
        with gt.signal.context("batch"):
            return model(x).square().mean()

    return trained(model, loss)


def tensor_parallel() -> Step:
    """Each worker has half of the features of each layer."""
    model, x = gt.to(blocks()), gt.replicate(torch.randn(BATCH // 2, WIDTH), gt.mesh(2, ("tp",)))
    return trained(model, lambda: model(x).square().mean())


def pipeline() -> Step:
    """Each worker has half of the layers, and the parts of a batch follow one another."""
    model, parts = gt.to(blocks()), gt.to(torch.randn(BATCH, WIDTH)).chunk(MICRO_BATCHES)
    half = DEPTH // 2

    def run(x: Tensor) -> Tensor:
        with gt.signal.context("first_half"):
            hidden = model[:half](x)
        with gt.signal.context("second_half"):
            return model[half:](hidden).square().mean()

    return trained(model, lambda: torch.stack([run(x) for x in parts]).sum())


def badly_planned() -> Step:
    """The weights are cut and the batch is small: they are gathered in each step, for little work."""
    model, x = gt.to(blocks()), gt.to(torch.randn(8, WIDTH))

    def loss() -> Tensor:
        with gt.signal.context("batch"):
            return model(x).square().mean()

    return trained(model, loss)


PROGRAMS: dict[str, tuple[str, Callable[[], Step]]] = {
    "data_parallel": ("", data_parallel),
    "tensor_parallel": (TENSOR_PARALLEL, tensor_parallel),
    "pipeline": ("", pipeline),
    "badly_planned": (WEIGHTS_IN_PARTS, badly_planned),
}


def trace(name: str, directory: Path) -> Path:
    """Run a program; returns the log of its fastest step."""
    config, program = PROGRAMS[name]
    registry.clear()
    (directory / "signals.yaml").write_text(CONFIG + config)
    gt.load_config(directory / "signals.yaml")
    gt.init(workers=2)
    step = program()
    for _ in range(WARM_UP):
        step()
    logs = [directory / str(number) / f"{name}.log" for number in range(TRACED)]
    for log in logs:
        with gt.debug.trace(log):
            step()
    gt.shutdown()
    return min(logs, key=lambda log: read_timeline(log).seconds)


def main(names: Sequence[str]) -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        for name in names or PROGRAMS:
            log = trace(name, Path(directory))
            draw_log(log, PICTURES / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
