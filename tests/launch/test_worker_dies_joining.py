"""A worker that dies before it has joined the store does not block the others."""

import contextlib
import os
import threading

import psutil
import pytest
import torch

import gt
from gt.client import active_session
from gt.core.messages import Hello
from gt.core.settings import Settings, read_settings
from gt.dispatcher.server import DRAINING_SECONDS
from gt.version import __version__
from gt.wire.codec import encode
from gt.wire.connections import open_link
from gt.wire.process_identity import this_host
from gt.wire.server_keys import keys_directory
from tests.subprocesses import finish, running, start, start_server, wait_for_workers, wait_until


@pytest.fixture
def server():
    """A server with one worker, both as processes, and its port. This process is connected to it."""
    main, port = start_server()
    worker = start("-m", "gt.worker", "-p", str(port), "--threads", "1")
    with running(main, worker):
        wait_for_workers(port, 1)
        gt.connect(f"localhost:{port}")
        try:
            yield main, worker, port
        finally:
            gt.shutdown()


@contextlib.contextmanager
def mute_worker(port):
    """A peer that says hello as worker 1, and does nothing after that."""
    link = open_link(f"tcp://127.0.0.1:{port}", keys_directory(read_settings().keys), 10_000, 0)
    try:
        link.send(encode([Hello(__version__, "worker", this_host(), os.getpid(), device="cpu")]))
        assert link.receive() is not None
        wait_until(lambda: len(there()) == 2, what="the second worker")
        yield
    finally:
        link.close()


def there():
    gt.zeros(1, mesh=gt.mesh(1, ("dp",)), placements="-").sum().item()
    return active_session.current().workers


def exchange():
    """A tensor that worker 0 cannot have without worker 1."""
    return gt.ones(4, mesh=gt.mesh(2, ("dp",)), placements="dp").redistribute(placements="-").sum()


def status():
    return active_session.current().inbox._status


def wait_in_exchange():
    """Let worker 0 wait for worker 1, in a thread that reads the result; returns the thread and its outcome."""
    outcome = []

    def read():
        try:
            outcome.append(exchange().item())
        except gt.GTError as error:
            outcome.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    wait_until(lambda: outcome or "worker 0, which is at " in status(), what="the wait for worker 0")
    assert not outcome
    return thread, outcome


def test_a_worker_that_leaves_before_it_joins_the_store_is_lost_for_all_sessions(server, fault):
    with mute_worker(server[2]):
        thread, outcome = wait_in_exchange()
        wait_until(lambda: "which is at redistribute (" in status(), what="news of the exchange")
    thread.join(20)
    (error,) = outcome
    assert isinstance(error, gt.WorkerLost) and "worker 1" in str(error)
    fault("a worker leaves while it joins, and others wait for it in an exchange", "`WorkerLost`; all sessions go on")
    assert (gt.to(torch.ones(3)) + 1).sum().item() == 6
    gt.shutdown()
    gt.connect(f"localhost:{server[2]}")
    assert gt.ones(3).sum().item() == 3


STOPS = """
import os, signal
from gt.worker.__main__ import main
from gt.worker.exchange.rendezvous import Rendezvous
Rendezvous.join_store = lambda *address: os.kill(os.getpid(), signal.SIGSTOP)
main()
"""


def test_a_worker_that_is_killed_while_it_joins_the_store_is_lost(server):
    joining = start("-c", STOPS, "-p", str(server[2]), "--threads", "1")
    with running(joining):
        wait_until(lambda: len(there()) == 2, what="the second worker")
        thread, outcome = wait_in_exchange()
        joining.kill()
        thread.join(20)
    (error,) = outcome
    assert isinstance(error, gt.WorkerLost) and "killed, or crashed" in str(error)
    assert (gt.to(torch.ones(3)) + 1).sum().item() == 6


def test_sigterm_ends_a_worker_that_waits_for_one_that_never_comes(server, fault):
    _, worker, port = server
    with mute_worker(port):
        thread, outcome = wait_in_exchange()
        worker.terminate()
        code, _, _ = finish(worker, 20)
        thread.join(20)
    assert code == 0 and isinstance(outcome[0], gt.WorkerLost)
    fault("a worker that waits in an exchange gets SIGTERM", "it ends")


@pytest.mark.slow
def test_a_worker_that_waits_for_one_that_never_comes_ends_with_its_server(server):
    main, worker, port = server
    with mute_worker(port):
        thread, outcome = wait_in_exchange()
        main.terminate()  # it waits for the answer that the program waits for, for a limited time
        assert finish(main, DRAINING_SECONDS + 20)[0] == 0
        finish(worker, 20)
        thread.join(20)
    assert isinstance(outcome[0], gt.ServerLost)


def test_sigterm_ends_a_worker_that_is_blocked_in_a_process_group(server):
    """It runs no signal handler there."""
    _, worker, port = server
    peer = start("-m", "gt.worker", "-p", str(port), "--threads", "1")
    with running(peer):
        wait_until(lambda: len(there()) == 2, what="the second worker")
        assert exchange().item() == 4
        psutil.Process(peer.pid).suspend()
        thread, outcome = wait_in_exchange()
        worker.terminate()
        finish(worker, Settings().drain + 20)
        peer.kill()
        thread.join(20)
    assert isinstance(outcome[0], gt.WorkerLost)
