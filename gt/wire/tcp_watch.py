"""What the kernel knows about the TCP connections of a ZeroMQ socket, and ZeroMQ does not tell: which end has ended a
connection, and how many bytes it has carried."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Sequence
from typing import NamedTuple

from gt.wire.file_descriptors import borrowed
from gt.wire.sockets import SentFrame

_RECENT_MS = 500  # a connection that is ended for its silence has got nothing for longer than this
_ESTABLISHED, _CLOSE_WAIT = 1, 8  # states of TCP: open; ended by the other end
_TCP_INFO = struct.Struct("<8B24I4Q")  # the beginning of Linux's struct tcp_info
_LAST_DATA_RECEIVED, _ACKNOWLEDGED, _RECEIVED = 8 + 11, 8 + 24 + 2, 8 + 24 + 3


class ConnectionBytes(NamedTuple):
    """The bytes that a connection has carried so far: to the other end, and from it."""

    acknowledged: int
    received: int


class TcpWatch:
    """Holds a second descriptor for each connection of a ZeroMQ socket, by the first one, until the connection ends.
    Connections that are not TCP's are left out."""

    def __init__(self) -> None:
        self._copies: dict[int, int] = {}
        self._missed: set[int] = set()  # connections that had ended before they were watched

    def add(self, descriptor: int) -> None:
        """A connection begins."""
        self._close(descriptor)  # the end of an earlier one was not seen
        self._missed.discard(descriptor)
        try:
            self._copies[descriptor] = os.dup(descriptor)
        except OSError as error:
            if error.errno == errno.EBADF:
                self._missed.add(descriptor)
            return  # otherwise no more files can be opened
        if _read_info(self._copies[descriptor]) is None:
            self._close(descriptor)

    def end(self, descriptor: int) -> bool:
        """ZeroMQ has closed a connection; returns whether it did so because of bytes that it does not accept, and not
        because the other end closed it, was silent, or this process shut it down. A connection that ended at once did
        so because of its bytes: the end of a peer that has said nothing is the failure of a handshake."""
        if descriptor in self._missed:
            self._missed.remove(descriptor)
            return True
        copy = self._copies.get(descriptor)
        info = _read_info(copy) if copy is not None else None
        unread = _unread(copy) if copy is not None else 0
        self._close(descriptor)
        if info is None:
            return False
        state, silent_for = info[0], info[_LAST_DATA_RECEIVED]
        return (state == _ESTABLISHED and silent_for < _RECENT_MS) or (state == _CLOSE_WAIT and unread > 0)

    def carried(self, descriptor: int) -> ConnectionBytes | None:
        """None for a connection that is not known."""
        copy = self._copies.get(descriptor)
        info = _read_info(copy) if copy is not None else None
        return None if info is None else ConnectionBytes(info[_ACKNOWLEDGED], info[_RECEIVED])

    def close(self) -> None:
        for descriptor in list(self._copies):
            self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        copy = self._copies.pop(descriptor, None)
        if copy is not None:
            os.close(copy)


def _read_info(descriptor: int) -> tuple[int, ...] | None:
    """Linux's tcp_info of a connection; None if it is not of TCP, or on another system."""
    with contextlib.suppress(OSError, AttributeError, struct.error), borrowed(descriptor) as connection:
        return _TCP_INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    return None


def _unread(descriptor: int) -> int:
    """The bytes that have arrived and were not read."""
    with contextlib.suppress(OSError):
        return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), "little")
    return 0


_ENCRYPTION = 33  # bytes that CURVE adds to a frame: a name, a nonce, a code of authentication and flags
_SHORT, _LONG, _LONGEST_SHORT = 2, 9, 255  # bytes of ZeroMQ's header of a frame, by the size of the frame


class WireBytes:
    """By peer, the bytes that were given to ZeroMQ and taken from it."""

    def __init__(self, *, is_encrypted: bool) -> None:
        self._added = _ENCRYPTION if is_encrypted else 0
        self._sent: dict[bytes, int] = {}
        self._received: dict[bytes, int] = {}

    def note_sent(self, name: bytes, frames: Sequence[SentFrame]) -> None:
        self._sent[name] = self._sent.get(name, 0) + self._size(frames)

    def note_received(self, name: bytes, frames: Sequence[SentFrame]) -> None:
        self._received[name] = self._received.get(name, 0) + self._size(frames)

    def waiting(self, name: bytes, carried: ConnectionBytes) -> int:
        """The bytes for a peer and from it that are in queues, or in a message that is not complete."""
        incoming = carried.received - self._received.get(name, 0)
        outgoing = self._sent.get(name, 0) - carried.acknowledged
        return max(incoming, 0) + max(outgoing, 0)

    def forget(self, name: bytes) -> None:
        self._sent.pop(name, None)
        self._received.pop(name, None)

    def _size(self, frames: Sequence[SentFrame]) -> int:
        """Hot path: most messages have one frame."""
        added, limit = self._added, _LONGEST_SHORT - self._added
        return sum([(size := len(frame)) + added + (_SHORT if size <= limit else _LONG) for frame in frames])


def memory_of_machine() -> int:
    """The bytes of its physical memory; of a system that does not tell, 8 GiB."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 8 << 30
