"""ZeroMQ sockets as all roles use them."""

from __future__ import annotations

import zmq

from gt.wire.codec import MAX_FRAME


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, milliseconds: int) -> zmq.Socket[bytes]:
    """`milliseconds` is how long `receive` waits. No high-water marks: a router drops what is over the mark, and
    clients pace themselves instead."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RCVTIMEO, milliseconds)
    return socket


def receive(socket: zmq.Socket[bytes], *, waits: bool = True) -> list[bytes] | None:
    """A message, or None if none comes in time. By a receive timeout: a poll makes a poller for every call."""
    try:
        return socket.recv_multipart(0 if waits else zmq.NOBLOCK)
    except zmq.Again:
        return None
