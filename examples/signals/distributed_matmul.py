"""The three patterns of a distributed product, and sums over uneven shards.

    python examples/signals/distributed_matmul.py              # the worker of this process: the same numbers
    python examples/signals/distributed_matmul.py --virtual    # 4 workers inside this process
    python examples/signals/distributed_matmul.py --workers 4  # 4 worker processes

Operands are made in the scopes of distributed_matmul.yaml. The product itself is outside: it runs as they lie.
"""

from __future__ import annotations

from pathlib import Path

from running import compare, expect, is_spread, moves, parse_arguments, session, show, where
from torch import Tensor

import gt

YAML = Path(__file__).with_suffix(".yaml")
WORKERS, NUMBER = 4, 4  # bytes of a float32


def make(shape: tuple[int, int], signal: str) -> gt.Tensor:
    with gt.signal.context(signal):
        return gt.randn(*shape)


def multiply(name: str, a: gt.Tensor, b: gt.Tensor) -> tuple[tuple[str, ...], int]:
    """A row of the table, and the bytes that moved."""
    with gt.debug.comm() as comm:
        product = a @ b
    laid_out = where(product)
    compare(f"Values of a product, {name},", product, a.cpu() @ b.cpu())
    return (name, str(a.spec), str(b.spec), laid_out, moves(comm.events)), comm.bytes


def show_products(size: int) -> bool:
    """The table of patterns. Whether anything was on several workers."""
    small, others = size * size * NUMBER, WORKERS - 1
    rows, columns, everywhere = "rows", "columns", "everywhere"
    patterns = [
        ("left cut", ((4 * size, size), rows), ((size, size), everywhere), 0),
        ("both cut, right smaller", ((4 * size, size), rows), ((size, size), columns), small * others),
        ("both cut, left smaller", ((size, size), rows), ((size, 4 * size), columns), small * others),
        ("inner dim cut", ((size, size), columns), ((size, size), rows), 0),
    ]
    found = [(multiply(name, make(*a), make(*b)), expected) for name, a, b, expected in patterns]
    show("products", ("", "left", "right", "result", "what moves"), [row for (row, _), _ in found])
    spread = is_spread(partial := make((size, size), columns) @ make((size, size), rows))
    if spread:
        for (row, counted), expected in found:
            expect(counted == expected, f"{row[0]}: {counted} bytes.")
        with gt.debug.comm() as comm:
            partial.relu()
        expected = 2 * small * others
        expect(comm.bytes == expected, f"A partial result is added up when it is used: {moves(comm.events)}.")
    return spread


def sums(x: Tensor) -> dict[str, Tensor]:
    return {"sum()": x.sum(), "mean()": x.mean(), "sum(0)": x.sum(0), "sum(1)": x.sum(1), "mean(0)": x.mean(0)}


def show_sums(spread: bool) -> None:
    x = make((10, 6), "rows")  # 10 rows over 4 workers: 3, 3, 2 and 2
    with gt.debug.comm() as comm:
        results = sums(x)
    show("sums of 10 rows", ("", "result"), [(name, where(value)) for name, value in results.items()])
    if spread:
        parts = [part.shape[0] for part in x.shards().values()]
        expect(parts == [3, 3, 2, 2], f"Shards are uneven: {parts} rows.")
        expect(comm.bytes == 0, "Sums move nothing until they are read.")
    expected = sums(x.cpu())
    for name, value in results.items():
        compare(f"Values of {name}", value, expected[name])


def main() -> None:
    options = parse_arguments(__doc__, workers=WORKERS)
    gt.load_config(YAML)
    with session(options):
        gt.manual_seed(0)
        show_sums(show_products(16 if options.quick else 256))


if __name__ == "__main__":
    main()
