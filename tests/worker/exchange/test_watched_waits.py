"""Waits inside torch end when the other side is lost."""

import socket
import threading
import time
from datetime import timedelta

import pytest

from gt.wire.file_descriptors import shut_down_connections
from gt.worker.exchange import ProcessExchange, rendezvous
from gt.worker.exchange.watched_waits import IDLE_LOOKS, LOOK_SECONDS, WatchedWaits
from tests.subprocesses import wait_until
from tests.worker.exchange.transports import exchanges, left


@pytest.fixture
def waits():
    waits = WatchedWaits()
    yield waits
    waits.close()


def never():
    raise AssertionError("nothing is lost")


def test_a_wait_returns_what_its_function_returns(waits):
    assert waits.call(lambda: 3, lambda: None, never) == 3


def test_an_error_of_the_function_itself_is_raised(waits):
    def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        waits.call(fail, lambda: None, never)


def test_a_wait_is_given_up_when_its_check_raises(waits):
    ended = threading.Event()

    def wait():
        assert ended.wait(10)
        raise OSError("closed")

    def check():
        raise RuntimeError("worker 1 is lost")

    with pytest.raises(RuntimeError, match="worker 1 is lost") as error:
        waits.call(wait, check, ended.set)
    assert isinstance(error.value.__cause__, OSError)


def test_no_check_runs_beside_the_caller_and_the_thread_ends_at_close(waits):
    checks, others = [], {*threading.enumerate()}  # threads of workers that other tests have not ended
    waits.call(lambda: wait_until(lambda: checks, what="a look"), lambda: checks.append(1), never)
    done = len(checks)
    time.sleep(3 * LOOK_SECONDS)
    assert len(checks) == done
    waits.close()
    names = lambda: [thread.name for thread in threading.enumerate() if thread not in others]
    wait_until(lambda: "exchange-watch" not in names(), what="the end of the thread")
    waits.call(lambda: wait_until(lambda: len(checks) > done, what="a look"), lambda: checks.append(1), never)


def test_a_wait_after_a_pause_starts_no_thread(monkeypatch, waits):
    """There may be no memory for one: `Thread.start` then waits without end."""
    checks = []
    waits.call(lambda: None, lambda: None, never)
    monkeypatch.setattr(threading.Thread, "start", never)
    for pause in (0, (IDLE_LOOKS + 5) * LOOK_SECONDS):
        time.sleep(pause)
        checks.clear()
        waits.call(lambda: wait_until(lambda: checks, what="a look"), lambda: checks.append(1), never)


def test_connections_to_a_port_are_shut_down():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as one:
            shut_down_connections("127.0.0.1", port)
            assert one.recv(1) == b""


def test_a_wait_for_a_message_of_a_peer_that_is_lost_ends():
    """The peer is here, and its connection stays open: only the dispatcher knows that it is lost."""
    with left(exchanges(2, "gloo")) as (first, second):
        making = threading.Thread(target=second.find_group, args=((0, 1),))
        making.start()
        group = first.find_group((0, 1))
        making.join()
        message = group.receive(1, 8, group.buffer(8))
        threading.Timer(0.2, first.lose_worker, [1]).start()
        with pytest.raises(RuntimeError, match="worker 1 is lost"):
            message.work.wait(timedelta(minutes=5))
        with pytest.raises(RuntimeError, match="exchange nothing any more: worker 1 is lost"):
            group.begin([])


def test_a_store_whose_host_is_lost_is_not_waited_for():
    exchange = ProcessExchange(1, "cpu")
    hosting = ProcessExchange(0, "cpu")
    exchange.join_store("127.0.0.1", hosting.host_store(), 0)
    store = exchange.rendezvous.require_store()
    threading.Timer(0.2, exchange.lose_worker, [0]).start()
    with pytest.raises(RuntimeError, match="worker 0, which hosts the store of process groups, is lost"):
        store.wait(["never written"], timedelta(minutes=5))


def test_a_store_that_cannot_be_connected_to_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(rendezvous, "CONNECT_TIMEOUT", timedelta(seconds=2))
    others = {*threading.enumerate()}
    exchange = ProcessExchange(1, "cpu")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        threading.Timer(0.2, exchange.lose_worker, [0]).start()
        with pytest.raises(RuntimeError, match="worker 0, which hosts the store"):
            exchange.join_store("127.0.0.1", silent.getsockname()[1], 0)
    for thread in {*threading.enumerate()} - others:
        if thread.name == "exchange-connect":
            thread.join(60)
