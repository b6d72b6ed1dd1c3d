"""The messages of a session in both directions: numbered, kept until they are acknowledged, and used once.

A connection that ends loses messages, and neither end can tell which of those that it has sent. So each end numbers its
messages, keeps those that the other has not acknowledged, and sends them again over the next connection. Every message
says which was the last that its sender has received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from gt.core.errors import ProtocolError
from gt.core.messages import ACKNOWLEDGED_BYTES, AckMessages
from gt.wire.codec import MAX_BODY, Frame, MessageNumbers, encode, encode_batches, numbers_of
from gt.wire.sockets import SentFrame, keepable

ACKNOWLEDGED_MESSAGES = 64  # received messages after which an end acknowledges them, if it has nothing else to send
MAX_KEPT_BYTES = 1 << 26  # more than ACKNOWLEDGED_BYTES, or both ends would wait
MAX_KEPT = 1 << 12  # messages; more than ACKNOWLEDGED_MESSAGES
MAX_UNACKNOWLEDGED_BYTES = 1 << 30  # that a sender keeps which cannot wait, beside the largest message
MAX_UNACKNOWLEDGED = 1 << 16  # messages


class MessageGap(ProtocolError):
    """A message came too early: the connection has lost others, and cannot be used any more."""


class MessageStream:
    """One end of a session. `received` is the number of the last message that has arrived, `kept_bytes` the size of the
    messages that were sent and not acknowledged, which are `kept`."""

    def __init__(self) -> None:
        self.received = 0
        self.kept_bytes = 0
        self._sent = 0  # the number of the last message
        self._kept: deque[tuple[list[SentFrame], int]] = deque()  # the last messages, with their sizes
        self._acknowledged = 0  # received messages of which the other end was told
        self._unacknowledged_bytes = 0

    @property
    def kept(self) -> int:
        return len(self._kept)

    @property
    def is_full(self) -> bool:
        """Whether a sender that can wait has to, until messages are acknowledged."""
        return self.kept_bytes > MAX_KEPT_BYTES or len(self._kept) > MAX_KEPT

    def encode(
        self, messages: Sequence[Any], payloads: Sequence[Sequence[Frame]] = (), limit: int = MAX_BODY
    ) -> list[list[SentFrame]]:
        """The next messages, to be sent in this order. They are kept until they are acknowledged."""
        encoded = encode_batches(messages, payloads, limit, MessageNumbers(self._sent + 1, self.received))
        self._note_acknowledgement_sent()
        return [self._keep(frames) for frames in encoded]

    def _keep(self, frames: Sequence[Frame]) -> list[SentFrame]:
        kept = keepable(frames)
        size = sum(map(len, frames))
        self._kept.append((kept, size))
        self._sent += 1
        self.kept_bytes += size
        return kept

    def accept(self, frames: Sequence[Frame]) -> bool:
        """Note a message that has arrived; returns whether it is new. One without a number is. Raises MessageGap if
        others are missing before it, and ProtocolError for the acknowledgement of a message that was never sent."""
        number, received = numbers_of(frames)
        self.acknowledge(received)
        if number == 0:
            return True
        if number > self.received + 1:
            raise MessageGap(f"message {number} of a session came after message {self.received}")
        if number <= self.received:
            return False
        self.received = number
        self._unacknowledged_bytes += sum(map(len, frames))
        return True

    def acknowledge(self, received: int) -> None:
        """The other end has received the messages up to a number."""
        if received > self._sent:
            raise ProtocolError(f"message {received} of a session was acknowledged, and {self._sent} were sent")
        kept = self._kept
        for _ in range(received - (self._sent - len(kept))):
            self.kept_bytes -= kept.popleft()[1]

    def require_acknowledged(self) -> None:
        """Raises ProtocolError if the other end has acknowledged too little of what was sent."""
        too_many = len(self._kept) > MAX_UNACKNOWLEDGED
        if not too_many and self.kept_bytes <= MAX_UNACKNOWLEDGED_BYTES:
            return
        largest = max([size for _, size in self._kept])
        if too_many or self.kept_bytes - largest > MAX_UNACKNOWLEDGED_BYTES:
            raise ProtocolError(
                f"{len(self._kept)} messages with {self.kept_bytes} bytes are not acknowledged, and the limits are "
                f"{MAX_UNACKNOWLEDGED} and {MAX_UNACKNOWLEDGED_BYTES}"
            )

    @property
    def owes_acknowledgement(self) -> bool:
        """Whether so much has arrived since the last message to the other end that it should be told."""
        unacknowledged = self.received - self._acknowledged
        return unacknowledged >= ACKNOWLEDGED_MESSAGES or self._unacknowledged_bytes >= ACKNOWLEDGED_BYTES

    def encode_acknowledgement(self) -> list[Frame]:
        """A message without a number: it is not kept."""
        self._note_acknowledgement_sent()
        return encode([AckMessages()], (), MessageNumbers(0, self.received))

    def _note_acknowledgement_sent(self) -> None:
        self._acknowledged = self.received
        self._unacknowledged_bytes = 0

    def missing(self, received: int) -> list[list[SentFrame]]:
        """The messages that the other end has not received, in order, for a new connection. Raises ProtocolError if
        they are not all kept, because more were acknowledged before."""
        first = self._sent - len(self._kept)
        if received < first:
            raise ProtocolError(f"messages of a session up to {first} were acknowledged, and now only up to {received}")
        self.acknowledge(received)
        return [frames for frames, _ in self._kept]
