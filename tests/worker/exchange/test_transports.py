"""Every transport has all methods of the interface, and a step over it gives the values sent."""

import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gt.worker.exchange import Exchange, InProcessExchange, ProcessExchange
from gt.worker.exchange.in_process_exchange import run_interleaved
from tests.dispatcher_harness import at, over
from tests.worker.exchange.tasks import dense, task_of
from tests.worker.exchange.transports import PROCESS_TRANSPORTS, TRANSPORTS, exchanges, left, run_over


@pytest.mark.parametrize("exchange", [InProcessExchange(), ProcessExchange(0, "cpu")], ids=lambda e: type(e).__name__)
def test_a_transport_has_the_methods_of_the_interface(exchange):
    names = [name for name, _ in inspect.getmembers(Exchange) if not name.startswith("_")]
    assert len(names) == 13 and [name for name in names if not hasattr(exchange, name)] == []


def gather_of(worker):
    """Each of two workers has its own id, twice, and gets both."""
    return task_of(worker, torch.full((2,), float(worker)), over("x"), over("-"), dense((4,)))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_workers_exchange_values(transport):
    def compute(worker):
        (result,) = yield [gather_of(worker)]
        return result.tolist()

    results = run_over(transport, {worker: compute(worker) for worker in (0, 1)})
    assert [results[0], results[1]] == [[0, 0, 1, 1]] * 2


@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
def test_worker_processes_begin_without_waiting(transport):
    with left(exchanges(2, transport)) as pair:
        with ThreadPoolExecutor(2) as threads:  # they have to meet once
            begun = [threads.submit(exchange.begin, [gather_of(worker)]) for worker, exchange in enumerate(pair)]
            first = [each.result(60) for each in begun]
        assert [work.finish()[0].tolist() for work in first] == [[0, 0, 1, 1]] * 2
        second = [exchange.begin([gather_of(worker)]) for worker, exchange in enumerate(pair)]
        assert [work.finish()[0].tolist() for work in second] == [[0, 0, 1, 1]] * 2


@pytest.mark.parametrize(("transport", "way"), [("shared", "shared memory"), ("gloo", "gloo all-gather")])
def test_an_exchange_counts_the_ways_it_went(transport, way):
    with left(exchanges(2, transport)) as pair:
        for _ in range(3):
            with ThreadPoolExecutor(2) as threads:
                list(threads.map(lambda worker: pair[worker].begin([gather_of(worker)]).finish(), (0, 1)))
        assert [exchange.ways() for exchange in pair] == [{way: 3}] * 2


def test_workers_that_wait_for_each_other_are_a_mistake():
    def compute(worker):
        task = task_of(worker, torch.ones(2), at(worker), at(2))  # worker 2 never comes
        yield [task]

    with pytest.raises(AssertionError, match=r"workers \[0, 1\] wait for each other"):
        run_interleaved({worker: compute(worker) for worker in (0, 1)})
