"""Malformed frames are refused with ProtocolError, and well-formed ones come back as they were encoded."""

from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt.core.errors import ProtocolError
from gt.core.messages import MAX_BATCH, PROTOCOL, ByteRange, CreateTensor, Instruction, Synchronize
from gt.wire import codec
from gt.wire.codec import Decoder, encode, encode_batches, encode_records, header_of, join, join_records, split
from tests.dispatcher_harness import kind
from tests.records import DIRECTIONS, INSTRUCTIONS, SHARED, own
from tests.records import meta as meta_of

INSTRUCTION = Decoder(Instruction)


def framed(body):
    """A body with its header, in one frame."""
    return [header_of(body) + body]


def body_of(frames):
    return split(frames)[0].tobytes()


ASK = body_of(encode([Synchronize(own(1))]))


def created(nbytes, name=""):
    return CreateTensor(own(1), meta_of(nbytes, dtype="uint8"), ByteRange(name, nbytes), None, 0)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "right port"),
        ([b""], "right port"),
        ([b"GT"], "right port"),
        ([b"XT\x01\x00" + ASK], "right port"),
        ([b"GET / HTTP/1.1\r\n"], "right port"),
        ([b"\x00", *framed(ASK)], "right port"),
        ([header_of(ASK)[:3]], "right port"),
        ([header_of(ASK)[:5]], "header of a message is truncated"),
        ([header_of(ASK)], "truncated to 0"),
        ([header_of(ASK), ASK], "truncated to 0"),  # a body in a frame of its own
        ([header_of(ASK) + ASK[:-1]], "truncated"),
        ([header_of(ASK) + ASK + b"surplus"], "announces 0 bytes of tensors, and 7 follow"),
        (framed(b""), "truncated"),
        (framed(ASK + ASK), "trailing"),
        (framed(b"\xc1"), "cannot be decoded"),
        (framed(msgspec.msgpack.encode({})), "Expected `array`"),
        (framed(msgspec.msgpack.encode(None)), "Expected `array`"),
        (framed(msgspec.msgpack.encode([None])), "Expected `array`"),
        (framed(msgspec.msgpack.encode([[]])), "at least length 1"),
        (framed(msgspec.msgpack.encode([[1, 2]])), "Expected `str`"),
        (framed(msgspec.msgpack.encode([["NoSuchRecord", 1]])), "Invalid value 'NoSuchRecord'"),
        (framed(msgspec.msgpack.encode([["Synchronize"]])), "at least length 2"),
        (framed(b"\xdd\xff\xff\xff\xff"), "truncated"),
    ],
    ids=lambda value: f"{value!s:.50}",
)
def test_malformed_frames_are_refused(frames, reason):
    with pytest.raises(ProtocolError, match=reason):
        INSTRUCTION.decode(frames)


def test_another_protocol_is_refused_with_both_versions():
    header = codec.MAGIC + (PROTOCOL + 1).to_bytes(2, "little")
    with pytest.raises(ProtocolError, match=f"speaks protocol {PROTOCOL}, the other side {PROTOCOL + 1}"):
        split([header + ASK])


@pytest.mark.parametrize("record", [record for record in INSTRUCTIONS if not hasattr(record, "byte_range")], ids=kind)
def test_a_body_cut_anywhere_is_refused(record):
    body = body_of(encode([record]))
    for length in range(len(body)):
        with pytest.raises(ProtocolError):
            INSTRUCTION.decode(framed(body[:length]))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_records_of_another_direction_are_refused(direction):
    union, records = DIRECTIONS[direction]
    others = [record for _, sent in DIRECTIONS.values() for record in sent if type(record) not in map(type, records)]
    for record in others:
        tag = record.__struct_config__.tag
        has_namesake = any(tag == known.__struct_config__.tag for known in records)  # an answer and a report
        with pytest.raises(ProtocolError, match="Expected `" if has_namesake else f"Invalid value '{tag}'"):
            Decoder(union).decode(encode([record]))


FRAMES_ANNOUNCED = "a tensor of 8 bytes was announced that did not come"


@pytest.mark.parametrize(
    ("record", "payload", "reason"),
    [
        (created(8), [], FRAMES_ANNOUNCED),
        (created(8), [b"1234567"], FRAMES_ANNOUNCED),
        (created(8), [b"123456789"], FRAMES_ANNOUNCED),
        (created(8), [b"12345678", b""], "1 frames belong to no message"),
        (created(8), [b"1234", b"5678"], FRAMES_ANNOUNCED),
        (created(0), [b""], "1 frames belong to no message"),
        (Synchronize(own(1)), [b"surplus"], "1 frames belong to no message"),
        (created(SHARED.nbytes, SHARED.name), [bytes(SHARED.nbytes)], "1 frames belong to no message"),
    ],
    ids=lambda value: kind(value) if isinstance(value, msgspec.Struct) else str(value),
)
def test_frames_other_than_announced_are_refused(record, payload, reason, monkeypatch):
    monkeypatch.setattr(codec, "INLINE_BYTES", 0)
    frames = [*encode([record]), *payload]
    with pytest.raises(ProtocolError, match=reason):
        INSTRUCTION.decode(frames)


@pytest.mark.parametrize(
    ("record", "content"),
    [
        (created(8), b""),
        (created(8), b"1234567"),
        (created(8), b"123456789"),
        (created(0), b"1"),
        (Synchronize(own(1)), b"surplus"),
        (created(SHARED.nbytes, SHARED.name), bytes(SHARED.nbytes)),
        (created(codec.INLINE_BYTES + 1), bytes(codec.INLINE_BYTES + 1)),
    ],
    ids=lambda value: kind(value) if isinstance(value, msgspec.Struct) else f"{len(value)} bytes",
)
def test_bytes_after_the_body_other_than_announced_are_refused(record, content):
    (frame,) = encode([record])
    with pytest.raises(ProtocolError, match=f"{len(content)} follow its body"):
        INSTRUCTION.decode([frame + content])


def test_a_small_payload_in_a_frame_of_its_own_is_refused():
    (frame,) = encode([created(8)], [[b"12345678"]])
    with pytest.raises(ProtocolError, match="1 frames belong to no message"):
        INSTRUCTION.decode([frame, b"12345678"])


def test_swapped_payloads_are_refused(monkeypatch):
    monkeypatch.setattr(codec, "INLINE_BYTES", 0)
    with pytest.raises(ProtocolError, match="a tensor of 4 bytes was announced"):
        INSTRUCTION.decode(encode([created(4), created(8)], [[b"12345678"], [b"1234"]]))


def test_a_batch_of_the_most_messages_is_accepted():
    assert len(INSTRUCTION.decode(encode([Synchronize(1)] * MAX_BATCH))[0]) == MAX_BATCH


def test_an_oversized_batch_is_refused():
    with pytest.raises(ProtocolError, match=f"{MAX_BATCH + 1} messages is over the limit of {MAX_BATCH}"):
        INSTRUCTION.decode(encode([Synchronize(1)] * (MAX_BATCH + 1)))


def test_an_oversized_body_is_refused():
    with pytest.raises(ProtocolError, match="over the limit of 4"):
        Decoder(Instruction, 4).decode(framed(ASK))


def test_no_frame_is_longer_than_the_sockets_take():
    content = bytes(3 * codec.CHUNK + 1)
    frames = encode([created(len(content)), *[Synchronize(own(1))] * MAX_BATCH][:MAX_BATCH], [[content]])
    assert len(frames) > 5 and max(map(len, frames)) <= codec.MAX_FRAME


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.sampled_from([0, 8, 1000]))
def test_a_body_over_several_frames_comes_back_with_its_payloads(sizes, few):
    messages = [created(size) for size in sizes]
    contents = [[bytes([place + 1]) * size] for place, size in enumerate(sizes)]
    with mock.patch.multiple(codec, PIECE=16, CHUNK=8, INLINE_BYTES=few):
        frames = encode(messages, contents)
        assert max(map(len, frames)) <= 16 + len(header_of(b"")) + few
        decoded, payloads = INSTRUCTION.decode(frames)
    assert decoded == messages
    assert [bytes(join(payload)) for payload in payloads] == [content for (content,) in contents]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20))
def test_a_batch_over_the_limit_is_sent_in_several_messages_in_order(sizes):
    messages = [created(size) if size else Synchronize(own(2)) for size in sizes]
    contents = [[bytes([place + 1]) * size] for place, size in enumerate(sizes) if size]
    batches = [Decoder(Instruction, 100).decode(frames) for frames in encode_batches(messages, contents, 100)]
    assert [message for decoded, _ in batches for message in decoded] == messages
    assert [bytes(join(payload)) for _, payloads in batches for payload in payloads] == [only for (only,) in contents]


def test_a_record_that_is_over_the_limit_alone_is_refused_by_name():
    with pytest.raises(ProtocolError, match="a Synchronize of .* bytes is over the limit of 4"):
        encode_batches([Synchronize(own(1))] * 3, limit=4)


def test_a_body_nested_too_deeply_is_refused():
    nested = b"\x82\xa4type\xa5items\xa6values\x91" * 5000 + b"\x01"
    body = b"\x91\x93\xa8DefineOp\x01\x97\xa2op\x91" + nested + b"\x80\x90\x90\x90\x90"
    with pytest.raises(ProtocolError):
        INSTRUCTION.decode(framed(body))


def decode_or_refuse(frames):
    """Anything but ProtocolError fails the test that calls this."""
    try:
        return INSTRUCTION.decode(frames)
    except ProtocolError:
        return None


@given(st.binary(max_size=200))
def test_random_bytes_raise_protocol_errors(body):
    decode_or_refuse(framed(body))


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_random_frames_raise_protocol_errors(frames):
    decode_or_refuse(frames)


@given(st.sampled_from(INSTRUCTIONS), st.data())
def test_changed_bytes_raise_protocol_errors(record, data):
    body = bytearray(body_of(encode([record])))
    changes = st.tuples(st.integers(0, len(body) - 1), st.integers(0, 255))
    for place, value in data.draw(st.lists(changes, min_size=1, max_size=3)):
        body[place] = value
    decode_or_refuse(framed(bytes(body)))


CHUNK = 8
SIZES = st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 5 * CHUNK])
PAYLOADS = SIZES.flatmap(lambda size: st.binary(min_size=size, max_size=size))


FEW = st.sampled_from([0, CHUNK, 1000])


@given(st.lists(st.one_of(st.none(), PAYLOADS), min_size=1, max_size=6), FEW)
def test_payloads_come_back_with_their_messages(contents, few):
    messages = [Synchronize(1) if content is None else created(len(content)) for content in contents]
    carried = [content for content in contents if content is not None]
    with mock.patch.object(codec, "CHUNK", CHUNK), mock.patch.object(codec, "INLINE_BYTES", few):
        frames = encode(messages, [[content] for content in carried])
        decoded, payloads = INSTRUCTION.decode(frames)
    assert decoded == messages
    assert all(len(frame) <= CHUNK for frame in frames[1:])
    assert (len(frames) == 1) == (sum(map(len, carried)) <= few)
    assert [bytes(join(payload)) for payload in payloads] == carried


@given(PAYLOADS, FEW)
def test_a_payload_passed_on_is_the_same_frames(content, few):
    """The dispatcher sends a client's frames to a worker without joining them."""
    with mock.patch.object(codec, "CHUNK", CHUNK), mock.patch.object(codec, "INLINE_BYTES", few):
        frames = encode([created(len(content))], [[content]])
        messages, payloads = INSTRUCTION.decode(frames)
        assert encode(messages, payloads) == frames


@pytest.mark.parametrize("sizes", [(1,), (3, 2), (15,), (16,), (7, 8, 1), (65535,), (65536,), (65000, 536)])
def test_records_that_were_encoded_once_are_the_same_message(sizes):
    records = [Synchronize(own(number)) for number in range(sum(sizes))]
    parts, first = [], 0
    for size in sizes:
        parts.append(encode_records(records[first : first + size]))
        first += size
    assert join_records(parts) == encode(records)


def test_too_many_records_are_several_messages():
    records = [Synchronize(own(number)) for number in range(MAX_BATCH + 1)]
    assert join_records([encode_records(records)]) is None
    decoded = [Decoder(Instruction).decode(frames)[0] for frames in encode_batches(records)]
    assert len(decoded) == 2 and [record for batch in decoded for record in batch] == records
