"""Every transport of the table has all methods of the interface, and a swap over it gives the values sent."""

import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gt.core.meta import TensorMeta
from gt.worker.engines import make_engine
from gt.worker.exchange import TRANSPORTS, Exchange, make_exchange
from gt.worker.exchange.in_process import run_interleaved
from gt.worker.exchange.interface import Swap

META = TensorMeta((2,), (1,), 0, "float32")
ENGINE = make_engine("pytorch", "cpu")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_transport_has_the_methods_of_the_interface(transport):
    exchange = make_exchange(transport, 0, "cpu")
    names = [name for name, _ in inspect.getmembers(Exchange) if not name.startswith("_")]
    assert len(names) == 8 and [name for name in names if not hasattr(exchange, name)] == []


def swap_of(worker):
    """Each of two workers sends its own id, twice."""
    peer = 1 - worker
    return Swap((0, 1), {peer: (META, torch.full((2,), float(worker)))}, {peer: META})


def test_virtual_workers_swap_values():
    received = {}

    def compute(worker):
        received[worker] = yield swap_of(worker)

    run_interleaved({worker: compute(worker) for worker in (0, 1)})
    assert [received[0][1].tolist(), received[1][0].tolist()] == [[1.0, 1.0], [0.0, 0.0]]


def test_worker_processes_swap_values_and_begin_without_waiting():
    pair = [make_exchange("process groups", worker, "cpu") for worker in (0, 1)]
    port = pair[0].host_store()
    for exchange in pair:
        exchange.join_store("127.0.0.1", port, 0)
    with ThreadPoolExecutor(2) as threads:  # they have to meet once
        begun = [threads.submit(exchange.begin, swap_of(worker), ENGINE) for worker, exchange in enumerate(pair)]
        first, second = [each.result(60) for each in begun]
    assert first.finish()[1].tolist() == [1.0, 1.0] and second.finish()[0].tolist() == [0.0, 0.0]
    works = [exchange.begin(swap_of(worker), ENGINE) for worker, exchange in enumerate(pair)]
    assert [work.finish()[1 - worker].tolist() for worker, work in enumerate(works)] == [[1.0, 1.0], [0.0, 0.0]]


def test_workers_that_wait_for_each_other_are_a_mistake():
    def compute(worker):
        yield Swap((0, 1), {}, {1 - worker: META})

    with pytest.raises(AssertionError, match=r"workers \[0, 1\] wait for each other"):
        run_interleaved({worker: compute(worker) for worker in (0, 1)})
