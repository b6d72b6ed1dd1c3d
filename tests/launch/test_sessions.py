"""Starting GT from several threads, and a start that is interrupted."""

import os
import signal
import threading

import pytest

import gt
from gt.launch import sessions
from tests.subprocesses import wait_until


@pytest.fixture(autouse=True)
def ended():
    yield
    gt.shutdown()


def test_of_threads_that_start_gt_at_once_one_does():
    barrier, outcomes = threading.Barrier(4), []

    def begin():
        barrier.wait(30)
        try:
            gt.init(workers=1)
            outcomes.append("started")
        except gt.SessionError:
            outcomes.append("refused")

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(outcomes) == ["refused", "refused", "refused", "started"]
    assert gt.ones(3).sum().item() == 3


def test_gt_cannot_be_started_while_a_thread_waits_for_its_workers():
    gt.init(workers=1)
    first = threading.Thread(target=gt.synchronize)
    first.start()
    wait_until(lambda: sessions._state.start is None, what="the thread that waits for the workers")
    with pytest.raises(gt.SessionError, match="running already"):
        gt.init(workers=1)
    first.join(60)
    assert gt.ones(3).sum().item() == 3


def test_a_start_that_is_interrupted_says_so():
    gt.init(workers=1)
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        gt.synchronize()
    interrupt.join(30)
    with pytest.raises(gt.SessionError, match="could not start: KeyboardInterrupt;"):
        gt.ones(3)


@pytest.mark.parametrize("address", ["", " ", None, 3, "tcp://127.0.0.1:12345", "localhost", "::1"])
def test_what_is_no_address_is_not_connected_to(address):
    with pytest.raises(gt.SettingsError, match="not an address of a server|address of IPv6"):
        gt.connect(address)


@pytest.mark.parametrize("count", [0, 1 << 17, 10**30])
def test_a_number_of_workers_that_cannot_be_is_refused(count):
    with pytest.raises(gt.SettingsError, match="workers"):
        gt.connect("localhost:12345", min_workers=count)
