"""W9: GT's dispatcher alone, behind its real sockets. Null workers discard commands; clients send prepared batches.

Null workers and clients are two processes, each with a socket for every member. The figures are the CPU time of the
dispatcher's process for an op, its threads for input and output included: on few cores the time of the clock
would be that of the three processes together.
"""

from __future__ import annotations

import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack

import gt
from benchmarks.comparison import sizes
from benchmarks.comparison.peers.command import Case, Cases, Request, run_peer
from gt.dispatcher.server import Server

OPS, QUICK_OPS = 40_000, 8_000  # of all clients together, for up to MANY workers; fewer for more
MANY = 16
FEWEST = 8  # ops, or segments, of each client
QUICK_WORKERS = 8
ROUNDS = 2
SEGMENT = 50  # ops of a segment, where they are sent in segments
LIMIT_SECONDS = 60
END_SECONDS = 10


def measure(request: Request) -> Cases:
    most = QUICK_WORKERS if request.quick else max(sizes.DISPATCHER_WORKERS.values())
    cases = {}
    for name, workers in sizes.DISPATCHER_WORKERS.items():
        if workers <= most:
            samples, rate = measure_workers(workers, request)
            cases[name] = Case(samples, {f"ops a second, {name}": rate})
    return cases


def measure_workers(workers: int, request: Request) -> tuple[list[float], float]:
    """Seconds of CPU for an op in each round, and the most ops in a second by the clock. `request.workers` is the
    number of clients."""
    segment = SEGMENT if request.way else 1
    total = (QUICK_OPS if request.quick else OPS) * MANY // max(MANY, workers)
    total = max(total, FEWEST * segment * request.workers)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        server = Server(f"ipc://{folder}/dispatcher")
        stack.callback(server.close)
        null_workers = stack.enter_context(Members("null_workers", server.endpoint, workers))
        turn_until(server, lambda: len(server.dispatcher.ready_workers()) == workers, null_workers)
        clients = stack.enter_context(
            Members("null_clients", server.endpoint, request.workers, workers, total, segment)
        )
        samples, rates = [], []
        for _ in range(ROUNDS):
            turn_until(server, clients.has_line, clients)
            clients.read_line()
            start, clock = time.process_time(), time.perf_counter()
            clients.go()
            turn_until(server, clients.has_line, clients)
            seconds, elapsed = time.process_time() - start, time.perf_counter() - clock
            ops = int(clients.read_line())
            samples.append(seconds / ops)
            rates.append(ops / elapsed)
        return samples, max(rates)


class Members:
    """A process that plays all null workers, or all clients. It says with a line that it is ready, or done."""

    def __init__(self, module: str, *arguments: object) -> None:
        command = [sys.executable, "-m", f"benchmarks.comparison.peers.{module}", *map(str, arguments)]
        # Without a buffer, in which a second line could hide from `select`.
        self._process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self.output = self._process.stdin, self._process.stdout

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *error: object) -> None:
        self._input.close()  # tells it to end
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.output.close()

    def has_line(self) -> bool:
        return bool(select.select([self.output], [], [], 0)[0])

    def read_line(self) -> bytes:
        return self.output.readline()

    def go(self) -> None:
        self._input.write(b"go\n")

    def require_running(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(f"a process of the benchmark has ended with code {self._process.returncode}")


def turn_until(server: Server, is_done: Callable[[], bool], members: Members) -> None:
    """Serve until something is done. That is asked when no message waits, so that asking costs little."""
    end = time.monotonic() + LIMIT_SECONDS
    while True:
        while server.turn(waits=False):
            pass
        if is_done():
            return
        members.require_running()
        if time.monotonic() > end:
            raise TimeoutError(f"the dispatcher was not done after {LIMIT_SECONDS} s")
        select.select([server.descriptor, members.output], [], [], 0.05)


MEASURES = {"W9": measure}

if __name__ == "__main__":
    run_peer(MEASURES, {"gt": gt.__version__})
