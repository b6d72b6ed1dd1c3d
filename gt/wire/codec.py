"""Typed messages to frames and back. Nothing is decoded into anything but the records of core.messages.

A message on the wire is: a frame of a header (magic, protocol) and a body (msgpack, a list of tagged records), and for
each record with a segment the raw bytes of its tensor, in frames of at most CHUNK bytes, unless they are in shared
memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from gt.core.errors import ProtocolError
from gt.core.messages import MAX_BATCH, PROTOCOL, CreateTensor, Fetched, Segment, WorkerCreateTensor

Frame: TypeAlias = bytes | bytearray | memoryview
Payload: TypeAlias = list[Frame]
Message = TypeVar("Message")

MAGIC = b"GT"
CHUNK = 1 << 24
MAX_BODY = 1 << 26
_HEADER = struct.Struct("<2sH")
MAX_FRAME = max(CHUNK, _HEADER.size + MAX_BODY)
_encoder = msgspec.msgpack.Encoder()
HEADER = _HEADER.pack(MAGIC, PROTOCOL)


def encode(messages: Sequence[Any], payloads: Iterable[Sequence[Frame]] = ()) -> list[Frame]:
    """`payloads` are the bytes of the messages with a segment, in order; empty where they are in shared memory."""
    frames: list[Frame] = [HEADER + _encoder.encode(messages)]
    for payload in payloads:
        for part in payload:
            view = memoryview(part)
            frames.extend(view[start : start + CHUNK] for start in range(0, view.nbytes, CHUNK))
    return frames


def encode_once(message: Any) -> msgspec.Raw:
    """A message that goes to several peers, as part of what `encode` takes."""
    return msgspec.Raw(_encoder.encode(message))


def segment_of(message: Any) -> Segment | None:
    return message.segment if isinstance(message, CreateTensor | WorkerCreateTensor | Fetched) else None


class Decoder(Generic[Message]):
    """Decodes one direction of the corridor: only records of `union` are accepted."""

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(list[union])

    def decode(self, frames: Sequence[Frame]) -> list[tuple[Message, Payload]]:
        """Each message with its payload frames. Raises ProtocolError for anything that is not as it should be."""
        body = body_of(frames)
        if len(body) > MAX_BODY:
            raise ProtocolError(f"a message body of {len(body)} bytes is over the limit of {MAX_BODY}")
        try:
            messages = self._decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"a message that cannot be decoded: {error}") from None
        if not messages:
            raise ProtocolError("a message without content")
        if len(messages) > MAX_BATCH:
            raise ProtocolError(f"a batch of {len(messages)} messages is over the limit of {MAX_BATCH}")
        return self._with_payloads(messages, frames)

    def _with_payloads(self, messages: list[Message], frames: Sequence[Frame]) -> list[tuple[Message, Payload]]:
        place = 1
        found: list[tuple[Message, Payload]] = []
        for message in messages:
            segment = segment_of(message)
            count = 0 if segment is None or segment.name else -(-segment.nbytes // CHUNK)
            payload = list(frames[place : place + count])
            if segment is not None and not segment.name and sum(map(len, payload)) != segment.nbytes:
                raise ProtocolError(f"{type(message).__name__} announces {segment.nbytes} bytes that did not come")
            place += count
            found.append((message, payload))
        if place != len(frames):
            raise ProtocolError(f"{len(frames) - place} frames belong to no message")
        return found


def body_of(frames: Sequence[Frame]) -> Frame:
    """What follows the header, which has to be as it should be."""
    head = memoryview(frames[0] if frames else b"")
    if len(head) < _HEADER.size or head[:2] != MAGIC:
        raise ProtocolError("a peer does not speak GT's protocol; is this the right port?")
    _, protocol = _HEADER.unpack_from(head)
    if protocol != PROTOCOL:
        raise ProtocolError(f"this side speaks protocol {PROTOCOL}, the other side {protocol}")
    return head[_HEADER.size :]


def join(payload: Sequence[Frame]) -> Frame:
    """The bytes of a payload in one piece."""
    if len(payload) == 1:
        return payload[0]
    return bytearray().join(payload)
