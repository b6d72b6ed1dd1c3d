"""Typed messages to frames and back. Nothing is decoded into anything but the records of core.messages.

A message on the wire is a frame of a header (magic, protocol, size of the body) and a body (msgpack, a list of tagged
records). The raw bytes of the tensors of records with a segment, unless they are in shared memory, follow the body in
the same frame where they are few, since every frame costs time; otherwise in frames of at most CHUNK bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from gt.core.errors import ProtocolError
from gt.core.messages import MAX_BATCH, PROTOCOL, CreateTensor, Fetched, WorkerCreateTensor

Frame: TypeAlias = bytes | bytearray | memoryview
Payload: TypeAlias = list[Frame]
Message = TypeVar("Message")

MAGIC = b"GT"
CHUNK = 1 << 24
FEW = 1 << 16  # bytes of all tensors of a message together
MAX_BODY = 1 << 26
_VERSION = struct.Struct("<2sH")  # how every header begins, whatever its version
_HEADER = struct.Struct("<2sHI")
MAX_FRAME = max(CHUNK, _HEADER.size + MAX_BODY + FEW)
_encoder = msgspec.msgpack.Encoder()


def encode(messages: Sequence[Any], payloads: Iterable[Sequence[Frame]] = ()) -> list[Frame]:
    """`payloads` are the bytes of the messages with a segment, in order; empty where they are in shared memory."""
    body = _encoder.encode(messages)
    parts = [memoryview(part) for payload in payloads for part in payload]
    if sum([part.nbytes for part in parts]) <= FEW:
        return [b"".join((header_of(body), body, *parts))]
    frames: list[Frame] = [header_of(body) + body]
    for part in parts:
        frames.extend(part[start : start + CHUNK] for start in range(0, part.nbytes, CHUNK))
    return frames


def header_of(body: bytes) -> bytes:
    return _HEADER.pack(MAGIC, PROTOCOL, len(body))


def encode_once(message: Any) -> msgspec.Raw:
    """A message that goes to several peers, as part of what `encode` takes."""
    return msgspec.Raw(_encoder.encode(message))


_CARRIERS = frozenset((CreateTensor, WorkerCreateTensor, Fetched))


class Decoder(Generic[Message]):
    """Decodes one direction of the corridor: only records of `union` are accepted."""

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(list[union])

    def decode(self, frames: Sequence[Frame]) -> tuple[list[Message], list[Payload]]:
        """The messages, and the payloads of those with a segment, as `encode` takes them. Raises ProtocolError for
        anything that is not as it should be."""
        body, few = split(frames)
        try:
            messages = self._decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"a message that cannot be decoded: {error}") from None
        if not messages:
            raise ProtocolError("a message without content")
        if len(messages) > MAX_BATCH:
            raise ProtocolError(f"a batch of {len(messages)} messages is over the limit of {MAX_BATCH}")
        segments = [message.segment for message in messages if type(message) in _CARRIERS]
        return messages, _payloads([0 if segment.name else segment.nbytes for segment in segments], few, frames)


def _payloads(sizes: Sequence[int], few: memoryview, frames: Sequence[Frame]) -> list[Payload]:
    """The bytes of each tensor: from those that follow the body if they are few, otherwise frames of their own."""
    total, place, count = sum(sizes), 0, 1
    if len(few) != (total if total <= FEW else 0):
        raise ProtocolError(f"a message announces {total} bytes of tensors, and {len(few)} follow its body")
    payloads: list[Payload] = []
    for size in sizes:
        if total <= FEW:
            payload: Payload = [few[place : place + size]] if size else []
            place += size
        else:
            payload = list(frames[count : count + -(-size // CHUNK)])
            count += len(payload)
        if sum(map(len, payload)) != size:
            raise ProtocolError(f"a tensor of {size} bytes was announced that did not come")
        payloads.append(payload)
    if count != len(frames):
        raise ProtocolError(f"{len(frames) - count} frames belong to no message")
    return payloads


def split(frames: Sequence[Frame]) -> tuple[memoryview, memoryview]:
    """Body, and what follows it, of the first frame, whose header has to be as it should be."""
    head = memoryview(frames[0] if frames else b"")
    if len(head) < _VERSION.size or head[:2] != MAGIC:
        raise ProtocolError("a peer does not speak GT's protocol; is this the right port?")
    _, protocol = _VERSION.unpack_from(head)
    if protocol != PROTOCOL:
        raise ProtocolError(f"this side speaks protocol {PROTOCOL}, the other side {protocol}")
    if len(head) < _HEADER.size:
        raise ProtocolError(f"the header of a message is truncated to {len(head)} bytes")
    _, _, size = _HEADER.unpack_from(head)
    if size > MAX_BODY:
        raise ProtocolError(f"a message body of {size} bytes is over the limit of {MAX_BODY}")
    end = _HEADER.size + size
    if end > len(head):
        raise ProtocolError(f"a message body of {size} bytes is truncated to {len(head) - _HEADER.size}")
    return head[_HEADER.size : end], head[end:]


def join(payload: Sequence[Frame]) -> Frame:
    """The bytes of a payload in one piece."""
    if len(payload) == 1:
        return payload[0]
    return bytearray().join(payload)
