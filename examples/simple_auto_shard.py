"""Sharding without signals: tensors that a program creates are cut over the workers that are there.

    python examples/simple_auto_shard.py                                       # one worker, inside this process
    GT_WORKERS=4 python examples/simple_auto_shard.py                          # four worker processes
    python examples/simple_auto_shard.py --distributed                         # a running server, localhost:12345
    python examples/simple_auto_shard.py --distributed --address localhost:54321

A server and its workers are started by hand: `python -m gt.server -p 12345`, and `python -m gt.worker -p 12345` for
each worker. GT_AUTO_SHARD=0 cuts nothing, GT_AUTO_SHARD=1 whatever has a first dim to cut.
"""

from __future__ import annotations

import argparse
import sys

import torch
from rich.console import Console
from rich.table import Table

import gt

ADDRESS = "localhost:12345"


def make_tensors(rows: int) -> dict[str, gt.Tensor]:
    return {
        f"gt.randn({rows}, 16)": gt.randn(rows, 16),
        f"gt.randn({rows + 1}, 16)": gt.randn(rows + 1, 16),  # an odd number of rows is cut for GT_AUTO_SHARD=1 only
        f"gt.zeros({rows})": gt.zeros(rows),
        f"gt.to(torch.ones({rows}, 16))": gt.to(torch.ones(rows, 16)),  # data of the program: it is in one place
    }


def show(tensors: dict[str, gt.Tensor]) -> None:
    table = Table("tensor", "layout", "workers", "rows by worker", title="automatic sharding")
    for name, x in tensors.items():
        parts = " ".join(str(part.shape[0]) if part.shape else "-" for part in x.shards().values())
        table.add_row(name, str(x.spec), " ".join(map(str, x.spec.mesh.workers)), parts)
    Console(highlight=False).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--distributed", action="store_true", help="use a running server")
    parser.add_argument("--address", default=ADDRESS, metavar="HOST:PORT", help=f"of the server (default: {ADDRESS})")
    parser.add_argument("--quick", action="store_true", help="smaller tensors")
    options = parser.parse_args()
    if options.distributed:
        gt.connect(options.address)
    rows = 8 if options.quick else 1024
    tensors = make_tensors(rows)
    x, w = tensors[f"gt.randn({rows}, 16)"], torch.ones(16, 4)
    with gt.debug.comm() as comm:
        tensors["x @ w"] = x @ w
        tensors["(x @ w).mean(0)"] = tensors["x @ w"].mean(0)
    show(tensors)
    print(f"The product and the mean moved {comm.bytes} bytes between workers.")
    agree = torch.allclose(tensors["(x @ w).mean(0)"].cpu(), (x.cpu() @ w).mean(0), atol=1e-5)
    print("Values agree with torch." if agree else "Values DISAGREE with torch.")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
