"""Waits for answers, and failures that workers report in every order."""

import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from gt.client.call_sites import Sites
from gt.client.inbox import REMEMBERED, Inbox
from gt.core.errors import OpError, ProtocolError, SessionError, WorkerLost
from gt.core.messages import Failed, Lost, OpFailed, Refused, Synchronized
from gt.launch.in_process_channel import InProcessChannel
from gt.wire.client_channel import Received
from tests.records import FAILURE, own

REQUEST = own(50)


class Channel:
    """Receives the given answers one at a time."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def wait(self):
        pass

    def how_it_ended(self, pid):
        return ""

    def receive(self):
        return [Received(self.answers.pop(0))] if self.answers else []


def failure(op, worker):
    return msgspec.structs.replace(FAILURE, origin=own(op), worker=worker, site=0, traceback=f"on worker {worker}")


def report(op=7, worker=0):
    return OpFailed(1, failure(op, worker))


def inbox_of(*answers):
    return Inbox(Channel(*answers), Sites(lambda *_: None))


def unread(inbox):
    """The ops and workers of the failures that no read has shown, when all answers are received."""
    while inbox.collect():
        pass
    return [(found.origin - own(0), found.worker) for found in inbox.take_unread_failures()]


def read(inbox):
    with pytest.raises(OpError, match="shapes"):
        inbox.wait(REQUEST)


SHOWN = Failed(REQUEST, failure(7, 0))


ANSWERS = {"read": SHOWN, "7 on 0": report(7, 0), "7 on 1": report(7, 1), "8 on 1": report(8, 1)}


@pytest.mark.parametrize("order", [", ".join(order) for order in itertools.permutations(ANSWERS)])
def test_a_failure_that_a_read_shows_is_not_reported_again(order):
    inbox = inbox_of(*[ANSWERS[name] for name in order.split(", ")])
    read(inbox)
    assert unread(inbox) == [(8, 1)]


def test_reports_of_several_workers_are_one_failure():
    assert unread(inbox_of(report(7, 1), report(8, 0), report(7, 0), report(8, 1))) == [(7, 1), (8, 0)]


def test_a_failure_that_was_taken_is_not_reported_again_by_another_worker():
    inbox = inbox_of(report(7, 0), Synchronized(REQUEST), report(7, 1))
    inbox.wait(REQUEST)
    assert [found.worker for found in inbox.take_unread_failures()] == [0]
    assert unread(inbox) == []


def test_a_failure_can_be_read_again():
    inbox = inbox_of(SHOWN, SHOWN)
    read(inbox)
    read(inbox)


def test_failures_of_one_line_are_distinct():
    assert unread(inbox_of(*[report(op) for op in (1, 2, 3)])) == [(1, 0), (2, 0), (3, 0)]


def test_a_failure_without_identity_is_always_reported():
    nameless = OpFailed(1, msgspec.structs.replace(FAILURE, origin=0))
    assert len(unread(inbox_of(nameless, nameless))) == 2


def test_only_the_last_failures_are_recognised_again():
    inbox = inbox_of(*[report(op) for op in range(3 * REMEMBERED)], report(0, 1), report(3 * REMEMBERED - 1, 1))
    assert unread(inbox)[3 * REMEMBERED :] == [(0, 1)]


def test_answers_that_come_while_others_are_taken_are_not_lost():
    channel, count, taken = InProcessChannel(1, "pytorch"), 20000, []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=lambda: [channel._arrived.append((number, None)) for number in range(count)])
        thread.start()
        while thread.is_alive() or channel._arrived:
            taken += channel.receive()
    finally:
        sys.setswitchinterval(interval)
    channel.close()
    assert taken == [(number, None) for number in range(count)]


def test_an_answer_that_reports_a_loss_calls_the_loss_callback():
    lost, told = Lost(REQUEST, 1, 5, "was killed", ""), []
    inbox = Inbox(Channel(lost), Sites(lambda *_: None), told.append)
    with pytest.raises(WorkerLost):
        inbox.wait(REQUEST)
    assert told == [lost]


def test_a_refused_message_ends_every_wait():
    inbox = inbox_of(Refused("a message that cannot be decoded"))
    for _ in range(2):
        with pytest.raises(ProtocolError, match="cannot be decoded"):
            inbox.wait(REQUEST)


def test_an_interrupt_in_the_middle_of_receiving_ends_every_wait():
    """A second Ctrl-C does not wait, and answers that were being received may be lost."""

    class InterruptedOnce(Channel):
        interrupts = iter([KeyboardInterrupt])

        def receive(self):
            for interrupt in self.interrupts:
                raise interrupt
            return []

    inbox = Inbox(InterruptedOnce(), Sites(lambda *_: None))
    with pytest.raises(KeyboardInterrupt):
        inbox.wait(REQUEST)
    with pytest.raises(ProtocolError, match="KeyboardInterrupt has ended the session while it received"):
        inbox.wait(own(51))


def test_a_wait_has_a_timeout():
    with pytest.raises(TimeoutError):
        inbox_of().wait(REQUEST, 0.01)


def test_a_signal_handler_that_interrupts_a_wait_may_not_wait():
    class Interrupting(Channel):
        def wait(self):
            with pytest.raises(SessionError, match="in the middle of GT's own work"):
                inbox.wait(own(51))
            self.answers.append(Synchronized(REQUEST))

    inbox = Inbox(Interrupting(), Sites(lambda *_: None))
    assert inbox.wait(REQUEST, 10).answer == Synchronized(REQUEST)


def test_the_answer_of_a_wait_that_was_given_up_is_not_kept():
    channel = Channel()
    inbox = Inbox(channel, Sites(lambda *_: None))
    with pytest.raises(TimeoutError):
        inbox.wait(REQUEST, 0.01)
    channel.answers += [Synchronized(REQUEST), Synchronized(own(51))]
    inbox.wait(own(51))
    with pytest.raises(TimeoutError):
        inbox.wait(REQUEST, 0.01)


def test_one_thread_receives_for_all():
    class Slow(Channel):
        receivers = most = 0

        def receive(self):
            self.receivers += 1
            self.most = max(self.most, self.receivers)
            time.sleep(0.002)
            self.receivers -= 1
            return super().receive()

    requests = [own(number) for number in range(30)]
    channel = Slow(*[Synchronized(request) for request in reversed(requests)])
    inbox = Inbox(channel, Sites(lambda *_: None))
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(inbox.wait, requests, timeout=60))
    assert [received.answer for received in answers] == [Synchronized(request) for request in requests]
    assert channel.most == 1
