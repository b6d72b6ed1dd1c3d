"""The words of members: who waits for one is woken, and learns of a member that will not come."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gt.wire.process_identity import start_mark, this_host
from gt.worker.exchange import futex
from gt.worker.exchange.arena import Arena, MemoryFile
from gt.worker.exchange.member_status import SLOTS, STATUS_BYTES, GroupPeer, MemberGone, MemberStatus, PeerMemory
from gt.worker.exchange.rendezvous import Member

ME = Member(this_host(), os.getpid(), start_mark(os.getpid()), "")


class Pair:
    """A member's status, and the same as another one sees it."""

    def __init__(self, spins):
        self.lost = threading.Event()
        self.waiting = threading.Event()
        self.memory = MemoryFile(STATUS_BYTES)
        self.status = MemberStatus(self.memory.data)
        self.arena = Arena()
        self.peer = GroupPeer(1, PeerMemory(ME), (self.memory.descriptor, self.memory.number), self.look, spins=spins)

    def look(self):
        self.waiting.set()
        return self.lost.is_set()

    def publish(self, number, text):
        block = self.arena.allocate(len(text))
        block.data[:] = text
        self.arena.hold(block, lambda: False, lambda: None)
        self.status.publish(number, block)


@pytest.fixture(params=[True, False], ids=["spins", "sleeps"])
def pair(request):
    made = Pair(request.param)
    yield made
    made.arena.close()
    made.memory.close()


def seconds_until_raised(pair, wait, act):
    """How long a wait goes on after an act, until it raises MemberGone."""
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait)
        assert pair.waiting.wait(10)
        start = time.monotonic()
        act()
        with pytest.raises(MemberGone):
            waiting.result(10)
    return time.monotonic() - start


def test_what_is_published_is_seen(pair):
    pair.publish(1, b"one")
    pair.publish(2, b"two")
    assert [bytes(pair.peer.block(number)) for number in (1, 2)] == [b"one", b"two"]


def test_a_waiter_is_woken(pair):
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: bytes(pair.peer.block(1)))
        assert pair.waiting.wait(10)
        pair.publish(1, b"late")
        assert waiting.result(10) == b"late"


def test_a_waiter_for_a_later_exchange_goes_on_waiting(pair):
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: bytes(pair.peer.block(3)))
        for number in (1, 2, 3):
            assert not waiting.done()
            pair.publish(number, str(number).encode())
        assert waiting.result(10) == b"3"


def test_a_lost_peer_ends_a_wait_within_a_second(pair):
    assert seconds_until_raised(pair, lambda: pair.peer.block(1), pair.lost.set) < 1


def test_a_member_that_gives_up_ends_the_waits_of_others(pair):
    assert seconds_until_raised(pair, lambda: pair.peer.block(1), pair.status.give_up) < 1


def test_what_was_published_before_giving_up_can_be_taken(pair):
    pair.publish(1, b"last")
    pair.status.give_up()
    assert bytes(pair.peer.block(1)) == b"last"
    with pytest.raises(MemberGone):
        pair.peer.block(2)


@pytest.mark.parametrize("end", ["lost", "given up"])
def test_a_member_that_is_gone_reads_nothing_any_more(pair, end):
    assert not pair.peer.has_finished(1)
    if end == "lost":
        pair.lost.set()
    else:
        pair.status.give_up()
    pair.peer.wait_for_finish(1)
    assert pair.peer.has_finished(1)


def test_an_end_of_the_wait_itself_is_no_loss_of_the_peer(pair):
    """As where this worker is told to end."""

    def end():
        raise ConnectionError("told to end")

    pair.peer._is_lost = end
    with pytest.raises(ConnectionError):
        pair.peer.wait_for_finish(1)
    assert not pair.peer.has_finished(1)


def test_finished_exchanges_are_seen(pair):
    pair.status.finish(5, wakes=True)
    assert pair.peer.has_finished(5) and not pair.peer.has_finished(6)


def test_slots_are_used_again(pair):
    for number in range(1, 3 * SLOTS):
        pair.publish(number, str(number).encode())
        assert bytes(pair.peer.block(number)) == str(number).encode()
    earliest = 3 * SLOTS - SLOTS
    assert bytes(pair.peer.block(earliest)) == str(earliest).encode()


def test_a_member_without_memory_gives_nothing(pair):
    pair.status.publish(1, None, has_failed=True)
    assert pair.peer.block(1) is None


def test_a_wait_for_a_word_that_has_changed_does_not_sleep():
    memory = MemoryFile(STATUS_BYTES)
    status = MemberStatus(memory.data)
    start = time.monotonic()
    futex.wait(status._address, 1, 30)
    assert time.monotonic() - start < 10
    memory.close()
