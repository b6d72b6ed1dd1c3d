"""The messages of a session in both directions: numbered, kept until they are acknowledged, and used once.

A connection that ends loses messages, and neither end can tell which of those that it has sent. So each end numbers its
messages, keeps those that the other has not acknowledged, and sends them again over the next connection. Every message
says which was the last that its sender has received.

ZeroMQ copies what it sends into its queues. So a sender that cannot wait has a window: no more than its messages and
bytes are sent and not acknowledged, and the others are sent when earlier ones are acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from gt.core.errors import ProtocolError
from gt.core.messages import ACKNOWLEDGED_BYTES, AckMessages
from gt.wire.codec import MAX_BODY, Frame, MessageNumbers, encode, encode_batches, numbers_of
from gt.wire.sockets import SentFrame, keepable

ACKNOWLEDGED_MESSAGES = 64  # received messages after which an end acknowledges them, if it has nothing else to send
MAX_KEPT_BYTES = 1 << 26  # more than ACKNOWLEDGED_BYTES, or both ends would wait
MAX_KEPT = 1 << 12  # messages; more than ACKNOWLEDGED_MESSAGES
MAX_UNACKNOWLEDGED_BYTES = 1 << 30  # kept by a sender that cannot wait, beside the largest message
MAX_UNACKNOWLEDGED = 1 << 16  # messages


class SendWindow(NamedTuple):
    """The messages that are sent before the first of them is acknowledged. Both limits are more than those after which
    the other end acknowledges, or both ends would wait. A message is sent while less than these are on their way."""

    messages: int = 1 << 10
    nbytes: int = 1 << 24


class _KeptMessage(NamedTuple):
    frames: list[SentFrame]
    nbytes: int


class MessageGap(ProtocolError):
    """A message came too early: the connection has lost others, and cannot be used any more."""


class MessageStream:
    """One end of a session. `received` is the number of the last message that has arrived, `kept_bytes` the size of the
    messages that are not acknowledged, which are `kept`. Without a `window` all of them are sent at once."""

    def __init__(self, window: SendWindow | None = None) -> None:
        self.received = 0
        self.kept_bytes = 0
        self._window = window
        self._encoded = 0  # the number of the last message
        self._sent: deque[_KeptMessage] = deque()  # over the last connection
        self._sent_bytes = 0
        self._waiting: deque[_KeptMessage] = deque()  # the messages after those, which were not sent yet
        self._acknowledged = 0  # received messages of which the other end was told
        self._unacknowledged_bytes = 0

    @property
    def kept(self) -> int:
        return len(self._sent) + len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether a sender that can wait has to, until messages are acknowledged."""
        return self.kept_bytes > MAX_KEPT_BYTES or self.kept > MAX_KEPT

    @property
    def has_waiting(self) -> bool:
        """Whether messages wait for the acknowledgement of earlier ones."""
        return bool(self._waiting)

    def encode(
        self, messages: Sequence[Any], payloads: Sequence[Sequence[Frame]] = (), limit: int = MAX_BODY
    ) -> list[list[SentFrame]]:
        """Number new messages and keep them until they are acknowledged. Returns the messages to send now, as
        `take_sendable`."""
        encoded = encode_batches(messages, payloads, limit, MessageNumbers(self._encoded + 1, self.received))
        self._note_acknowledgement_sent()
        for frames in encoded:
            kept = _KeptMessage(keepable(frames), sum(map(len, frames)))
            self._waiting.append(kept)
            self.kept_bytes += kept.nbytes
        self._encoded += len(encoded)
        return self.take_sendable()

    def take_sendable(self) -> list[list[SentFrame]]:
        """The messages to send now, in this order: those that wait, as far as the window allows."""
        taken: list[list[SentFrame]] = []
        window, sent, waiting = self._window, self._sent, self._waiting
        while waiting and (window is None or (len(sent) < window.messages and self._sent_bytes < window.nbytes)):
            kept = waiting.popleft()
            sent.append(kept)
            self._sent_bytes += kept.nbytes
            taken.append(kept.frames)
        return taken

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
        last_sent = self._encoded - len(self._waiting)
        if received > last_sent:
            raise ProtocolError(f"message {received} of a session was acknowledged, and {last_sent} were sent")
        for _ in range(received - (last_sent - len(self._sent))):
            nbytes = self._sent.popleft().nbytes
            self._sent_bytes -= nbytes
            self.kept_bytes -= nbytes

    def require_acknowledged(self) -> None:
        """Raises ProtocolError if the other end has acknowledged too few of the messages for it."""
        too_many = self.kept > MAX_UNACKNOWLEDGED
        if not too_many and self.kept_bytes <= MAX_UNACKNOWLEDGED_BYTES:
            return
        largest = max([message.nbytes for message in (*self._sent, *self._waiting)])
        if too_many or self.kept_bytes - largest > MAX_UNACKNOWLEDGED_BYTES:
            raise ProtocolError(
                f"{self.kept} messages with {self.kept_bytes} bytes are not acknowledged, and the limits are "
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

    def restart(self, received: int) -> None:
        """There is a new connection, and the other end has received the messages up to a number. Those after it are to
        be sent again: `take_sendable` returns them. Raises ProtocolError if they are not all kept, because more were
        acknowledged before."""
        first = self._encoded - self.kept
        if received < first:
            raise ProtocolError(f"messages of a session up to {first} were acknowledged, and now only up to {received}")
        self.acknowledge(received)
        self._waiting.extendleft(reversed(self._sent))
        self._sent.clear()
        self._sent_bytes = 0
