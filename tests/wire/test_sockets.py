"""Messages arrive with all their frames, and waiting for one has a limit."""

import pytest
import zmq

from gt.wire.sockets import open_socket, receive, send


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
