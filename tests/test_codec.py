"""Frames that are not what the protocol says are refused with ProtocolError, whatever they are."""

from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt.core.errors import ProtocolError
from gt.core.messages import MAX_BATCH, PROTOCOL, CreateTensor, Instruction, Segment, Synchronize
from gt.wire import codec
from gt.wire.codec import HEADER, Decoder, body_of, encode, join
from tests.desks import kind
from tests.records import DIRECTIONS, INSTRUCTIONS, SHARED, own
from tests.records import meta as meta_of

INSTRUCTION = Decoder(Instruction)
ASK = body_of(encode([Synchronize(own(1))])).tobytes()


def created(nbytes, name=""):
    return CreateTensor(own(1), meta_of(nbytes, dtype="uint8"), Segment(name, nbytes), 0, 0)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "right port"),
        ([b""], "right port"),
        ([b"GT"], "right port"),
        ([b"XT\x01\x00" + ASK], "right port"),
        ([b"GET / HTTP/1.1\r\n"], "right port"),
        ([b"\x00" + HEADER + ASK], "right port"),
        ([HEADER[:3]], "right port"),
        ([HEADER], "truncated"),
        ([HEADER, ASK], "truncated"),  # a body in a frame of its own
        ([HEADER + ASK + ASK], "trailing"),
        ([HEADER + b"\xc1"], "cannot be decoded"),
        ([HEADER + msgspec.msgpack.encode({})], "Expected `array`"),
        ([HEADER + msgspec.msgpack.encode(None)], "Expected `array`"),
        ([HEADER + msgspec.msgpack.encode([None])], "Expected `array`"),
        ([HEADER + msgspec.msgpack.encode([[]])], "at least length 1"),
        ([HEADER + msgspec.msgpack.encode([[1, 2]])], "Expected `str`"),
        ([HEADER + msgspec.msgpack.encode([["NoSuchRecord", 1]])], "Invalid value 'NoSuchRecord'"),
        ([HEADER + msgspec.msgpack.encode([["Synchronize"]])], "at least length 2"),
        ([HEADER + b"\xdd\xff\xff\xff\xff"], "truncated"),
    ],
    ids=lambda value: f"{value!s:.50}",
)
def test_malformed_frames_are_refused(frames, reason):
    with pytest.raises(ProtocolError, match=reason):
        INSTRUCTION.decode(frames)


def test_another_protocol_is_refused_with_both_versions():
    header = codec.MAGIC + (PROTOCOL + 1).to_bytes(2, "little")
    with pytest.raises(ProtocolError, match=f"speaks protocol {PROTOCOL}, the other side {PROTOCOL + 1}"):
        body_of([header + ASK])


@pytest.mark.parametrize("record", [record for record in INSTRUCTIONS if not hasattr(record, "segment")], ids=kind)
def test_a_body_cut_anywhere_is_refused(record):
    body = body_of(encode([record]))
    for length in range(len(body)):
        with pytest.raises(ProtocolError):
            INSTRUCTION.decode([HEADER + body[:length]])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_records_of_another_direction_are_refused(direction):
    union, records = DIRECTIONS[direction]
    others = [record for _, sent in DIRECTIONS.values() for record in sent if type(record) not in map(type, records)]
    for record in others:
        with pytest.raises(ProtocolError, match=f"Invalid value '{type(record).__name__}'"):
            Decoder(union).decode(encode([record]))


@pytest.mark.parametrize(
    ("record", "payload", "reason"),
    [
        (created(8), [], "announces 8 bytes"),
        (created(8), [b"1234567"], "announces 8 bytes"),
        (created(8), [b"123456789"], "announces 8 bytes"),
        (created(8), [b"12345678", b""], "1 frames belong to no message"),
        (created(8), [b"1234", b"5678"], "announces 8 bytes"),
        (created(0), [b""], "1 frames belong to no message"),
        (Synchronize(own(1)), [b"surplus"], "1 frames belong to no message"),
        (created(SHARED.nbytes, SHARED.name), [bytes(SHARED.nbytes)], "1 frames belong to no message"),
    ],
    ids=lambda value: kind(value) if isinstance(value, msgspec.Struct) else str(value),
)
def test_payloads_other_than_announced_are_refused(record, payload, reason):
    frames = [*encode([record]), *payload]
    with pytest.raises(ProtocolError, match=reason):
        INSTRUCTION.decode(frames)


def test_a_payload_of_the_first_is_not_taken_for_the_second():
    with pytest.raises(ProtocolError, match="announces 4 bytes"):
        INSTRUCTION.decode(encode([created(4), created(8)], [[b"12345678"], [b"1234"]]))


def test_a_batch_of_the_most_messages_is_accepted():
    assert len(INSTRUCTION.decode(encode([Synchronize(1)] * MAX_BATCH))) == MAX_BATCH


def test_an_oversized_batch_is_refused():
    with pytest.raises(ProtocolError, match=f"{MAX_BATCH + 1} messages is over the limit of {MAX_BATCH}"):
        INSTRUCTION.decode(encode([Synchronize(1)] * (MAX_BATCH + 1)))


def test_an_oversized_body_is_refused(monkeypatch):
    monkeypatch.setattr(codec, "MAX_BODY", 4)
    with pytest.raises(ProtocolError, match="over the limit of 4"):
        INSTRUCTION.decode([HEADER + ASK])


def test_a_body_nested_too_deeply_is_refused():
    nested = b"\x82\xa4type\xa5items\xa6values\x91" * 5000 + b"\x01"
    body = b"\x91\x93\xa8DefineOp\x01\x97\xa2op\x91" + nested + b"\x80\x90\x90\x90\x90"
    with pytest.raises(ProtocolError):
        INSTRUCTION.decode([HEADER + body])


def decode_or_refuse(frames):
    """Anything but ProtocolError fails the test that calls this."""
    try:
        return INSTRUCTION.decode(frames)
    except ProtocolError:
        return None


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_politely(body):
    decode_or_refuse([HEADER + body])


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_random_frames_are_refused_politely(frames):
    decode_or_refuse(frames)


@given(st.sampled_from(INSTRUCTIONS), st.data())
def test_bytes_changed_on_the_way_are_refused_politely(record, data):
    body = bytearray(body_of(encode([record])))
    changes = st.tuples(st.integers(0, len(body) - 1), st.integers(0, 255))
    for place, value in data.draw(st.lists(changes, min_size=1, max_size=3)):
        body[place] = value
    decode_or_refuse([HEADER + bytes(body)])


CHUNK = 8
SIZES = st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 5 * CHUNK])
PAYLOADS = SIZES.flatmap(lambda size: st.binary(min_size=size, max_size=size))


@given(st.lists(st.one_of(st.none(), PAYLOADS), min_size=1, max_size=6))
def test_chunked_payloads_come_back_with_their_messages(contents):
    messages = [Synchronize(1) if content is None else created(len(content)) for content in contents]
    with mock.patch.object(codec, "CHUNK", CHUNK):
        frames = encode(messages, [[content] for content in contents if content is not None])
        decoded = INSTRUCTION.decode(frames)
    assert all(len(frame) <= CHUNK for frame in frames[1:])
    assert [bytes(join(payload)) for _, payload in decoded] == [content or b"" for content in contents]


@given(PAYLOADS)
def test_a_payload_passed_on_is_the_same_frames(content):
    """The dispatcher sends a client's frames to a worker without joining them."""
    with mock.patch.object(codec, "CHUNK", CHUNK):
        frames = encode([created(len(content))], [[content]])
        ((message, payload),) = INSTRUCTION.decode(frames)
        assert encode([message], [payload]) == frames
