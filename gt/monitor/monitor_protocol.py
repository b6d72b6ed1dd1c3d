"""What a monitoring tool and a program say to each other over the program's monitor socket.

A tool sends one request and gets answers until the last one. A frame is the length of a msgpack record, and the record.
Both ends check that the process at the other end belongs to the same user.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from gt.core.errors import ProtocolError
from gt.core.program_view import ProgramStatus
from gt.monitor.activity import Record

MAX_REQUEST = 1 << 12  # bytes
MAX_ANSWER = 1 << 28
RECORDS_AT_ONCE = 1 << 12  # records in one TraceAnswer
_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")


class TraceRequest(msgspec.Struct, frozen=True, tag=True):
    """Capture for `seconds`, at most `limit` messages and as many commands of each worker."""

    seconds: float
    limit: int


class TraceAnswer(msgspec.Struct, frozen=True, tag=True):
    """Some records of a capture. The last answer tells how many records there was no room for, and the workers whose
    commands are missing."""

    records: list[Record]
    is_last: bool = False
    dropped: int = 0
    missing: tuple[int, ...] = ()


class StatusRequest(msgspec.Struct, frozen=True, tag=True):
    """Tell the status now, and every `interval` seconds (0: once)."""

    interval: float = 0.0


class StatusAnswer(msgspec.Struct, frozen=True, tag=True):
    status: ProgramStatus
    is_last: bool = False


class Refusal(msgspec.Struct, frozen=True, tag=True):
    reason: str
    is_last: bool = True


Request: TypeAlias = TraceRequest | StatusRequest
MonitorAnswer: TypeAlias = TraceAnswer | StatusAnswer | Refusal

_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(MonitorAnswer)
_encoder = msgspec.msgpack.Encoder()


def send_record(connection: socket.socket, record: Request | MonitorAnswer) -> None:
    data = _encoder.encode(record)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_request(connection: socket.socket) -> Request:
    try:
        return _requests.decode(_receive(connection, MAX_REQUEST))
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a request to a monitor socket cannot be read: {error}") from None


def receive_answers(connection: socket.socket) -> Iterator[MonitorAnswer]:
    """The answers to a request, until the last one."""
    while True:
        try:
            answer = _answers.decode(_receive(connection, MAX_ANSWER))
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"an answer of a program cannot be read: {error}; is it of another version?") from None
        yield answer
        if answer.is_last:
            return


def _receive(connection: socket.socket, limit: int) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > limit:
        raise ProtocolError(f"a record of {length} bytes is over the limit of {limit}")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(count - len(data), 1 << 20))
        if not part:
            raise ConnectionError("the program has ended the connection")
        data += part
    return bytes(data)


def require_same_user(connection: socket.socket) -> None:
    """Raises PermissionError if the process at the other end belongs to another user."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    if user != os.getuid():
        raise PermissionError(f"the process at the other end belongs to user {user}")
