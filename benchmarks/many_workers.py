"""The cost of a data-parallel step of an MLP to each of many virtual workers, which should not grow with their number.

python benchmarks/many_workers.py [--workers 4 16 64 200]
"""

from __future__ import annotations

import argparse
import time

import torch

import gt


def step_cost(workers: int, repeats: int) -> float:
    """CPU time of a step for each worker, in ms."""
    gt.init(workers=workers, mode="virtual")
    mesh = gt.mesh((workers,), ("dp",))
    model = gt.nn.Sequential(
        gt.nn.Linear(64, 128), gt.nn.ReLU(), gt.nn.Linear(128, 64), gt.nn.ReLU(), gt.nn.Linear(64, 8)
    )
    gt.to(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.redistribute(mesh, ", ".join(["-"] * parameter.dim()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = gt.randn(2 * workers, 64, mesh=mesh, placements="dp, -")
    y = gt.randn(2 * workers, 8, mesh=mesh, placements="dp, -")

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        gt.synchronize()

    step()
    step()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    gt.shutdown()
    return min(times) * 1e3 / workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16, 64, 200])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    costs = {workers: step_cost(workers, arguments.repeats) for workers in arguments.workers}
    first = next(iter(costs.values()))
    print("| workers | ms a worker | of the first |\n|---|---|---|")
    for workers, cost in costs.items():
        print(f"| {workers} | {cost:.2f} | {cost / first:.2f} |")


if __name__ == "__main__":
    main()
