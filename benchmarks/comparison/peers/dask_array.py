"""Dask array with its scheduler of threads: a chunk of rows for each worker, NumPy in each chunk."""

from __future__ import annotations

import dask
import dask.array
import numpy as np

from benchmarks.comparison import sizes
from benchmarks.comparison.peers.command import Case, Cases, Request, run_peer, sample, sample_programs

CHAIN_LINKS = 50  # Dask takes long for each op
RANDOM = np.random.default_rng(0)


def cut(x: np.ndarray, request: Request) -> dask.array.Array:
    return dask.array.from_array(x, chunks=(len(x) // request.workers, *x.shape[1:]))


def chain(request: Request) -> Cases:
    shape = (sizes.CHAIN_SIZE, sizes.CHAIN_SIZE)
    x = cut(RANDOM.random(shape, np.float32), request).persist()
    tensors = [cut(np.full(shape, number, np.float32), request).persist() for number in (sizes.FACTOR, sizes.ADDEND)]
    numbers = [np.float32(sizes.FACTOR), np.float32(sizes.ADDEND)]
    cases = {}
    for name, (factor, addend) in (("numbers", numbers), ("tensors", tensors)):
        step = lambda: run_chain(x, factor, addend).compute()[0, 0]
        cases[name] = Case(sample(step, request.budget, parts=2 * CHAIN_LINKS))
    return cases


def run_chain(
    x: dask.array.Array, factor: dask.array.Array | np.float32, addend: dask.array.Array | np.float32
) -> dask.array.Array:
    for _ in range(CHAIN_LINKS):
        x = x * factor
        x = x + addend
    return x


def product(request: Request) -> Cases:
    """NumPy's own threads are off: see the driver."""
    a = cut(RANDOM.random((sizes.PRODUCT_ROWS, sizes.PRODUCT_INNER), np.float32), request).persist()
    b = dask.array.from_array(RANDOM.random((sizes.PRODUCT_INNER, sizes.PRODUCT_COLUMNS), np.float32), chunks=-1)
    b = b.persist()
    return {"product": Case(sample(lambda: (a @ b).persist(), request.budget))}


def transfer(request: Request) -> Cases:
    """Chunks are copies in the program's own memory."""
    x = np.ones(sizes.QUICK_TRANSFER_FLOATS if request.quick else sizes.TRANSFER_FLOATS, np.float32)
    upload = lambda: cut(x, request).map_blocks(np.copy).persist()
    ours = upload()
    return {"in": Case(sample(upload, request.budget)), "out": Case(sample(ours.compute, request.budget))}


def start(request: Request) -> Cases:
    program = "import dask.array; print((dask.array.ones(2, dtype='float32') + 1).sum().compute(), flush=True)"
    return {"start": Case(sample_programs(program, 1 if request.quick else 2))}


def read(request: Request) -> Cases:
    x = cut(np.ones(sizes.CHAIN_SIZE, np.float32), request).persist()
    return {"read": Case(sample(lambda: float(x.sum().compute()), request.budget))}


MEASURES = {"W1": chain, "W2": product, "W5": transfer, "W6": start, "W7": read}

if __name__ == "__main__":
    run_peer(MEASURES, {"dask": dask.__version__, "numpy": np.__version__})
