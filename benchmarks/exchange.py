"""Collectives between worker processes: GT through shared memory and over Gloo, beside Gloo's own collective and a copy
of the same bytes, in one run.

    python benchmarks/exchange.py [--processes 2 4] [--quick]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from gt.core.meta import TensorMeta, contiguous_strides
from gt.launch.commands import MEMORY_SETTINGS
from gt.sharding.spec import DeviceMesh
from gt.sharding.spec_text import parse_spec
from gt.worker.engines import make_engine
from gt.worker.exchange import ProcessExchange
from gt.worker.exchange.distributed_private import make_gloo_group
from gt.worker.exchange.interface import run_exchanges
from gt.worker.moves import Mover, run_moves

SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
LAYOUTS = {
    "all-reduce": ("-, - + x", "-, -"),
    "all-gather": ("x, -", "-, -"),
    "reduce-scatter": ("-, - + x", "x, -"),
    "all-to-all": ("x, -", "-, x"),
}
ROUNDS = 5
LIMIT = timedelta(seconds=60)
Run = Callable[[], object]


def fail(op: str, values: object, error: Exception) -> None:
    raise error


def move(exchange: ProcessExchange, mover: Mover, value: torch.Tensor) -> None:
    computation = run_moves([mover], [value], fail)  # type: ignore[arg-type]
    run_exchanges(computation, lambda tasks: exchange.begin(tasks).finish())


def gt_run(exchange: ProcessExchange, rank: int, members: int, kind: str, nbytes: int) -> Run:
    """A collective of a whole tensor of so many bytes, as a worker runs it."""
    mesh = DeviceMesh([members], ["x"], range(members))
    source, target = (parse_spec(text, mesh) for text in LAYOUTS[kind])
    shape = (members, max(members, nbytes // 4 // members))
    mover = Mover(
        make_engine("pytorch"), rank, TensorMeta(shape, contiguous_strides(shape), 0, "float32"), source, target
    )
    step = mover.steps[0]
    assert step is not None and step.before is not None
    value = torch.ones(step.before.shape)
    return lambda: move(exchange, mover, value)


def gloo_run(group: dist.ProcessGroupGloo, members: int, kind: str, nbytes: int) -> Run:
    count = members * max(members, nbytes // 4 // members)
    whole, share = torch.ones(count), torch.ones(count // members)
    out, out_share = torch.empty(count), torch.empty(count // members)
    runs: dict[str, Run] = {
        "all-reduce": lambda: group.allreduce([whole]).wait(),
        "all-gather": lambda: group._allgather_base(out, share).wait(),
        "reduce-scatter": lambda: group._reduce_scatter_base(out_share, whole, dist.ReduceScatterOptions()).wait(),
        "all-to-all": lambda: group.alltoall_base(out_share, share, [], [], dist.AllToAllOptions()).wait(),
    }
    return runs[kind]


def best(run: Run, group: dist.ProcessGroupGloo, repeats: int) -> float:
    """The time of a collective in the best of some rounds, in us: rounds of one call, and rounds of calls without a
    pause, whichever suits it better. Members begin a round together."""
    times = []
    for calls in (*([1] * repeats), *([max(1, repeats // ROUNDS)] * ROUNDS)):
        group.barrier().wait()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - start) / calls)
    return min(times) * 1e6


def work(rank: int, members: int, port: int, sizes: tuple[int, ...], pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    group = make_gloo_group(dist.PrefixStore("bare", store), rank, members, "127.0.0.1", LIMIT, LIMIT)
    exchanges = {name: ProcessExchange(rank, "cpu", transport=name) for name in ("shared", "gloo")}
    for number, exchange in enumerate(exchanges.values()):
        exchange.join_store("127.0.0.1", port, number)  # the number keeps the keys of the two apart
    rows = []
    for kind in LAYOUTS:
        for nbytes in sizes:
            repeats = max(5, min(300, (64 << 20) // max(nbytes, 1)))
            runs = {name: gt_run(exchange, rank, members, kind, nbytes) for name, exchange in exchanges.items()}
            runs["bare"] = gloo_run(group, members, kind, nbytes)
            source, target = torch.ones(max(1, nbytes // 4)), torch.empty(max(1, nbytes // 4))
            runs["memcpy"] = lambda: target.copy_(source)
            for run in runs.values():
                run()
            rows.append([kind, nbytes, {name: best(run, group, repeats) for name, run in runs.items()}])
    pipe.send(rows)
    for exchange in exchanges.values():
        exchange.leave()


def measure(members: int, sizes: tuple[int, ...]) -> list[tuple[str, int, dict[str, float]]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    processes = [
        context.Process(target=work, args=(rank, members, store.port, sizes, there), daemon=True)
        for rank in range(members)
    ]
    for process in processes:
        process.start()
    found = []
    while len(found) < members:
        if here.poll(1):
            found.append(here.recv())
        elif any(process.exitcode for process in processes):
            raise RuntimeError("a member has ended with an error")
    for process in processes:
        process.join()
    return [
        (kind, nbytes, {name: max(rows[number][2][name] for rows in found) for name in found[0][number][2]})
        for number, (kind, nbytes, _) in enumerate(found[0])
    ]


def show(members: int, rows: list[tuple[str, int, dict[str, float]]]) -> None:
    print(f"\n{members} processes, times in us (the slowest member's best)\n")
    print("| collective | bytes | GT, shared memory | of Gloo's | GT over Gloo | Gloo alone | memcpy |")
    print("|---|---|---|---|---|---|---|")
    for kind, nbytes, times in rows:
        ratio = times["shared"] / times["bare"]
        print(
            f"| {kind} | {nbytes:,} | {times['shared']:,.0f} | {ratio:.2f} | {times['gloo']:,.0f} "
            f"| {times['bare']:,.0f} | {times['memcpy']:,.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--json", help="file for the figures")
    arguments = parser.parse_args()
    os.environ.update(MEMORY_SETTINGS)  # members, which are new processes, run as workers do
    sizes = SIZES[:4] if arguments.quick else SIZES
    results = {members: measure(members, sizes) for members in arguments.processes}
    for members, rows in results.items():
        show(members, rows)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
