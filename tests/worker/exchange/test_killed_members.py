"""A worker that is killed in the middle of an exchange: the others learn of it within seconds, and exchange on."""

import os
import signal
import time

import psutil
import pytest
import torch

import gt
from gt.client import active_session
from tests.worker.exchange.transports import PROCESS_TRANSPORTS

SIZE = 4 << 20  # elements: an all-reduce of several chunks
SECONDS = 20


def pid_of(worker):
    return active_session.current().welcome.workers[worker].pid


def open_memory(pid):
    """The mappings and open files of shared memory of a worker."""
    process = psutil.Process(pid)
    return sum("memfd:gt" in each.path for each in process.memory_maps(grouped=False))


@pytest.fixture(params=PROCESS_TRANSPORTS)
def four_processes(request, monkeypatch):
    monkeypatch.setenv("GT_TRANSPORT", request.param)
    gt.init(workers=4)
    yield request.param
    gt.shutdown()


def check_death(victim, exchanges_before):
    """Worker `victim` of four is killed among large all-reduces; the other three then reduce among themselves."""
    mesh, rest = gt.mesh(4, ("x",)), gt.mesh(3, ("x",), workers=[each for each in range(4) if each != victim])
    partial = gt.distribute(torch.ones(SIZE), mesh, "- + x")
    kept = gt.distribute(torch.ones(1000), rest, "- + x")
    kept.redistribute(rest, "-").sum().item()
    for _ in range(exchanges_before):
        partial.redistribute(mesh, "-")
    gt.synchronize()
    totals = [partial.redistribute(mesh, "-") for _ in range(8)]
    active_session.current().outbox.flush()
    os.kill(pid_of(victim), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises((gt.WorkerLost, gt.OpError)):
        for total in totals:
            assert total.sum().item() == SIZE
        (partial + 1).sum().item()
    assert kept.redistribute(rest, "-").sum().item() == 1000
    assert time.monotonic() - start < SECONDS
    return [pid_of(worker) for worker in rest.workers]


def test_the_end_of_a_member_ends_the_exchanges_of_the_others(four_processes):
    """The victim is no neighbour of worker 1 in a ring."""
    survivors = check_death(3, exchanges_before=1)
    assert all(open_memory(pid) < 40 for pid in survivors)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])  # worker 0 hosts the store
@pytest.mark.parametrize("exchanges_before", [0, 3])
def test_the_end_of_any_member(four_processes, victim, exchanges_before):
    check_death(victim, exchanges_before)
