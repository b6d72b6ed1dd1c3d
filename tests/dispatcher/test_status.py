"""The status of a dispatcher: workers by the memory in which they show what they do, and sessions."""

import os
import signal
import threading
import time

import pytest
import torch

import gt
from gt.client import active_session
from gt.core import worker_progress
from gt.core.messages import DefineOp, DefineSite, RunOp
from gt.core.worker_progress import EXCHANGING, IDLE, RUNNING
from gt.dispatcher.status import read_status
from tests.dispatcher_harness import OP, A, B, create, harness_with
from tests.records import ADD, SMALL


def cell(op=0, site=0, state=IDLE, members=(0, 1, 2), **counts):
    values = [op, site, state, *[0] * (worker_progress.LENGTH - 3)]
    values[worker_progress.MEMBERS : worker_progress.COUNTERS] = worker_progress.member_words(members)
    for name, value in counts.items():
        values[getattr(worker_progress, name)] = value
    return values


@pytest.fixture
def harness():
    harness = harness_with(3)
    harness.tell(DefineSite(1, "train.py", 12, "step"), DefineOp(OP, ADD), create(A), RunOp(OP, (A, A), (B,), (), 0, 1))
    return harness


def test_a_worker_shows_its_op_line_and_counters(harness):
    progress = {0: cell(OP, 1, RUNNING, SINCE=50, BUSY=7, WAITED=2, OPS=9, BYTES=64, RECEIVED=5, SENT=6)}
    working, unknown, _ = read_status(harness.dispatcher, progress).workers
    assert (working.state, working.op, working.site) == ("running", "aten.add.Tensor", "train.py:12")
    assert (working.since, working.busy, working.waited, working.ops) == (50, 7, 2, 9)
    assert (working.nbytes, working.received, working.sent) == (64, 5, 6)
    assert (unknown.state, unknown.op) == ("unknown", "")


def test_who_exchanges_waits_for_those_that_are_elsewhere(harness):
    progress = {0: cell(OP, 1, EXCHANGING), 1: cell(OP, 1, RUNNING), 2: cell(OP, 1, EXCHANGING)}
    assert [worker.waits_for for worker in read_status(harness.dispatcher, progress).workers] == [(1,), (), (1,)]


def test_who_exchanges_waits_for_members_of_the_exchange_only(harness):
    progress = {0: cell(OP, 1, EXCHANGING, (0, 2)), 1: cell(OP, 1, RUNNING), 2: cell(OP, 1, RUNNING)}
    assert read_status(harness.dispatcher, progress).workers[0].waits_for == (2,)


@pytest.mark.parametrize("members", [(0,), (3, 61, 62, 200), (0, 371), (1, 100_000)])
def test_members_of_an_exchange_are_found_again(members):
    shown = cell(members=members)
    found = [worker for worker in range(400) if worker_progress.is_member(shown, worker)]
    assert found == (list(members) if members[-1] < 372 else list(range(400)))


def test_of_two_exchanges_the_earlier_one_waits_for_nobody(harness):
    """A worker that has its part of an exchange goes on to the next one."""
    progress = {0: cell(OP, 1, EXCHANGING, SINCE=50), 1: cell(OP, 2, EXCHANGING, SINCE=60)}
    assert [worker.waits_for for worker in read_status(harness.dispatcher, progress).workers][:2] == [(), (0,)]


def test_memory_of_a_hostile_worker_is_harmless(harness):
    for noise in (-1, 1 << 62, -(1 << 62)):
        (worker, *_) = read_status(harness.dispatcher, {0: [noise] * worker_progress.LENGTH}).workers
        assert worker.state == "unknown"


def test_sessions_have_their_tensors_and_requests(harness):
    (session,) = read_status(harness.dispatcher, {}).sessions
    assert (session.session, session.tensors, session.nbytes) == (1, 2, 2 * SMALL.nbytes)
    assert (session.queued, session.requests) == (0, 0)


@pytest.fixture
def busy_workers():
    """Two processes that exchange tensors until the fixture ends."""
    gt.init(workers=2)
    stopping = threading.Event()

    def work():
        x = gt.distribute(torch.ones(64, 64), gt.mesh(2, ("x",)), "x, -")
        while not stopping.is_set():
            x.redistribute(placements="-, -").sum().item()

    thread = threading.Thread(target=work)
    thread.start()
    yield active_session.current().channel
    stopping.set()
    thread.join()
    gt.shutdown()


def wait_for_state(channel, worker, state):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = channel.read_status().workers
        if found[worker].state == state:
            return found
        time.sleep(0.01)
    raise AssertionError(found)


def test_a_stopped_worker_is_shown_and_who_waits_for_it(busy_workers):
    pid = wait_for_state(busy_workers, 0, "exchanging")[1].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for_state(busy_workers, 1, "stopped")
        assert wait_for_state(busy_workers, 0, "exchanging")[0].waits_for == (1,)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for_state(busy_workers, 1, "running")


@pytest.mark.parametrize("mode", [{}, {"mode": "virtual"}], ids=["processes", "virtual"])
def test_real_workers_count_ops_bytes_and_time(mode):
    gt.init(workers=2, **mode)
    try:
        x = gt.distribute(torch.ones(64, 64), gt.mesh(2, ("x",)), "x, -")
        for _ in range(20):
            y = x.redistribute(placements="-, -") @ x.redistribute(placements="-, x")
        y.sum().item()
        time.sleep(0.05)
        (x + 1).sum().item()  # bytes are measured at the end of a batch, not more often than every 20 ms
        gt.synchronize()
        channel = active_session.current().channel
        for worker in channel.read_status().workers:
            assert worker.state == "idle" and worker.busy > 0 and worker.ops >= 20
            assert worker.nbytes > 0
            assert "aten" in worker.op and "test_status.py" in worker.site
    finally:
        gt.shutdown()
