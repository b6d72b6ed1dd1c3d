"""Messages arrive with all their frames, and waiting for one has a limit."""

import pytest
import zmq

from gt.wire.sockets import open_socket, receive, receive_from, send


@pytest.fixture
def ends():
    """The two ends of a connection within the process; the router's end first."""
    with (
        zmq.Context() as context,
        open_socket(context, zmq.ROUTER, 2000) as router,
        open_socket(context, zmq.DEALER, 50) as dealer,
    ):
        router.bind("inproc://ends")
        dealer.connect("inproc://ends")
        yield router, dealer


@pytest.mark.parametrize("frames", [[b"one"], [b""], [b"a", b""], [b"", b"b"], [b"a", memoryview(b"bb"), bytes(70000)]])
def test_a_message_arrives_as_it_was_sent(ends, frames):
    router, dealer = ends
    send(dealer, frames)
    send(dealer, [b"next"])
    name, *arrived = receive(router)
    assert arrived == [bytes(frame) for frame in frames]
    assert receive(router) == [name, b"next"]
    send(router, [name, *frames])
    assert receive(dealer) == arrived


@pytest.mark.parametrize("silence", [1e-6, 0.5, 60, 1e12])
def test_any_limit_of_silence_can_be_set(silence):
    with zmq.Context() as context, open_socket(context, zmq.DEALER, 0, silence) as socket:
        assert 0 < socket.getsockopt(zmq.HEARTBEAT_IVL) < socket.getsockopt(zmq.HEARTBEAT_TIMEOUT)


def test_a_wait_ends_without_a_message(ends):
    _, dealer = ends
    assert receive(dealer) is None
    assert receive(dealer, waits=False) is None


class WithoutMemory:
    """A socket, of whose next messages Python has no memory for the frame with a number."""

    def __init__(self, socket, frame):
        self.socket, self.left = socket, frame

    def __getattr__(self, name):
        return getattr(self.socket, name)

    def recv(self, *flags, **options):
        received = self.socket.recv(*flags, **options)
        self.left -= 1
        if self.left == -1:
            raise MemoryError
        return received


def test_a_message_without_memory_leaves_no_frames_to_the_next_one(ends):
    router, dealer = ends
    send(dealer, [b"hello"])
    name, _ = receive(router)
    send(dealer, [b"one", b"two", b"three"])
    send(dealer, [b"next"])
    assert receive_from(WithoutMemory(router, 2), (name,)) == ([name], None)
    assert receive_from(router, (name,)) == ([name, b"next"], None)
    send(router, [name, b"one", b"two", b"three"])
    send(router, [name, b"next"])
    with pytest.raises(MemoryError):
        receive(WithoutMemory(dealer, 1))
    assert receive(dealer) == [b"next"]
