"""ZeroMQ sockets as all roles use them."""

from __future__ import annotations

import select
from collections.abc import Container, Sequence

import zmq

from gt.wire.codec import MAX_FRAME, Frame

_MOMENT_MS = 2
_HANDSHAKE_MS = 10_000
_LONGEST_MS = 1 << 29  # three times this is a C integer
_OVERHEAD = 1 << 10  # of a frame that is encrypted
_MORE, _NOW, _HAS_MORE = int(zmq.SNDMORE), int(zmq.NOBLOCK), int(zmq.RCVMORE)


def open_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, milliseconds: int, silence: float = 0
) -> zmq.Socket[bytes]:
    """`milliseconds` is how long `receive` waits. A connection is made once and never again: what was under way when it
    broke is lost, so the ends must not go on as if nothing had happened. One whose other end does not answer ZeroMQ's
    heartbeats for `silence` seconds is closed (0: never); they are sent and answered by a thread of ZeroMQ's, however
    busy the program is.

    Queues have no limit here: one for what was received would stop the heartbeats of a peer that has much to do.
    Clients pace themselves instead, and servers have limits of their own."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME + _OVERHEAD)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RCVTIMEO, milliseconds)
    socket.setsockopt(zmq.SNDTIMEO, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    if silence:
        interval = min(max(1, int(silence * 1000 / 4)), _LONGEST_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, interval)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * interval)
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
    return _rest(socket, frames)


def receive_from(
    socket: zmq.Socket[bytes], known: Container[bytes], *, waits: bool = True
) -> tuple[list[bytes], int] | None:
    """The same of a router, whose messages begin with the name of a peer; and if that is not one of `known`, the
    descriptor of its connection, otherwise -1."""
    try:
        frames = [socket.recv(0 if waits else _NOW)]
    except zmq.Again:
        return None
    if frames[0] in known:
        return _rest(socket, frames), -1
    frame = socket.recv(copy=False)  # a frame that is not copied knows where it comes from
    return _rest(socket, [*frames, frame.bytes]), int(frame.get(zmq.SRCFD))  # type: ignore[call-overload]


def _rest(socket: zmq.Socket[bytes], frames: list[bytes]) -> list[bytes]:
    while socket.getsockopt(_HAS_MORE):
        frames.append(socket.recv())
    return frames
