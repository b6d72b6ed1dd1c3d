"""Several threads of a program use one session at once."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import gt
from gt.client import active_session, cached_calls
from gt.client.outbox import FREE_AT_ONCE
from gt.client.storage import Storage, geometry_of
from gt.core.messages import RunOp
from tests.subprocesses import finish, start


@pytest.fixture
def switching():
    """Switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*tasks):
    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result(60) for future in [pool.submit(task) for task in tasks]]


def test_some_threads_write_to_a_tensor_that_others_read(anywhere, switching):
    x, rounds = gt.zeros(4), 300

    def write():
        for _ in range(rounds):
            x.add_(1)

    def read():
        return [(x * 1).sum().item() % 4 for _ in range(rounds)] + [x[1].item() % 1 for _ in range(20)]

    results = at_once(write, read, write, read)
    assert x.tolist() == [2 * rounds] * 4
    assert set(results[1] + results[3]) == {0.0}


def test_a_write_waits_until_an_op_that_names_the_tensor_is_queued(anywhere, monkeypatch):
    x = gt.ones(3)
    gt.synchronize()
    begin, written = threading.Event(), threading.Event()

    def write():
        begin.wait(10)
        x.add_(1)
        written.set()

    def slowly(*fields):
        """Between reading the ids of its tensors and the queue, an op gives another thread time to write."""
        if threading.current_thread() is threading.main_thread():
            begin.set()
            written.wait(0.3)
        return RunOp(*fields)

    thread = threading.Thread(target=write)
    thread.start()
    monkeypatch.setattr(cached_calls, "RunOp", slowly)
    doubled = x * 2
    monkeypatch.undo()
    thread.join(10)
    assert doubled.tolist() == [2, 2, 2] and x.tolist() == [2, 2, 2]


def test_tensors_are_freed_while_other_threads_create_them(anywhere, switching):
    def work():
        return [(gt.ones(3) * number).sum().item() for number in range(200)]

    assert at_once(*[work] * 4) == [[3.0 * number for number in range(200)]] * 4


def test_dead_tensors_are_freed_when_nothing_else_happens(embedded):
    x = gt.ones(1000)
    gt.synchronize()
    session = active_session.current()
    deadline = time.monotonic() + 20
    while not session.outbox._is_resting:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    store = session.channel.executors[0].tensors
    ident = x._ref.id
    assert ident in store
    del x
    while ident in store:
        assert time.monotonic() < deadline
        time.sleep(0.01)


FIRST = """
import threading, gt
gate, made = threading.Barrier(4), []
def work():
    gate.wait()
    made.append(gt.ones(2).sum().item())
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(made, gt.ones(1)._ref.session.welcome.ident)
"""


def test_several_threads_start_the_session_at_once():
    assert finish(start("-c", FIRST))[:2] == (0, "[2.0, 2.0, 2.0, 2.0] 1\n")


def test_a_thread_reads_while_another_waits(two_processes):
    mesh = [gt.mesh(1, ("w",), workers=[worker]) for worker in (0, 1)]
    large = gt.distribute(gt.ones(1500, 1500), mesh[0], "-, -")
    small = gt.distribute(gt.ones(3), mesh[1], "-")
    waiting, read = threading.Event(), []

    def wait():
        y = large
        for _ in range(12):
            y = (y @ large) / 1500
        waiting.set()
        total = y.sum().item()
        waiting.clear()
        return total

    def reads():
        waiting.wait(60)
        while waiting.is_set():
            read.append(small.sum().item())

    assert at_once(wait, reads)[0] == 1500 * 1500
    assert len(read) > 10 and set(read) == {3.0}


def test_more_tensors_are_freed_than_fit_one_instruction(two_processes):
    session = active_session.current()
    for _ in range(5 * FREE_AT_ONCE):
        Storage(session, next(session.ids), geometry_of(torch.empty(0)))
    assert gt.ones(3).sum().item() == 3


def test_an_op_of_very_many_tensors(two_processes):
    x = gt.ones(1)
    assert torch.cat([x] * 70_000).sum().item() == 70_000
