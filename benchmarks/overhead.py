"""What GT costs: per op, per read, per byte and to start, beside plain torch in the same run.

    python benchmarks/overhead.py [--quick] [--json FILE]

Times are the best of several repeats, and the ratios are what to trust: both sides of each are measured alternately.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from echo import echoing

import gt
from gt.client import active_session

OPS = 4  # in one link of the chain
SIZE = 64
WARM = 5  # runs after which repeated ops are sent in segments


def chain(x: torch.Tensor, weight: torch.Tensor, links: int) -> torch.Tensor:
    for _ in range(links):
        x = ((x + weight) * x).relu() @ weight
    return x


def best(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def per_op(repeats: int, links: int = 250) -> dict[str, float]:
    """Microseconds an op: torch's own, GT's, and GT's split into client, planner and executor."""
    x, weight = torch.randn(SIZE, SIZE) * 0.01, torch.randn(SIZE, SIZE) * 0.01
    ours = gt.to(x), gt.to(weight)
    channel = active_session.current().channel
    deliver = channel._deliver
    count = links * OPS * 1e-6

    def on_torch() -> object:
        return chain(x, weight, links)[0, 0].item()

    def on_gt() -> object:
        return chain(*ours, links)[0, 0].item()

    on_torch(), on_gt()
    times: dict[str, float] = {"torch": 1e9, "gt": 1e9, "client+planner": 1e9, "client": 1e9}
    for _ in range(repeats):
        times["torch"] = min(times["torch"], best(on_torch, 1) / count)
        times["gt"] = min(times["gt"], best(on_gt, 1) / count)
        channel._deliver = lambda outgoing: None  # commands are planned and dropped
        times["client+planner"] = min(times["client+planner"], best(lambda: chain(*ours, links), 1) / count)
        gt_flush()
        channel._deliver = deliver
        channel.send, send = lambda batch, buffers: None, channel.send  # instructions are emitted and dropped
        times["client"] = min(times["client"], best(lambda: chain(*ours, links), 1) / count)
        gt_flush()
        channel.send = send
        active_session.current().matcher.clear()  # segments whose definitions were dropped
        for _ in range(WARM):
            on_gt()
    return {
        "torch": times["torch"],
        "gt": times["gt"],
        "ratio": times["gt"] / times["torch"],
        "client": times["client"],
        "planner": times["client+planner"] - times["client"],
        "executor": times["gt"] - times["client+planner"],
    }


def small_ops(repeats: int, workers: int = 0, links: int = 300) -> dict[str, float]:
    """Microseconds an op of `x * a; x + b`, with tensors or numbers, on tensors that are cut over the workers; and the
    ratio to torch's own time."""
    plain = [torch.rand(SIZE, SIZE) for _ in range(3)]
    mesh = gt.mesh((workers,), ("all",)) if workers else None
    ours = [gt.to(x) if mesh is None else gt.distribute(x, mesh, [gt.Shard(0)]) for x in plain]

    def run(x: torch.Tensor, a: torch.Tensor | float, b: torch.Tensor | float) -> object:
        for _ in range(links):
            x = x * a
            x = x + b
        return x[0, 0].item()

    results: dict[str, float] = {}
    for kind, given in (("tensors", (plain, ours)), ("numbers", ([plain[0], 0.99, 0.5], [ours[0], 0.99, 0.5]))):
        times = [1e9, 1e9]
        for _ in range(repeats):
            times = [min(time, best(lambda: run(*args), 1)) for time, args in zip(times, given, strict=True)]
        results |= {kind: times[1] / links / 2 * 1e6, f"ratio with {kind}": times[1] / times[0]}
    return results


def gt_flush() -> None:
    active_session.current().outbox.flush()


def round_trip(repeats: int, workers: int = 1) -> float:
    """Microseconds for `x.sum().item()`, of a tensor that is cut over the workers if there are several."""
    x = gt.ones(SIZE) if workers == 1 else gt.ones(SIZE, mesh=gt.mesh(workers), placements=[gt.Shard(0)])
    x.sum().item()
    return best(lambda: [x.sum().item() for _ in range(50)], repeats) / 50 * 1e6


def round_trip_to_processes(repeats: int, workers: int = 1) -> dict[str, float]:
    """Microseconds for the same with worker processes, and for the hops of it alone: how long it takes to wake a
    thread differs more between machines than anything that GT does."""
    times = {"read": 1e9, "bare echo": 1e9}
    with echoing(workers) as echo:
        for _ in range(repeats):
            times["read"] = min(times["read"], round_trip(1, workers))
            times["bare echo"] = min(times["bare echo"], best(lambda: [echo() for _ in range(50)], 1) / 50 * 1e6)
    return {**times, "ratio": times["read"] / times["bare echo"], "more": times["read"] - times["bare echo"]}


def bandwidth(repeats: int, megabytes: int, workers: int = 1) -> dict[str, float]:
    """GB/s of an upload, a download, and a memcpy of the same size: of a tensor that is cut over the workers if there
    are several. The memory between client and workers was used before."""
    x = torch.ones(megabytes << 18)
    target = torch.empty_like(x)
    gigabytes = x.nbytes / 1e9
    mesh = gt.mesh(workers) if workers > 1 else None

    def upload() -> torch.Tensor:
        ours = gt.to(x) if mesh is None else gt.distribute(x, mesh, [gt.Shard(0)])
        gt.synchronize()
        return ours

    ours = upload()
    ours.cpu()
    times = {"memcpy": 1e9, "fresh memcpy": 1e9, "upload": 1e9, "download": 1e9}
    for _ in range(repeats):
        times["memcpy"] = min(times["memcpy"], best(lambda: target.copy_(x), 1))
        times["fresh memcpy"] = min(times["fresh memcpy"], best(x.clone, 1))
        times["upload"] = min(times["upload"], best(upload, 1))
        times["download"] = min(times["download"], best(ours.cpu, 1))
    return {what: gigabytes / seconds for what, seconds in times.items()}


def start_up(repeats: int) -> dict[str, float]:
    """Seconds from the interpreter's start to a first result: with torch alone, and with GT. Both have their modules
    compiled from an earlier run, as a program has."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}

    def run(module: str) -> float:
        result = f"import torch, {module}; ({module}.ones(2) + 1).sum().item()"
        command = [sys.executable, "-c", f"{result}; import time; print(time.monotonic())"]
        start = time.monotonic()  # the same clock in all processes
        return float(subprocess.run(command, check=True, capture_output=True, env=environment).stdout) - start

    run("gt")
    runs = [(run("torch"), run("gt")) for _ in range(repeats)]
    plain, ours = map(min, zip(*runs, strict=True))
    return {"torch": plain, "gt": ours, "more": ours - plain}


def local_workers(count: int, repeats: int) -> dict[str, float]:
    """Seconds until one and so many worker processes are ready; and those of a program that imports torch and prints a
    tensor, to which the ratio is."""
    program = [sys.executable, "-c", "import torch; print(torch.ones(1))"]

    def run_workers(number: int) -> float:
        start = time.perf_counter()
        gt.init(workers=number)
        gt.synchronize()
        seconds = time.perf_counter() - start
        gt.shutdown()
        return seconds

    def run_torch() -> float:
        return best(lambda: subprocess.run(program, check=True, capture_output=True), 1)

    runs = [(run_torch(), run_workers(1), run_workers(count)) for _ in range(repeats)]
    plain, one, several = map(min, zip(*runs, strict=True))
    return {"torch": plain, "1 process": one, f"{count} processes": several, "ratio": several / plain}


def measure(quick: bool) -> dict[str, object]:
    repeats = 3 if quick else 15
    megabytes = 32 if quick else 256
    gt.init()
    results: dict[str, object] = {
        "us per op, embedded": per_op(repeats),
        "us per small op, embedded": small_ops(repeats),
        "us per round trip, embedded": round_trip(repeats),
        f"GB/s of {megabytes} MB, embedded": bandwidth(repeats, megabytes),
    }
    gt.shutdown()
    gt.init(workers=1)
    results["us per round trip, one process"] = round_trip_to_processes(repeats)
    results[f"GB/s of {megabytes} MB, one process"] = bandwidth(repeats, megabytes)
    gt.shutdown()
    for workers in (2,) if quick else (2, 8):
        gt.init(workers=workers)
        results[f"us per small op, {workers} processes"] = small_ops(repeats, workers)
        if workers == 2:
            results["us per round trip, 2 processes"] = round_trip_to_processes(repeats, workers)
            results[f"GB/s of {megabytes} MB, 2 processes"] = bandwidth(repeats, megabytes, workers)
        gt.shutdown()
    results["s to start"] = start_up(2 if quick else 5)
    results["s until workers are ready"] = local_workers(4, 2 if quick else 5)
    return results


def show(results: dict[str, object]) -> None:
    for name, value in results.items():
        if isinstance(value, dict):
            print(f"{name:<36}" + "  ".join(f"{part} {number:.2f}" for part, number in value.items()))
        else:
            print(f"{name:<36}{value:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a rough answer in seconds")
    parser.add_argument("--json", default="", help="also write the figures to a file")
    options = parser.parse_args()
    results = measure(options.quick)
    show(results)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
