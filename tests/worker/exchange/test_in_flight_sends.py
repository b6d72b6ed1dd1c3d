"""Senders do not wait for receivers, and the bytes in flight have a limit."""

import contextlib
import os
import signal
import time

import pytest
import torch

import gt
from gt.client import active_session
from gt.worker.exchange.in_flight_sends import InFlightSends

BUFFER = torch.zeros(10, dtype=torch.uint8)


class Sender:
    """Records the works that were waited for."""

    def __init__(self, limit=25):
        self.waited = []
        self.in_flight = InFlightSends(self.wait, limit)

    def wait(self, work):
        self.waited.append(work)
        if "lost" in work:
            raise RuntimeError("Connection closed by peer")

    def send(self, peer, *works):
        self.in_flight.reserve(10)
        self.in_flight.add(peer, works, [BUFFER])


def test_a_sender_waits_for_the_oldest_send_over_the_limit():
    sender = Sender()
    sender.send(1, "a")
    sender.send(2, "b")
    assert sender.waited == []
    sender.send(1, "c")
    assert (sender.waited, sender.in_flight.nbytes, len(sender.in_flight)) == (["a"], 20, 2)


def test_a_send_over_the_limit_goes_alone():
    sender = Sender(limit=5)
    sender.send(1, "a")
    sender.send(1, "b")
    assert (sender.waited, len(sender.in_flight)) == (["a"], 1)


def test_a_value_from_a_peer_confirms_the_sends_before_it():
    sender = Sender(limit=1000)
    for peer, work in [(1, "a"), (2, "b"), (1, "c"), (1, "d")]:
        sender.send(peer, work)
    sender.in_flight.confirm(1, except_last=1)
    assert (sender.waited, len(sender.in_flight)) == (["a", "c"], 2)
    sender.in_flight.confirm(2)
    sender.in_flight.confirm(3)
    sender.in_flight.confirm(1)
    assert (sender.waited, len(sender.in_flight), sender.in_flight.nbytes) == (["a", "c", "b", "d"], 0, 0)


def test_a_send_that_fails_is_logged_and_forgotten(caplog):
    sender = Sender()
    sender.send(1, "lost", "never asked")
    sender.in_flight.confirm(1)
    assert (sender.waited, len(sender.in_flight), sender.in_flight.nbytes) == (["lost"], 0, 0)
    assert "a tensor did not reach worker 1: Connection closed" in caplog.text


def on(worker):
    return gt.mesh(1, ("w",), workers=[worker])


@contextlib.contextmanager
def stopped(worker):
    """A worker process that does nothing meanwhile; gives its pid."""
    pid = active_session.current().welcome.workers[worker].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_a_sender_does_not_wait_for_its_receiver():
    gt.init(workers=2)
    try:
        small = gt.distribute(torch.ones(8, 8), on(0), "-, -")
        (small + gt.distribute(torch.ones(8, 8), on(1), "-, -")).sum().item()  # the workers have met
        with stopped(1):
            sent = small.redistribute(on(1), "-, -")
            assert (small + 1).sum().item() == 128
        assert sent.sum().item() == 64
    finally:
        gt.shutdown()


@pytest.mark.parametrize("have_met", [True, False])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_peer_that_dies_in_an_exchange_is_noticed(victim, have_met):
    """The other worker may be waiting for its value, or may have sent it one. It is noticed long before the timeouts of
    process groups."""
    gt.init(workers=2)
    try:
        kept, lost = gt.ones(8, 8, mesh=on(1 - victim)), gt.ones(8, 8, mesh=on(victim))
        if have_met:
            (kept.redistribute(on(victim), "-, -") + lost).sum().item()
        gt.synchronize()
        with stopped(victim) as pid:
            sent = kept.redistribute(on(victim), "-, -")
            awaited = lost.redistribute(on(1 - victim), "-, -") if victim == 0 else sent
            after = kept + 1
            active_session.current().outbox.flush()
            os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises((gt.WorkerLost, gt.OpError)):
            awaited.sum().item()
        assert after.sum().item() == 128
        assert time.monotonic() - start < 30
    finally:
        gt.shutdown()
