"""ZeroMQ sockets with GT's options, and fast functions to send and to receive."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Container, Sequence
from typing import NamedTuple, TypeAlias

import zmq

from gt.wire.codec import MAX_FRAME, Frame

LONGEST_WAIT_MS = 50  # defers Ctrl-C, and periodic checks


class MessageWait:
    """Lets one thread wait for messages of a socket, which others may use meanwhile. All methods but `wait` are called
    with the lock of the socket held, which is `lock`.

    The socket's descriptor becomes readable once when something happens, and every use of the socket consumes that. So
    the waiting thread looks for messages before it waits, and a thread that has used the socket wakes it."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self._poller = select.poll()
        self._poller.register(self._reading, select.POLLIN)
        self._descriptor = -1
        self._is_waiting = False
        self._closed = False

    def begin(self) -> None:
        """The next call of this thread is `wait`, after the lock was released. There is no message now."""
        self._is_waiting = True

    def wait(self, descriptor: int) -> None:
        """Wait for something to happen at a socket with this `zmq.FD`, or for `wake`."""
        if descriptor != self._descriptor:  # a new connection, after one was lost
            if self._descriptor >= 0:
                self._poller.unregister(self._descriptor)
            self._poller.register(descriptor, select.POLLIN)
            self._descriptor = descriptor
        try:
            self._poller.poll(LONGEST_WAIT_MS)
        finally:
            with self._lock:
                self._is_waiting = False
                with contextlib.suppress(BlockingIOError):
                    os.read(self._reading, 64)
                if self._closed:
                    self._close()

    def wake(self) -> None:
        """The socket was used. Hot path: does nothing where no thread waits."""
        if self._is_waiting:
            with contextlib.suppress(BlockingIOError):  # it is full: the thread wakes anyway
                os.write(self._writing, b"\0")

    def close(self) -> None:
        """A thread that waits closes the descriptors when it wakes."""
        if self._closed:
            return
        self._closed = True
        if self._is_waiting:
            self.wake()
        else:
            self._close()

    def _close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


SentFrame: TypeAlias = Frame | zmq.Frame
"""A frame that is sent, or was. ZeroMQ sends a `zmq.Frame` without a copy of its bytes."""

_HANDSHAKE_MS = 10_000
_MAX_MS = 1 << 24  # a multiple of this is a C integer
_WEAK_LINK = 20  # times the limit of silence, in which a frame and those before it have to arrive
_OVERHEAD = 1 << 10  # bytes that encryption adds to a frame
_MORE, _NOW, _HAS_MORE = int(zmq.SNDMORE), int(zmq.NOBLOCK), int(zmq.RCVMORE)
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)


def open_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, milliseconds: int, silence: float = 0, *, is_tcp: bool = False
) -> zmq.Socket[bytes]:
    """A socket whose `receive` waits for `milliseconds`.

    A lost connection is never reopened, because messages are lost with it. A connection whose other end does not answer
    ZeroMQ's heartbeats for `silence` seconds is closed (0: never). A thread of ZeroMQ's sends and answers heartbeats,
    however busy the program is. With `is_tcp` the caller does so, by the time since the last bytes came: to ZeroMQ a
    peer is silent for as long as a frame of it is on its way, which over a weak link is long.

    Queues have no limit: a full queue of received messages would stop the heartbeats of a busy peer. Clients limit
    themselves instead, and servers set their own limits.
    """
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
        interval = min(max(1, int(silence * 1000 / 4)), _MAX_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, interval)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, (_WEAK_LINK if is_tcp else 1) * 3 * interval)
    return socket


def send(socket: zmq.Socket[bytes], frames: Sequence[SentFrame]) -> None:
    """Send one message. Hot path: `send_multipart` adds flags as enums, which takes longer than sending."""
    for frame in frames[:-1]:
        socket.send(frame, _MORE, type(frame) is not zmq.Frame)
    last = frames[-1]
    socket.send(last, 0, type(last) is not zmq.Frame)


def keepable(frames: Sequence[Frame]) -> list[SentFrame]:
    """The frames of a message that can be sent now and again later, whatever becomes of the memory of their bytes. One
    that could change is copied here, and not by ZeroMQ when it is sent."""
    return [frame if type(frame) is bytes else zmq.Frame(frame, copy=not _is_constant(frame)) for frame in frames]


def _is_constant(frame: Frame) -> bool:
    """Whether the bytes of a frame cannot change, as those of a part of `bytes`."""
    return type(frame) is memoryview and type(frame.obj) is bytes


def uncopied(frames: Sequence[Frame]) -> list[SentFrame]:
    """The frames of a message that ZeroMQ sends without memory of its own. Their bytes must not change any more."""
    return [frame if type(frame) is bytes else zmq.Frame(frame, copy=False) for frame in frames]


def prepare_uncopied() -> None:
    """Start pyzmq's thread that frees what was sent without a copy. It would begin with the first such frame: where
    memory is lacking, its start may be awaited without end."""
    zmq.Frame(memoryview(bytes(1)), copy=False)


def has_message(socket: zmq.Socket[bytes]) -> bool:
    return bool(socket.getsockopt(_EVENTS) & _READABLE)  # type: ignore[operator]


def receive(socket: zmq.Socket[bytes], *, waits: bool = True) -> list[bytes] | None:
    """A message, or None if none arrives in time. Hot path: with a receive timeout, since `poll` makes a poller for
    every call."""
    if not waits and not has_message(socket):  # an exception takes longer
        return None
    try:
        frames = [socket.recv(0 if waits else _NOW)]
    except zmq.Again:
        return None
    return _rest(socket, frames)


class Sender(NamedTuple):
    """The connection that a message came over: its descriptor, and the name of the key of its peer ("" without)."""

    descriptor: int
    key: str


def receive_from(
    socket: zmq.Socket[bytes], known: Container[bytes], *, waits: bool = True
) -> tuple[list[bytes], Sender | None] | None:
    """A message of a router, which begins with the name of a peer; and its sender, or None if the name is one of
    `known`. Only the name is left of a message for which there is no memory."""
    if not waits and not has_message(socket):
        return None
    try:
        frames = [socket.recv(0 if waits else _NOW)]
    except zmq.Again:
        return None
    name, sender = frames[0], None
    try:
        if name not in known:
            frame = socket.recv(copy=False)  # only a frame that is not copied knows its connection
            sender = Sender(int(frame.get(zmq.SRCFD)), _key_of(frame))  # type: ignore[call-overload]
            frames.append(frame.bytes)
        return _rest(socket, frames), sender
    except MemoryError:
        return [name], sender


def _key_of(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("User-Id"))  # set by the authenticator
    except zmq.ZMQError:
        return ""


def _rest(socket: zmq.Socket[bytes], frames: list[bytes]) -> list[bytes]:
    try:
        while socket.getsockopt(_HAS_MORE):
            frames.append(socket.recv())
    except MemoryError:
        while socket.getsockopt(_HAS_MORE):  # otherwise they would be taken for the next message
            socket.recv(copy=False)
        raise
    return frames
