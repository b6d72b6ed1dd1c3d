"""Encodes records to frames, and decodes frames to the records of core.messages and to nothing else.

A message on the wire is a header (magic, protocol, size of the body, numbers of messages) and a body (msgpack, a list
of tagged records) in one frame; a body of more than PIECE bytes goes on in further frames. The raw bytes of tensors
that are not in shared memory follow. Up to INLINE_BYTES they are part of the last frame of the body, since every frame
costs time; more have separate frames, of at most CHUNK bytes. So no frame is over MAX_FRAME bytes, and a peer that
announces a longer one is disconnected before memory is allocated for it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec

from gt.core.errors import ProtocolError, RefusalKind
from gt.core.message_fields import PAYLOAD_RECORDS, byte_ranges_of
from gt.core.messages import COUNTED_BYTES, MAX_BATCH, PROTOCOL, TensorRead

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bytes of a tensor in one piece."""
Frame: TypeAlias = bytes | bytearray | memoryview
Payload: TypeAlias = list[Frame]
AnyMessage = TypeVar("AnyMessage")

MAGIC = b"GT"
CHUNK = PIECE = 1 << 20
INLINE_BYTES = 1 << 16  # total bytes of the tensors of a message
MAX_BODY = 1 << 26
MAX_INSTRUCTIONS = MAX_BODY >> 4  # the body of a client's message: an instruction becomes commands that are longer
MAX_HELLO = 1 << 13
_VERSION = struct.Struct("<2sH")  # the beginning of every header, in all versions of the protocol
_HEADER = struct.Struct("<2sHIQQ")
MAX_FRAME = max(CHUNK, _HEADER.size + PIECE + INLINE_BYTES)
_UNKNOWN = re.compile(r"^Invalid value .* - at `\$\[[\d.]+\]\[0\]`$")  # msgspec's error for the tag of a record
_encoder = msgspec.msgpack.Encoder()


class MessageNumbers(NamedTuple):
    """The number of a message of a session, and that of the last message which its sender has received. See
    MessageStream. Messages of others have number 0."""

    number: int
    received: int


UNNUMBERED = MessageNumbers(0, 0)


def encode(
    messages: Sequence[Any], payloads: Iterable[Sequence[Frame]] = (), numbers: MessageNumbers = UNNUMBERED
) -> list[Frame]:
    """One message. `payloads` are the bytes of the byte ranges of its records, in order; empty if they are in shared
    memory."""
    return _frames(_encoder.encode(messages), payloads, numbers)


def encode_batches(
    messages: Sequence[Any],
    payloads: Sequence[Sequence[Frame]] = (),
    limit: int = MAX_BODY,
    numbers: MessageNumbers = UNNUMBERED,
) -> list[list[Frame]]:
    """One message, or several if one would have too many records, or a body over the limit. `numbers` are those of the
    first. Raises ProtocolError for a single record over the limit."""
    body = _encoder.encode(messages)
    if len(body) <= limit and len(messages) <= MAX_BATCH:
        return [_frames(body, payloads, numbers)]
    if len(messages) == 1:
        raise ProtocolError(
            f"a {type(messages[0]).__name__} of {len(body)} bytes is over the limit of {limit}; give it fewer or "
            f"shorter arguments"
        )
    middle = len(messages) // 2
    carried = sum([len(byte_ranges_of(message)) for message in messages[:middle] if type(message) in PAYLOAD_RECORDS])
    begun = encode_batches(messages[:middle], payloads[:carried], limit, numbers)
    following = MessageNumbers(numbers.number + len(begun) if numbers.number else 0, numbers.received)
    return [*begun, *encode_batches(messages[middle:], payloads[carried:], limit, following)]


def _frames(body: bytes, payloads: Iterable[Sequence[Frame]], numbers: MessageNumbers = UNNUMBERED) -> list[Frame]:
    """Hot path: most messages have no payloads and a short body."""
    header = header_of(body, numbers)
    if not payloads and len(body) <= PIECE:
        return [header + body]
    parts = [memoryview(part) for payload in payloads for part in payload]
    is_inline = sum([part.nbytes for part in parts]) <= INLINE_BYTES
    if is_inline and len(body) <= PIECE:
        return [b"".join((header, body, *parts))]
    frames: list[Frame] = [header + body[:PIECE]]
    frames.extend(body[start : start + PIECE] for start in range(PIECE, len(body), PIECE))
    if is_inline:
        frames[-1] = b"".join((frames[-1], *parts))
        return frames
    for part in parts:
        frames.extend(part[start : start + CHUNK] for start in range(0, part.nbytes, CHUNK))
    return frames


def counted_bytes(messages: Sequence[Any]) -> int:
    """The size of the large tensors in a message to a client, whose arrival the client confirms one by one."""
    reads = [message for message in messages if type(message) is TensorRead and read_bytes(message) >= COUNTED_BYTES]
    return sum([byte_range.nbytes for read in reads for byte_range in read.byte_ranges if not byte_range.name])


def read_bytes(read: TensorRead) -> int:
    """The size of a tensor that was read, with all addends of a partial one."""
    return sum([byte_range.nbytes for byte_range in read.byte_ranges])


def header_of(body: bytes, numbers: MessageNumbers = UNNUMBERED) -> bytes:
    return _HEADER.pack(MAGIC, PROTOCOL, len(body), *numbers)


def numbers_of(frames: Sequence[Frame]) -> MessageNumbers:
    """The numbers of a message. Raises ProtocolError if it is not one of GT's protocol."""
    return MessageNumbers(*_read_header(frames)[3:])


class EncodedRecords(NamedTuple):
    """Records that were encoded once, to be part of several messages."""

    number: int
    data: bytes


def encode_records(records: Sequence[Any]) -> EncodedRecords:
    body = _encoder.encode(records)
    return EncodedRecords(len(records), body[len(_list_header(len(records))) :])


def join_records(parts: Sequence[EncodedRecords], payloads: Iterable[Sequence[Frame]] = ()) -> list[Frame] | None:
    """The message that `encode` gives for all these records; None if these are too many for one."""
    number = sum([part.number for part in parts])
    body = b"".join([_list_header(number), *[part.data for part in parts]])
    return _frames(body, payloads) if len(body) <= MAX_BODY and number <= MAX_BATCH else None


def _list_header(count: int) -> bytes:
    """How the encoder begins a list: msgpack's fixarray, array 16 or array 32."""
    if count < 16:
        return bytes([0x90 | count])
    return b"\xdc" + count.to_bytes(2, "big") if count < 1 << 16 else b"\xdd" + count.to_bytes(4, "big")


class Decoder(Generic[AnyMessage]):
    """Decodes the messages of one direction: records of `union` only, in bodies of at most `limit` bytes. With
    `are_held`, frames of tensors do not come with their message, and their payloads are empty."""

    def __init__(self, union: Any, limit: int = MAX_BODY, *, are_held: bool = False) -> None:
        self._decoder = msgspec.msgpack.Decoder(list[union])
        self._limit = limit
        self._are_held = are_held

    def decode(self, frames: Sequence[Frame]) -> tuple[list[AnyMessage], list[Payload]]:
        """The records, and the payloads of their byte ranges, as `encode` takes them. Raises ProtocolError for
        malformed messages."""
        body, inline, count = split(frames, self._limit)
        try:
            messages = self._decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            kind: RefusalKind = "unknown" if _UNKNOWN.search(str(error)) else "malformed"
            raise ProtocolError(f"a message that cannot be decoded: {error}", kind) from None
        if not messages:
            raise ProtocolError("a message without content")
        if len(messages) > MAX_BATCH:
            raise ProtocolError(f"a batch of {len(messages)} messages is over the limit of {MAX_BATCH}")
        carrying = [message for message in messages if type(message) in PAYLOAD_RECORDS]
        byte_ranges = [byte_range for message in carrying for byte_range in byte_ranges_of(message)]
        sizes = [0 if byte_range.name else byte_range.nbytes for byte_range in byte_ranges]
        if self._are_held and len(frames) == count and not inline and sum(sizes) > INLINE_BYTES:
            return messages, [[] for _ in sizes]
        return messages, _payloads(sizes, inline, frames, count)


def _payloads(sizes: Sequence[int], inline: memoryview, frames: Sequence[Frame], count: int) -> list[Payload]:
    """The bytes of each tensor: parts of `inline`, which follows the body, or else separate frames, after the `count`
    frames of the body."""
    total, start = sum(sizes), 0
    if len(inline) != (total if total <= INLINE_BYTES else 0):
        raise ProtocolError(f"a message announces {total} bytes of tensors, and {len(inline)} follow its body")
    payloads: list[Payload] = []
    for size in sizes:
        if total <= INLINE_BYTES:
            payload: Payload = [inline[start : start + size]] if size else []
            start += size
        else:
            payload = list(frames[count : count + -(-size // CHUNK)])
            count += len(payload)
        if sum(map(len, payload)) != size:
            raise ProtocolError(f"a tensor of {size} bytes was announced that did not come")
        payloads.append(payload)
    if count != len(frames):
        raise ProtocolError(f"{len(frames) - count} frames belong to no message")
    return payloads


def split(frames: Sequence[Frame], limit: int = MAX_BODY) -> tuple[memoryview, memoryview, int]:
    """Check the header; returns the body, the bytes that follow it in its last frame, and its number of frames."""
    size = _read_header(frames)[2]
    if size > limit:
        raise ProtocolError(f"a message body of {size} bytes is over the limit of {limit}")
    content, count = memoryview(frames[0])[_HEADER.size :], max(1, -(-size // PIECE))
    if count > 1:
        content = memoryview(b"".join((content, *frames[1:count])))
    if size > len(content):
        raise ProtocolError(f"a message body of {size} bytes is truncated to {len(content)}")
    return content[:size], content[size:], count


def divide(frames: Sequence[Frame]) -> tuple[Sequence[Frame], Sequence[Frame]]:
    """The frames of a message with its body, and those with tensors."""
    if len(frames) == 1:
        return frames, ()
    count = max(1, -(-_read_header(frames)[2] // PIECE))
    return frames[:count], frames[count:]


def _read_header(frames: Sequence[Frame]) -> tuple[bytes, int, int, int, int]:
    head = frames[0] if frames else b""
    if len(head) < _VERSION.size or head[:2] != MAGIC:
        raise ProtocolError("a peer does not speak GT's protocol; is this the right port?")
    _, protocol = _VERSION.unpack_from(head)
    if protocol != PROTOCOL:
        raise ProtocolError(f"this side speaks protocol {PROTOCOL}, the other side {protocol}")
    if len(head) < _HEADER.size:
        raise ProtocolError(f"the header of a message is truncated to {len(head)} bytes")
    return _HEADER.unpack_from(head)


def join(payload: Sequence[Frame]) -> Frame:
    """The bytes of a payload in one piece."""
    if len(payload) == 1:
        return payload[0]
    return bytearray().join(payload)
