"""Connections by their descriptors: of ZeroMQ's, which may have ended."""

import os
import socket

import pytest

from gt.wire.file_descriptors import peer_address, peer_process, seconds_of_silence, shut_down
from gt.wire.tcp_watch import TcpWatch


@pytest.fixture
def ended():
    """A descriptor that nothing has any more."""
    connection = socket.socket()
    connection.close()
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    return writer


@pytest.mark.parametrize("which", ["none", "ended", "a pipe"])
def test_what_is_no_connection_is_known_for_nothing(ended, which):
    reader, writer = os.pipe()
    descriptor = {"none": -1, "ended": ended if ended not in (reader, writer) else -1, "a pipe": reader}[which]
    found = peer_address(descriptor), peer_process(descriptor), seconds_of_silence(descriptor)
    shut_down(descriptor)
    watch = TcpWatch()
    watch.add(descriptor)
    assert watch.carried(descriptor) is None
    watch.close()
    os.close(reader)
    os.close(writer)
    assert found == ("", 0, None)


def test_the_process_of_a_connection_within_the_machine_is_known():
    one, other = socket.socketpair()
    with one, other:
        assert peer_process(one.fileno()) == os.getpid()
        assert peer_address(one.fileno()) == "" and seconds_of_silence(one.fileno()) is None


def test_the_silence_of_a_tcp_connection_is_known_and_not_its_process():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"
            assert 0 <= seconds_of_silence(accepted.fileno()) < 60
            assert (peer_address(accepted.fileno()), peer_process(accepted.fileno())) == ("127.0.0.1", 0)
