"""Tensors on their way: senders go on at once, and what is on its way has a limit."""

import os
import signal
import time

import pytest
import torch

import gt
from gt.client import session as sessions
from gt.worker.exchange.in_flight import InFlightSends

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


def test_a_sender_goes_on_until_there_is_too_much():
    sender = Sender()
    sender.send(1, "a")
    sender.send(2, "b")
    assert sender.waited == []
    sender.send(1, "c")
    assert (sender.waited, sender.in_flight.nbytes, len(sender.in_flight)) == (["a"], 20, 2)


def test_one_that_is_larger_than_the_limit_goes_alone():
    sender = Sender(limit=5)
    sender.send(1, "a")
    sender.send(1, "b")
    assert (sender.waited, len(sender.in_flight)) == (["a"], 1)


def test_what_a_peer_says_confirms_what_it_was_sent():
    sender = Sender(limit=1000)
    for peer, work in [(1, "a"), (2, "b"), (1, "c"), (1, "d")]:
        sender.send(peer, work)
    sender.in_flight.confirm(1, except_last=1)
    assert (sender.waited, len(sender.in_flight)) == (["a", "c"], 2)
    sender.in_flight.confirm(2)
    sender.in_flight.confirm(3)
    sender.in_flight.confirm(1)
    assert (sender.waited, len(sender.in_flight), sender.in_flight.nbytes) == (["a", "c", "b", "d"], 0, 0)


def test_what_did_not_arrive_is_forgotten(caplog):
    sender = Sender()
    sender.send(1, "lost", "never asked")
    sender.in_flight.confirm(1)
    assert (sender.waited, len(sender.in_flight), sender.in_flight.nbytes) == (["lost"], 0, 0)
    assert "a tensor did not reach worker 1: Connection closed" in caplog.text


def on(worker):
    return gt.mesh(1, ("w",), workers=[worker])


def test_a_sender_does_not_wait_for_a_receiver_that_is_busy():
    gt.init(workers=2)
    try:
        small = gt.distribute(torch.ones(8, 8), on(0), "-, -")
        (small + gt.distribute(torch.ones(8, 8), on(1), "-, -")).sum().item()  # the workers have met
        large = gt.rand(1500, 1500, mesh=on(1))
        with gt.debug.timeline() as t:
            for _ in range(4):
                large = large @ large
            small.redistribute(on(1), "-, -")
        (sent,) = [event for event in t.events if event.worker == 0 and event.transfers]
        (received,) = [event for event in t.events if event.worker == 1 and event.transfers]
        assert sent.end < received.start
    finally:
        gt.shutdown()


@pytest.mark.parametrize("have_met", [True, False])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_peer_that_dies_in_the_middle_is_noticed(victim, have_met):
    """The other one may be waiting for it, or may have sent it something."""
    gt.init(workers=2)
    try:
        kept = gt.ones(8, 8, mesh=on(1 - victim))
        large = gt.rand(1200, 1200, mesh=on(victim))
        if have_met:
            (kept.redistribute(on(victim), "-, -") + large[:8, :8]).sum().item()
        for _ in range(60):
            large = (large @ large) * 1e-3
        sent = kept.redistribute(on(victim), "-, -")
        awaited = large.redistribute(on(1 - victim), "-, -") if victim == 0 else sent
        after = kept + 1
        session = sessions.current()
        session.outbox.flush()
        os.kill(session.welcome.workers[victim].pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises((gt.WorkerLost, gt.OpError)):
            awaited.sum().item()
        assert after.sum().item() == 128
        assert time.monotonic() - start < 10
    finally:
        gt.shutdown()
