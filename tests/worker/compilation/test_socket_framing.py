"""Frames over a socket that does not block: whole, in order, and none over the limit."""

import socket
from collections.abc import Iterator

import pytest

from gt.core.errors import ConnectionLost
from gt.worker.compilation.socket_framing import FrameReader, FrameWriter, frame

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield ours, theirs


def test_frames_arrive_whole_and_in_order(pair: Pair) -> None:
    writer, reader = FrameWriter(pair[0]), FrameReader(pair[1])
    for data in (b"first", b"x" * 100_000, b"last"):
        writer.write(data)
    assert list(reader.read()) == [b"first", b"x" * 100_000, b"last"]
    assert list(reader.read()) == []


def test_a_part_of_a_frame_waits_for_the_rest(pair: Pair) -> None:
    data, reader = frame(b"whole"), FrameReader(pair[1])
    for byte in data[:-1]:
        pair[0].send(bytes([byte]))
        assert list(reader.read()) == []
    pair[0].send(data[-1:])
    assert list(reader.read()) == [b"whole"]


def test_bytes_that_the_socket_does_not_take_are_sent_by_the_next_calls(pair: Pair) -> None:
    writer, reader = FrameWriter(pair[0]), FrameReader(pair[1])
    data = bytes(10_000_000)
    writer.write(data)
    assert list(reader.read()) == []
    found: list[bytes] = []
    while not found:
        writer.write()
        found = list(reader.read())
    assert found == [data]


def test_frames_before_the_end_of_the_peer_are_read_before_its_loss_is_told(pair: Pair) -> None:
    FrameWriter(pair[0]).write(b"last words")
    pair[0].close()
    frames = FrameReader(pair[1]).read()
    assert next(frames) == b"last words"
    with pytest.raises(ConnectionLost, match="closed its end"):
        next(frames)


def test_a_frame_over_the_limit_is_refused_before_it_is_received(pair: Pair) -> None:
    pair[0].send(b"\xff\xff\xff\xff")
    with pytest.raises(ConnectionLost, match="over the limit"):
        list(FrameReader(pair[1]).read())


def test_writing_to_a_peer_that_has_gone_tells_its_loss(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(ConnectionLost, match="the socket failed"):
        FrameWriter(pair[0]).write(b"data")
