"""Records over the socket between workers and their compile server: a length, then msgpack."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

from gt.core.errors import ConnectionLost

_LENGTH = struct.Struct("!I")
_MAX_BYTES = 1 << 26
_CHUNK = 1 << 16


def frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


class FrameReader:
    """Receives frames from a socket that does not block."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._data = bytearray()

    def read(self) -> Iterator[bytes]:
        """The frames that have arrived completely. Raises ConnectionLost when the peer has closed its end."""
        is_closed = False
        try:
            while data := self._link.recv(_CHUNK):
                self._data += data
            is_closed = True
        except BlockingIOError:
            pass
        except OSError as error:
            raise ConnectionLost(f"the socket failed: {error}") from error
        yield from self._complete()
        if is_closed:
            raise ConnectionLost("the peer has closed its end")

    def _complete(self) -> Iterator[bytes]:
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > _MAX_BYTES:
                raise ConnectionLost(f"a frame of {length} bytes is over the limit of {_MAX_BYTES}")
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            data = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            yield data


class FrameWriter:
    """Sends frames over a socket that does not block. Bytes that the socket does not take wait for the next call."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._data = bytearray()

    def write(self, data: bytes = b"") -> None:
        """Send the waiting bytes, and then a frame if one is given. Raises ConnectionLost."""
        if data:
            self._data += frame(data)
        try:
            while self._data:
                del self._data[: self._link.send(self._data)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ConnectionLost(f"the socket failed: {error}") from error
