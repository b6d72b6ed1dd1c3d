"""What the examples share: their options, a session of GT, tables, and the comparison with torch."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import gt
from gt.debug import CollectiveEvent

TOLERANCE = 1e-4


def parse_arguments(description: str | None, workers: int) -> argparse.Namespace:
    """`workers` is how many the example's YAML names."""
    parser = argparse.ArgumentParser(
        description=inspect.cleandoc(description or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = f"start N worker processes; the example is made for {workers}. Without it: GT_WORKERS, or none"
    parser.add_argument("--workers", type=int, metavar="N", help=where)
    parser.add_argument("--virtual", action="store_true", help=f"{workers} workers inside this process, or N")
    parser.add_argument("--quick", action="store_true", help="as little work as shows the point")
    options = parser.parse_args()
    if options.virtual and options.workers is None:
        options.workers = workers
    return options


@contextmanager
def session(options: argparse.Namespace) -> Iterator[None]:
    """GT as the options say. Nothing has to be said for the worker inside this process."""
    torch.set_num_threads(1)  # tensors this small compute slower on more
    gt.init(workers=options.workers, mode="virtual" if options.virtual else None)
    try:
        yield
    finally:
        gt.shutdown()


def is_spread(x: gt.Tensor) -> bool:
    """Whether a tensor is on several workers. On the one of this process placements are ignored."""
    return x.spec.mesh.size > 1


def where(x: gt.Tensor) -> str:
    """The layout of a tensor and its workers: `w, - on 0 1`."""
    return f"{x.spec} on {' '.join(map(str, x.spec.mesh.workers))}".strip()


def moves(events: Iterable[CollectiveEvent]) -> str:
    """Collectives by their kind, with their bytes: `2 all-gather (96 B)`, a line for each kind."""
    totals: dict[str, list[int]] = {}
    for event in events:
        totals.setdefault(event.kind, []).append(event.bytes)
    return "\n".join(f"{len(sizes)} {kind} ({sum(sizes)} B)" for kind, sizes in totals.items()) or "nothing"


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*[f"{cell:.6f}" if isinstance(cell, float) else str(cell) for cell in row])
    out = Console(highlight=False, markup=False)
    (out if out.is_terminal else Console(width=160, highlight=False, markup=False)).print(table)


def compare(what: str, ours: Sequence[float] | Tensor, theirs: Sequence[float] | Tensor) -> None:
    """Say by how much two results differ. Ends the program if that is more than rounding."""
    found, expected = (torch.as_tensor(gathered(value)).double() for value in (ours, theirs))
    difference = (found - expected).abs().max().item()
    if not difference <= TOLERANCE:  # also where one of them is not a number
        raise SystemExit(f"{what} DISAGREE with torch: they differ by {difference:.1e}")
    print(f"{what} agree with torch to {TOLERANCE:g}.")


def gathered(value: Sequence[float] | Tensor) -> Sequence[float] | Tensor:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def expect(is_true: bool, claim: str) -> None:
    """Print a claim that holds, or end the program."""
    if not is_true:
        raise SystemExit(f"NOT TRUE: {claim}")
    print(claim)
