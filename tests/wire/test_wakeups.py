"""A thread that waits for messages wakes when one arrives, also if another thread has used the socket since."""

import threading
import time

import pytest
import zmq

from gt.wire import sockets
from gt.wire.sockets import MessageWait, has_message, open_socket, receive, send


@pytest.fixture
def ends(monkeypatch):
    """Two connected sockets. Waits are long, so that a test ends in time only if the wait is woken."""
    monkeypatch.setattr(sockets, "LONGEST_WAIT_MS", 60_000)
    context = zmq.Context()
    left, right = (open_socket(context, zmq.PAIR, 1000) for _ in range(2))
    left.bind("inproc://wakeups")
    right.connect("inproc://wakeups")
    yield left, right
    left.close(0)
    right.close(0)
    context.term()


class Reader:
    """Uses one socket from several threads, as a client's channel does."""

    def __init__(self, socket):
        self.socket = socket
        self.lock = threading.Lock()
        self.waiting = MessageWait(self.lock)
        self.waits = 0

    def read(self):
        while True:
            with self.lock:
                if has_message(self.socket):
                    return receive(self.socket)
                self.waiting.begin()
            self.waits += 1
            self.waiting.wait(int(self.socket.getsockopt(zmq.FD)))

    def send(self, frames):
        with self.lock:
            send(self.socket, frames)
            self.waiting.wake()


def in_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    return thread, found


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_message_wakes_the_thread_that_waits(ends):
    left, right = ends
    reader = Reader(left)
    thread, found = in_thread(reader.read)
    wait_until(lambda: reader.waits == 1)
    send(right, [b"hello"])
    thread.join(20)
    assert found == [[b"hello"]]
    reader.waiting.close()


def test_messages_are_found_while_another_thread_sends(ends):
    """Each send may consume the event by which the reader would have noticed a message."""
    left, right = ends
    reader, count = Reader(left), 300
    thread, found = in_thread(lambda: [reader.read() for _ in range(count)])
    for number in range(count):
        send(right, [str(number).encode()])
        reader.send([b"from another thread"])
    thread.join(30)
    assert not thread.is_alive()
    assert found == [[[str(number).encode()] for number in range(count)]]
    reader.waiting.close()


def test_a_use_of_the_socket_wakes_the_thread_that_waits(ends):
    reader = Reader(ends[0])
    thread, found = in_thread(reader.read)
    wait_until(lambda: reader.waits == 1)
    reader.send([b"anything"])
    wait_until(lambda: reader.waits == 2)
    send(ends[1], [b"end"])
    thread.join(20)
    assert found == [[b"end"]]
    reader.waiting.close()


def test_closing_wakes_the_thread_that_waits(ends):
    reader = Reader(ends[0])
    descriptor = int(reader.socket.getsockopt(zmq.FD))
    reader.waiting.begin()
    thread, _ = in_thread(lambda: reader.waiting.wait(descriptor))
    time.sleep(0.05)
    with reader.lock:
        reader.waiting.close()
        reader.waiting.close()
    thread.join(20)
    assert not thread.is_alive()
