"""Ctrl-C ends what the program is at, and not the session: what was computed stays, and work goes on."""

import os
import signal
import threading

import pytest

from gt.client.interrupts import Uninterrupted
from tests.programs import finish, start


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt), Uninterrupted():
        interrupt()
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_does_not_wait():
    done = []
    with pytest.raises(KeyboardInterrupt), Uninterrupted():
        interrupt()
        done.append("a part")
        interrupt()
        done.append("the rest")
    assert done == ["a part"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_blocks_nest():
    done = []
    with pytest.raises(KeyboardInterrupt), Uninterrupted():
        with Uninterrupted():
            interrupt()
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


def test_what_the_program_does_on_an_interrupt_is_done_once():
    calls = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append((number, frame is not None)))
    try:
        with Uninterrupted():
            interrupt()
            assert calls == []
        assert calls == [(signal.SIGINT, True)]
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_is_left_alone():
    def work():
        with Uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    seen = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


INTERRUPTED = """
import os, random, signal, threading, time, torch, gt
gt.init(**{mode})
x, ones = gt.zeros(200, 200), gt.ones(200, 200)
rounds = 0
def strike():
    time.sleep(random.uniform(0.01, 0.2))
    os.kill(os.getpid(), signal.SIGINT)
    while not caught.wait(3):  # Python drops an interrupt that comes in a finalizer
        os.kill(os.getpid(), signal.SIGINT)
for _ in range({times}):
    caught = threading.Event()
    threading.Thread(target=strike).start()
    try:
        while True:
            x.add_((ones @ ones) / 200)
            torch._foreach_mul_([x, ones], 1.0)
            rounds += 1
            if rounds % 7 == 0:
                x.sum().item()
    except KeyboardInterrupt:
        caught.set()
    added = x[0, 0].item()
    assert x.eq(added).all() and rounds <= added <= rounds + 1, (added, rounds)
    rounds = added
print("went on", (gt.ones(3) * 2).tolist())
"""


@pytest.mark.parametrize(("mode", "times"), [({}, 8), ({"workers": 2}, 8)], ids=["embedded", "processes"])
def test_a_program_goes_on_after_interrupts(mode, times):
    code, out, err = finish(start("-c", INTERRUPTED.format(mode=mode, times=times)), 100)
    assert (code, out) == (0, "went on [2.0, 2.0, 2.0]\n"), err
