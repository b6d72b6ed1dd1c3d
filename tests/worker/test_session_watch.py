"""Ops without an end: once their sessions have ended, workers go on, and nobody else loses a tensor."""

import contextlib
import signal
import time
from contextlib import contextmanager

import psutil
import pytest
import torch

import gt
from gt.core.messages import WorkerEndSession, WorkerShareTensor
from gt.worker.engines import make_engine
from gt.worker.exchange import InProcessExchange
from gt.worker.executor import Executor
from gt.worker.session_watch import ParkedThreads, SessionWatch, can_park
from tests.records import own
from tests.subprocesses import finish, running, serving, start, start_server, wait_until

pytestmark = pytest.mark.skipif(not can_park(), reason="threads are put to sleep on Linux only")
SECONDS = 5
PROGRAM = """
import signal, sys, gt
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
mesh = gt.mesh(int(sys.argv[1]))
x = gt.ones(mesh.size, mesh=mesh, placements=[gt.Shard(0)]).expand(2**40, mesh.size).sum()
y = (x + 1).relu()  # needs the sum of all workers
print("begun", flush=True)
signal.sigwait([signal.SIGUSR1])
gt.shutdown()
signal.sigwait([signal.SIGUSR1])
"""
ENDINGS = {"gt.shutdown": signal.SIGUSR1, "SIGKILL": signal.SIGKILL, "its lease": signal.SIGSTOP}


def busy_workers():
    return [worker.worker for worker in gt.workers() if worker.state == "busy"]


def await_freed(since):
    wait_until(lambda: not busy_workers(), what="the end of the op")
    assert time.monotonic() - since < SECONDS


def train(steps, place):
    """The losses of a model after each step."""
    torch.manual_seed(0)
    data, model = (
        torch.randn(32, 8),
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)),
    )
    data, model = place(data), place(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(data) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


@contextmanager
def endless(port, workers):
    """A program with an op without an end on the first workers of a server."""
    program = start("-c", PROGRAM, str(workers), GT_SERVER=f"localhost:{port}")
    with running(program):
        assert program.stdout.readline() == "begun\n", finish(program)
        wait_until(lambda: len(busy_workers()) == workers, what="the op")
        yield program


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_op_without_an_end_ends_with_its_session(fault, ending):
    expected = list(train(6, lambda value: value))
    with serving(1, GT_HEARTBEAT_TIMEOUT="1", GT_LEASE="1") as port:
        gt.connect(f"localhost:{port}")
        (worker,) = gt.workers()
        training = train(6, gt.to)
        losses = [next(training) for _ in range(3)]
        with endless(port, 1) as program:
            since = time.monotonic() + (2 if ending == "its lease" else 0)
            program.send_signal(ENDINGS[ending])
            losses += training  # waits for the worker
            await_freed(since)
        torch.testing.assert_close(losses, expected)
        assert psutil.Process(worker.pid).cpu_percent(0.5) < 50
        gt.shutdown()
    fault("an op without an end runs on a worker of a server, and its session ends", "it ends within 5 s; others go on")


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_workers_that_leave_ops_without_an_end_still_exchange(transport):
    whole = torch.arange(12.0).reshape(6, 2)
    with serving(2, GT_TRANSPORT=transport) as port:
        gt.connect(f"localhost:{port}")
        x = gt.shard(whole, gt.mesh(2), 0)
        for _ in range(2):  # also the thread that took the place of the first one
            with endless(port, 2) as program:
                program.kill()
                assert (x.T @ x).tolist() == (whole.T @ whole).tolist()
            x, whole = x + 1, whole + 1
        assert x.tolist() == whole.tolist()
        gt.shutdown()


UNEVEN = """
import torch, gt
degrees = torch.zeros(1 << 16)
degrees[1 << 15 :] = 1e15  # only the second half has a loop without an end
y = torch.special.laguerre_polynomial_l(torch.full((1 << 16,), 0.5), gt.to(degrees))
gt.synchronize()
"""


def test_an_op_may_wait_for_the_threads_that_compute_for_it():
    """The part of the worker's own thread is done at once."""
    main, port = start_server()
    worker = start("-m", "gt.worker", "-p", str(port), "--threads", "2", OMP_NUM_THREADS="2")
    with running(main, worker):
        gt.connect(f"localhost:{port}", min_workers=1)
        x = gt.arange(3)
        program = start("-c", UNEVEN, GT_SERVER=f"localhost:{port}")
        with running(program):
            wait_until(busy_workers, what="the op")
            program.kill()
            since = time.monotonic()
            assert (x + 1).tolist() == [1, 2, 3]
            assert time.monotonic() - since < SECONDS
        gt.shutdown()


ONE_OP_LEFT = "import sys, gt.worker.session_watch as w; w.MAX_ABANDONED = 1; import gt.worker.__main__ as m; m.main()"


def test_a_worker_that_has_left_too_many_ops_says_so_and_ends():
    with serving() as port:
        worker = start("-c", ONE_OP_LEFT, "-p", str(port), "--threads", "1")
        with running(worker):
            gt.connect(f"localhost:{port}", min_workers=1)
            x = gt.arange(3)
            for may_be_left in (True, False):
                assert x.tolist() == [0, 1, 2]
                with endless(port, 1) as program:
                    program.kill()
                    if may_be_left:
                        wait_until(lambda: not busy_workers(), what="the end of the op")
            with pytest.raises(gt.WorkerLost, match="1 such ops were left already"):
                (x + 1).tolist()
            code, _, err = finish(worker, 10)
            assert code == 1 and "ends: an op of session" in err
            assert gt.workers() == []
            gt.shutdown()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_has_left_an_op_ends_at_a_signal(number):
    with serving() as port:
        worker = start("-m", "gt.worker", "-p", str(port), "--threads", "1")
        with running(worker):
            gt.connect(f"localhost:{port}", min_workers=1)
            with endless(port, 1) as program:
                program.kill()
                wait_until(lambda: not busy_workers(), what="the end of the op")
            gt.shutdown()
            worker.send_signal(number)
            assert finish(worker, 10)[0] == 0


def test_a_worker_in_an_op_without_an_end_ends_with_its_server():
    main, port = start_server()
    worker = start("-m", "gt.worker", "-p", str(port), "--threads", "1")
    with running(main, worker):
        gt.connect(f"localhost:{port}", min_workers=1)
        with endless(port, 1):
            gt.shutdown()
            main.kill()
            code, _, err = finish(worker, 10)
    assert code == 1 and "has ended" in err


@pytest.mark.parametrize(
    ("waiting", "is_over"),
    [
        ([], False),
        ([WorkerEndSession(2)], False),
        ([WorkerEndSession(1)], True),
        ([WorkerShareTensor(own(1), own(1, 2)), WorkerEndSession(1)], False),  # a subscriber waits for the value
        ([WorkerShareTensor(own(1), own(1, 2)), WorkerEndSession(1), WorkerEndSession(2)], True),
        ([WorkerShareTensor(own(1), own(2)), WorkerEndSession(1)], True),
        (None, True),  # the server has ended
    ],
)
def test_whose_work_nobody_needs(waiting, is_over):
    executor = Executor(0, make_engine("pytorch"), InProcessExchange(), None, owns_buffers=True)
    with contextlib.closing(SessionWatch(executor, ParkedThreads(), lambda: waiting, lambda: None, print)) as watch:
        assert watch.is_over(1) == is_over
