"""Computations of several workers over each transport. Worker processes are threads here, which share a store and map
each other's memory as processes do."""

import atexit
import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from gt.worker.exchange import ProcessExchange
from gt.worker.exchange.in_process_exchange import run_interleaved
from gt.worker.exchange.interface import EarlyTasks, run_exchanges

PROCESS_TRANSPORTS = ("shared", "gloo")
TRANSPORTS = ("memory", *PROCESS_TRANSPORTS)
_WORKERS = 4
_kept = {}


def exchanges(count, transport="", **options):
    """Exchanges of some workers, which have all joined the store of the first."""
    found = [ProcessExchange(worker, "cpu", transport=transport, **options) for worker in range(count)]
    port = found[0].host_store()
    for exchange in found:
        exchange.join_store("127.0.0.1", port, 0)
    return found


@contextlib.contextmanager
def left(found):
    """Exchanges that leave in the end."""
    try:
        yield found
    finally:
        for exchange in found:
            exchange.leave()


def kept_exchanges(transport):
    """Exchanges that all tests of a process use, since connecting takes longer than most of them."""
    if transport not in _kept:
        found = _kept[transport] = exchanges(_WORKERS, transport)
        atexit.register(lambda: [exchange.leave() for exchange in found])
    return _kept[transport]


def run_over(transport, computations):
    """Run the computations of workers to their ends; returns what they return."""
    results = {}

    def note(worker, computation):
        results[worker] = yield from computation

    noted = {worker: note(worker, computation) for worker, computation in computations.items()}
    if transport == "memory":
        with torch.inference_mode(), np.errstate(all="ignore"):
            run_interleaved(noted)
        return results
    found = kept_exchanges(transport)
    with ThreadPoolExecutor(len(noted)) as threads:
        ends = [threads.submit(drive, found[worker], computation) for worker, computation in noted.items()]
        for end in ends:
            end.result(60)
    return results


def drive(exchange, computation):
    """Run a computation over the exchange of its worker."""
    with torch.inference_mode(), np.errstate(all="ignore"):
        run_exchanges(computation, lambda tasks: _begun(exchange, tasks))


def _begun(exchange, tasks):
    work = exchange.begin(tasks)
    return work if isinstance(tasks, EarlyTasks) and exchange.begins_early(tasks) else work.finish()
