"""Signals that are configured in Python.

    python examples/config_from_python.py                # the worker of this process: the same numbers
    python examples/config_from_python.py --workers 2    # 2 worker processes
    python examples/config_from_python.py --virtual      # 2 workers inside this process

What a YAML file says can be said with `gt.register_config` too. Both mix: of two that configure one name, the later one
counts. Registering counts from the next op on.
"""

from __future__ import annotations

import argparse
import sys

import torch
from rich.console import Console
from rich.table import Table

import gt
from gt import ShardConfig, SignalConfig


def configure() -> None:
    rows = ShardConfig(axis=0, workers=[0, 1])
    gt.register_config("forward", SignalConfig(shard=rows, backward_signal="backward"))
    gt.register_config("backward", SignalConfig(shard=rows))
    gt.register_config("columns", SignalConfig(shard=ShardConfig(mesh={"tp": 2}, dims=["-", "tp"])))
    gt.register_config("everywhere", SignalConfig(shard=ShardConfig(replicate=True, workers=[0, 1])))


def where(x: gt.Tensor) -> str:
    return f"{x.spec} on {' '.join(map(str, x.spec.mesh.workers))}".strip()


def compute(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A product in a scope, and the gradient of its weight. Of plain tensors as well: then signals mean nothing."""
    with gt.signal.context("forward"):
        y = torch.relu(x @ w)
    (gradient,) = torch.autograd.grad(y.square().sum(), w)
    return y, gradient


def show_layouts(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """The results on GT, after a table that says where they are."""
    ours = gt.to(x), gt.to(w).requires_grad_()
    y, gradient = compute(*ours)
    table = Table("", "where", title="signals from Python")
    rows = {"x": ours[0], "w": ours[1], "y": y, "gradient of w": gradient}
    for signal in ("columns", "everywhere"):
        with gt.signal.context(signal):
            rows[f"made in {signal}"] = gt.zeros(4, 4)
    gt.register_config("columns", SignalConfig(shard=ShardConfig(axis=1, workers=[1])))  # from now on
    with gt.signal.context("columns"):
        rows["made in columns, registered anew"] = gt.zeros(4, 4)
    for name, tensor in rows.items():
        table.add_row(name, where(tensor))
    Console(highlight=False).print(table)
    return [y.detach().cpu(), gradient.cpu()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes to start, at least 2")
    parser.add_argument("--virtual", action="store_true", help="workers inside this process")
    parser.add_argument("--quick", action="store_true", help="changes nothing: this is quick anyway")
    options = parser.parse_args()
    configure()
    print("configured:", ", ".join(gt.get_config().signals))
    print("forward:", gt.get_signal_config("forward"))
    torch.manual_seed(0)
    x, w = torch.randn(8, 6), torch.randn(6, 4, requires_grad=True)
    gt.init(workers=options.workers or (2 if options.virtual else None), mode="virtual" if options.virtual else None)
    try:
        found = show_layouts(x, w.detach())
    finally:
        gt.shutdown()
    agree = all(torch.allclose(*pair, atol=1e-5) for pair in zip(found, compute(x, w), strict=True))
    print("Values and gradients agree with torch." if agree else "Values or gradients DISAGREE with torch.")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
