"""Each end of a session uses every message of the other once and in order, whatever connections lose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt.core.errors import ProtocolError
from gt.core.messages import ACKNOWLEDGED_BYTES, AckMessages, AckRead
from gt.wire import message_stream
from gt.wire.codec import Decoder, MessageNumbers, encode, numbers_of
from gt.wire.message_stream import ACKNOWLEDGED_MESSAGES, MessageGap, MessageStream, SendWindow
from tests.records import own

DECODER = Decoder(AckRead | AckMessages)


class End:
    """One end, the messages that it has used, and those on their way to it."""

    def __init__(self, window=None):
        self.stream = MessageStream(window)
        self.used, self.sent, self.arriving = [], [], []

    def send(self, other, count):
        """A batch, of which each record becomes a message of its own."""
        records = [AckRead(own(len(self.sent) + n)) for n in range(count)]
        self.sent += records
        for record in records:
            other.arriving += self.stream.encode([record])

    def receive(self, other):
        if not self.arriving:
            return
        frames = [bytes(frame) for frame in self.arriving.pop(0)]
        if self.stream.accept(frames):
            self.used += [record for record in DECODER.decode(frames)[0] if not isinstance(record, AckMessages)]
        other.arriving += self.stream.take_sendable()
        if self.stream.owes_acknowledgement:
            other.arriving.append(self.stream.encode_acknowledgement())


def reconnect(left, right):
    """What was on its way is lost; each end sends what the other has not received."""
    left.arriving.clear()
    right.arriving.clear()
    left.stream.restart(right.stream.received)
    right.stream.restart(left.stream.received)
    right.arriving += left.stream.take_sendable()
    left.arriving += right.stream.take_sendable()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.booleans(), st.integers(1, 100)),
        st.tuples(st.just("receive"), st.booleans(), st.integers(1, 150)),
        st.tuples(st.just("reconnect"), st.booleans(), st.integers(1, 2)),
    ),
    max_size=60,
)


@given(STEPS, st.one_of(st.none(), st.integers(ACKNOWLEDGED_MESSAGES, 200)))
def test_messages_are_used_once_and_in_order_whatever_is_lost(steps, window):
    left, right = End(), End(None if window is None else SendWindow(window))
    for step, is_left, count in steps:
        end, other = (left, right) if is_left else (right, left)
        if step == "send":
            end.send(other, count)
        elif step == "receive":
            for _ in range(count):
                end.receive(other)
        else:
            reconnect(left, right)
        assert end.used == other.sent[: len(end.used)]
    reconnect(left, right)
    while left.arriving or right.arriving:
        left.receive(right)
        right.receive(left)
    assert left.used == right.sent and right.used == left.sent
    assert left.stream.kept < ACKNOWLEDGED_MESSAGES and right.stream.kept < ACKNOWLEDGED_MESSAGES


def test_a_message_that_comes_twice_is_used_once():
    left, right = MessageStream(), MessageStream()
    (frames,) = left.encode([AckRead(own(1))])
    assert right.accept(frames)
    assert not right.accept(frames)


def test_a_message_that_comes_too_early_is_refused():
    left, right = MessageStream(), MessageStream()
    left.encode([AckRead(own(1))])
    (second,) = left.encode([AckRead(own(2))])
    with pytest.raises(MessageGap, match="message 2 of a session came after message 0"):
        right.accept(second)
    assert right.received == 0


def test_what_was_never_sent_cannot_be_acknowledged():
    stream = MessageStream()
    with pytest.raises(ProtocolError, match="message 3 of a session was acknowledged, and 0 were sent"):
        stream.accept(encode([AckMessages()], (), MessageNumbers(0, 3)))


def test_what_was_acknowledged_cannot_be_asked_for_again():
    stream = MessageStream()
    for _ in range(3):
        stream.encode([AckRead(own(1))])
    stream.acknowledge(2)
    assert stream.kept == 1
    with pytest.raises(ProtocolError, match="up to 2 were acknowledged, and now only up to 1"):
        stream.restart(1)
    stream.restart(2)
    assert [numbers_of(frames).number for frames in stream.take_sendable()] == [3]


def test_messages_without_a_number_are_new_and_not_kept():
    left, right = MessageStream(), MessageStream()
    frames = left.encode_acknowledgement()
    assert right.accept(frames) and right.accept(frames)
    assert left.kept == 0 and right.received == 0


def test_a_batch_over_the_limit_of_a_message_takes_several_numbers():
    stream = MessageStream()
    encoded = stream.encode([AckRead(own(n)) for n in range(8)], (), 64)
    assert len(encoded) > 1
    assert [numbers_of(frames).number for frames in encoded] == list(range(1, len(encoded) + 1))
    assert stream.kept == len(encoded)


def test_kept_bytes_are_a_copy_of_memory_that_may_change():
    stream = MessageStream()
    data = bytearray(b"a" * (1 << 17))
    (frames,) = stream.encode([AckRead(own(1))], [[memoryview(data)]])
    data[:] = b"b" * len(data)
    assert bytes(frames[1]) == b"a" * len(data)
    assert stream.kept_bytes == sum(map(len, frames))


def test_a_sender_that_can_wait_has_to_over_a_bound(monkeypatch):
    monkeypatch.setattr(message_stream, "MAX_KEPT", 3)
    stream = MessageStream()
    for _ in range(3):
        stream.encode([AckRead(own(1))])
    assert not stream.is_full
    stream.encode([AckRead(own(1))])
    assert stream.is_full
    stream.acknowledge(1)
    assert not stream.is_full
    monkeypatch.setattr(message_stream, "MAX_KEPT_BYTES", 3)
    assert stream.is_full


def test_a_sender_that_cannot_wait_gives_up_a_peer_that_acknowledges_nothing(monkeypatch):
    monkeypatch.setattr(message_stream, "MAX_UNACKNOWLEDGED_BYTES", 100)
    stream = MessageStream()
    stream.encode([AckRead(own(1))], [[bytes(1 << 17)]])
    stream.require_acknowledged()  # a single message may have any size
    for _ in range(5):
        stream.encode([AckRead(own(1))])
    with pytest.raises(ProtocolError, match="6 messages .* are not acknowledged"):
        stream.require_acknowledged()
    stream.acknowledge(6)
    stream.require_acknowledged()
    monkeypatch.setattr(message_stream, "MAX_UNACKNOWLEDGED", 0)
    stream.encode([AckRead(own(1))])
    with pytest.raises(ProtocolError, match="1 messages"):
        stream.require_acknowledged()


def numbers(messages):
    return [numbers_of(frames).number for frames in messages]


def test_messages_over_the_window_wait_for_acknowledgements():
    stream = MessageStream(SendWindow(messages=2))
    sent = [message for n in range(5) for message in stream.encode([AckRead(own(n))])]
    assert numbers(sent) == [1, 2] and stream.has_waiting and stream.kept == 5
    stream.acknowledge(1)
    assert numbers(stream.take_sendable()) == [3] and stream.take_sendable() == []
    with pytest.raises(ProtocolError, match="message 4 of a session was acknowledged, and 3 were sent"):
        stream.acknowledge(4)
    stream.acknowledge(3)
    assert numbers(stream.take_sendable()) == [4, 5] and not stream.has_waiting


def test_a_window_of_bytes_lets_one_message_of_any_size_pass():
    stream = MessageStream(SendWindow(nbytes=1000))
    sent = [message for n in range(3) for message in stream.encode([AckRead(own(n))], [[bytes(5000)]])]
    assert numbers(sent) == [1]
    stream.acknowledge(1)
    assert numbers(stream.take_sendable()) == [2] and stream.kept_bytes > 10_000


def test_a_new_connection_has_a_window_of_its_own():
    stream = MessageStream(SendWindow(messages=2))
    for n in range(5):
        stream.encode([AckRead(own(n))])
    stream.restart(1)
    assert numbers(stream.take_sendable()) == [2, 3]
    stream.restart(3)
    assert numbers(stream.take_sendable()) == [4, 5] and stream.kept == 2


def test_the_window_is_larger_than_what_the_other_end_receives_before_it_acknowledges():
    assert SendWindow().messages > ACKNOWLEDGED_MESSAGES and SendWindow().nbytes > ACKNOWLEDGED_BYTES
