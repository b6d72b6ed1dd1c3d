"""One worker of a stress test, as a process: exchanges in random groups, whose results it can compute by itself.

All members draw the same schedule from one seed. Each has delays of its own, and little memory, so that blocks, slots
and descriptors are used again all the time.
"""

import random
import signal
import sys
import time

import torch

from gt.core.messages import Failure
from gt.sharding.spec import DeviceMesh
from gt.worker.exchange import ProcessExchange, arena, member_status, shared_memory_reductions
from gt.worker.failed_value import FailedValue
from gt.worker.moves import Mover, run_moves
from tests.dispatcher_harness import at, over
from tests.worker.exchange.tasks import ENGINE, dense, fail
from tests.worker.exchange.transports import drive

FAILING = FailedValue(Failure(0, "aten.mm.default", (), 0, 1, "RuntimeError", "no value", ""))
SIZES = (1, 3, 64, 1000, 5000, 20_000, 40_000, 150_000)
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "send", "maximum")


def use_little_memory():
    arena.KEPT_BYTES = member_status.KEPT_BYTES = 1 << 18
    arena.MAX_OUTSTANDING = 1 << 20
    shared_memory_reductions.CHUNK_BYTES = 1 << 16
    shared_memory_reductions.ONE_SHOT_BYTES = 1 << 12


def whole_of(step, number, size):
    return ((torch.arange(size) * 7 + step * 13 + number) % 251).float()


def addend_of(step, number, size, worker):
    return ((torch.arange(size) * (worker + 3) + step + number) % 127).float()


class Exchanged:
    """One move of an exchange: what a worker has before it and must have after it."""

    def __init__(self, kind, step, number, members, size):
        mesh = DeviceMesh([len(members)], ["x"], list(members))
        self.meta = dense((size,))
        self.source = {
            "all-gather": over("x", mesh),
            "broadcast": at(members[0]),
            "send": at(members[0]),
            "maximum": over("- + x:max", mesh),
        }.get(kind, over("- + x", mesh))
        self.target = {"reduce-scatter": over("x", mesh), "send": at(members[1])}.get(kind, over("-", mesh))
        addends = {worker: addend_of(step, number, size, worker) for worker in members}
        if kind in ("all-gather", "broadcast", "send"):
            whole = whole_of(step, number, size)
            self.values = dict.fromkeys(members, whole)
        else:
            whole = torch.stack([*addends.values()])
            whole = whole.amax(0) if kind == "maximum" else whole.sum(0)
            self.values = addends
        self.whole = whole

    def before(self, worker):
        return cut(self.values[worker], self.source, worker) if worker in self.source.mesh else None

    def after(self, worker):
        return cut(self.whole, self.target, worker) if worker in self.target.mesh else None


def cut(value, spec, worker):
    place = spec.mesh.workers.index(worker) if spec.dims[0] else 0
    start, stop = spec.intervals(tuple(value.shape), 0)[place]
    return value[start:stop].clone()


def run(exchange, worker, seed, count, workers):
    schedule, own = random.Random(seed), random.Random(f"{seed} {worker}")
    for step in range(count):
        members = tuple(sorted(schedule.sample(range(workers), schedule.randint(2, workers))))
        chosen = [
            Exchanged(schedule.choice(KINDS), step, number, members, schedule.choice(SIZES))
            for number in range(schedule.randint(1, 3))
        ]
        failing = schedule.choice(members) if schedule.random() < 0.05 else None
        if worker not in members:
            continue
        if own.random() < 0.1:
            time.sleep(own.random() * 0.01)
        values = [each.before(worker) for each in chosen]
        if worker == failing and values[0] is not None:
            values[0] = FAILING
        movers = [Mover(ENGINE, worker, each.meta, each.source, each.target) for each in chosen]
        check(exchange, worker, movers, values, chosen, f"seed {seed}, step {step}", failing)


def check(exchange, worker, movers, values, chosen, label, failing):
    found = []

    def computation():
        found.extend((yield from run_moves(movers, values, fail)))

    drive(exchange, computation())
    for position, (got, each) in enumerate(zip(found, chosen, strict=True)):
        expected = each.after(worker)
        if position == 0 and failing is not None and isinstance(got, FailedValue):
            continue  # whether it has failed here depends on what the worker takes
        text = f"{label}: {each.source} to {each.target} on {each.target.mesh}, {each.meta}"
        assert (got is None) == (expected is None), text
        if failing is None or position:
            assert got is None or torch.equal(got, expected), text


def main():
    worker, workers, seed, count, port = map(int, sys.argv[1:6])
    torch.set_num_threads(1)
    use_little_memory()
    exchange = ProcessExchange(worker, "cpu", transport=sys.argv[6])
    exchange.join_store("127.0.0.1", port, workers)
    run(exchange, worker, seed, count, workers)
    print("done", flush=True)
    signal.pause()  # the others may still read


if __name__ == "__main__":
    main()
