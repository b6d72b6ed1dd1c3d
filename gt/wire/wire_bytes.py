"""Counts the bytes of a router's messages as they are on the wire, to compare them with those that TCP has carried."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gt.wire.sockets import SentFrame
from gt.wire.tcp_watch import ConnectionBytes

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
