"""Ray: one actor for each worker holds a part of the rows as a NumPy array; each op is a call of all actors."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray

from benchmarks.comparison import sizes
from benchmarks.comparison.peers.command import Case, Cases, Request, run_peer, sample, sample_programs

CHAIN_LINKS = 50  # Ray takes long for each call
RANDOM = np.random.default_rng(0)
INIT = "ray.init(address='local', num_cpus={workers}, include_dashboard=False, log_to_driver=False, logging_level=40)"


@ray.remote
class Part:
    """Arrays by name."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    def put(self, name: str, value: np.ndarray) -> None:
        self._arrays[name] = np.array(value)

    def get(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def run(self, op: str, left: str, right: str | float, out: str) -> None:
        other = self._arrays[right] if isinstance(right, str) else np.float32(right)
        self._arrays[out] = getattr(np, op)(self._arrays[left], other)

    def sum(self, name: str) -> np.float32:
        return self._arrays[name].sum()


class Parts:
    """The actors of a request."""

    def __init__(self, request: Request) -> None:
        ray.init(
            address="local", num_cpus=request.workers, include_dashboard=False, log_to_driver=False, logging_level=40
        )
        self._actors = [Part.remote() for _ in range(request.workers)]  # type: ignore[attr-defined]

    def put(self, name: str, value: np.ndarray) -> None:
        parts = np.array_split(value, len(self._actors))
        ray.get([actor.put.remote(name, part) for actor, part in zip(self._actors, parts, strict=True)])

    def put_whole(self, name: str, value: np.ndarray) -> None:
        ray.get([actor.put.remote(name, value) for actor in self._actors])

    def get(self, name: str) -> np.ndarray:
        return np.concatenate(ray.get([actor.get.remote(name) for actor in self._actors]))

    def run(self, op: str, left: str, right: str | float, out: str) -> list[Any]:
        """What to wait for with `ray.get`; an actor runs its calls in order."""
        return [actor.run.remote(op, left, right, out) for actor in self._actors]

    def sum(self, name: str) -> float:
        return float(sum(ray.get([actor.sum.remote(name) for actor in self._actors])))


def chain(request: Request) -> Cases:
    parts, shape = Parts(request), (sizes.CHAIN_SIZE, sizes.CHAIN_SIZE)
    parts.put("start", RANDOM.random(shape, np.float32))
    parts.put("factor", np.full(shape, sizes.FACTOR, np.float32))
    parts.put("addend", np.full(shape, sizes.ADDEND, np.float32))

    def run(factor: str | float, addend: str | float) -> float:
        source = "start"
        for _ in range(CHAIN_LINKS):
            parts.run("multiply", source, factor, "x")
            parts.run("add", "x", addend, "x")
            source = "x"
        return parts.get("x")[0, 0]

    operands = {"numbers": (sizes.FACTOR, sizes.ADDEND), "tensors": ("factor", "addend")}
    return {
        name: Case(sample(lambda: run(*given), request.budget, parts=2 * CHAIN_LINKS))
        for name, given in operands.items()
    }


def product(request: Request) -> Cases:
    """NumPy's own threads are off: see the driver."""
    parts = Parts(request)
    parts.put("a", RANDOM.random((sizes.PRODUCT_ROWS, sizes.PRODUCT_INNER), np.float32))
    parts.put_whole("b", RANDOM.random((sizes.PRODUCT_INNER, sizes.PRODUCT_COLUMNS), np.float32))
    return {"product": Case(sample(lambda: ray.get(parts.run("matmul", "a", "b", "c")), request.budget))}


def transfer(request: Request) -> Cases:
    parts = Parts(request)
    x = np.ones(sizes.QUICK_TRANSFER_FLOATS if request.quick else sizes.TRANSFER_FLOATS, np.float32)
    upload, download = lambda: parts.put("x", x), lambda: parts.get("x")
    upload()
    return {"in": Case(sample(upload, request.budget)), "out": Case(sample(download, request.budget))}


def start(request: Request) -> Cases:
    program = (
        f"import numpy, ray; {INIT.format(workers=request.workers)}\n"
        "Sum = ray.remote(type('Sum', (), {'run': lambda self: (numpy.ones(2) + 1).sum()}))\n"
        "print(ray.get(Sum.remote().run.remote()), flush=True); ray.shutdown()"
    )
    return {"start": Case(sample_programs(program, 1 if request.quick else 2))}


def read(request: Request) -> Cases:
    parts = Parts(request)
    parts.put("x", np.ones(sizes.CHAIN_SIZE, np.float32))
    step = lambda: [parts.sum("x") for _ in range(20)]
    return {"read": Case(sample(step, request.budget, parts=20))}


MEASURES = {"W1": chain, "W2": product, "W5": transfer, "W6": start, "W7": read}

if __name__ == "__main__":
    run_peer(MEASURES, {"ray": ray.__version__, "numpy": np.__version__})
    ray.shutdown()
