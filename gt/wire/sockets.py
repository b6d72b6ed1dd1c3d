"""ZeroMQ sockets as all roles use them."""

from __future__ import annotations

import select
from collections.abc import Sequence

import zmq

from gt.wire.codec import MAX_FRAME, Frame

_MOMENT_MS = 2
_MORE, _NOW, _HAS_MORE = int(zmq.SNDMORE), int(zmq.NOBLOCK), int(zmq.RCVMORE)


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


def send(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
    """One message. `send_multipart` adds flags as enums, which costs more than sending."""
    for frame in frames[:-1]:
        socket.send(frame, _MORE)
    socket.send(frames[-1])


def wait(descriptor: int) -> None:
    """Until something may have arrived at the socket with this `zmq.FD`, from which all was received that was there.
    Only for a moment, since a thread that sends may take the news from us. Does not touch the socket, which threads
    would have to take turns for."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    poller.poll(_MOMENT_MS)


def receive(socket: zmq.Socket[bytes], *, waits: bool = True) -> list[bytes] | None:
    """A message, or None if none comes in time. By a receive timeout: a poll makes a poller for every call."""
    try:
        frames = [socket.recv(0 if waits else _NOW)]
    except zmq.Again:
        return None
    while socket.getsockopt(_HAS_MORE):
        frames.append(socket.recv())
    return frames
