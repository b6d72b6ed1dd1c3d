"""Backpressure on a session: its instructions wait while it has requested too many answers that it has not read.

The bytes of an answer occupy memory of a worker, of the server or shared memory until the client has read them. Over
the limit, the further instructions of the client are queued in the server, in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias, get_args

from gt.core.errors import ProtocolError
from gt.core.ids import short_id
from gt.core.message_fields import PAYLOAD_RECORDS
from gt.core.messages import COUNTED_BYTES, EndSession, FetchTensor, Instruction, ReadSessions, TensorRead
from gt.wire.codec import Payload, read_bytes

MAX_UNREAD = 1 << 28  # bytes; a read of any size may begin while fewer are unread
MAX_SENT = 1 << 29  # unread bytes of answers, not counting reads of COUNTED_BYTES or more
MAX_QUEUED = 1 << 17  # queued instructions
OVER_LIMIT = 2  # times its limit on instructions in flight may be queued: clients wait before they reach the limit
MAX_QUEUED_BYTES = 1 << 30  # bytes of the payloads of queued instructions
MAX_SLICE = 1 << 10  # instructions that are carried out before those of other sessions get a turn

QueuedInstruction: TypeAlias = Instruction | ReadSessions | EndSession
_ANSWERED = frozenset(kind for kind in get_args(QueuedInstruction) if "request" in kind.__struct_fields__)


class BatchSlice(NamedTuple):
    """At most MAX_SLICE instructions of which only the last one may ask for an answer, with their payloads."""

    instructions: Sequence[QueuedInstruction]
    payloads: Sequence[Payload]

    @property
    def read(self) -> FetchTensor | None:
        last = self.instructions[-1]
        return last if type(last) is FetchTensor else None

    @property
    def administration(self) -> ReadSessions | EndSession | None:
        last = self.instructions[-1]
        return last if isinstance(last, ReadSessions | EndSession) else None

    @property
    def nbytes(self) -> int:
        return sum(len(frame) for payload in self.payloads for frame in payload)


class Backpressure:
    """The unread answers and the waiting instructions of one session. `asked` is a read of which the size is not known.

    A read of COUNTED_BYTES or more counts until the client sends AckRead, a smaller one until its answer is sent. All
    other bytes sent to the client count until it sends AckBytes. `limit` is that on instructions in flight, at which
    clients wait by themselves (None: there is none).
    """

    def __init__(self, limit: int | None = None) -> None:
        self._max_queued = MAX_QUEUED if limit is None else min(MAX_QUEUED, OVER_LIMIT * limit)
        self.asked: FetchTensor | None = None
        self._reads: dict[int, int] = {}  # bytes by request
        self._answered: set[int] = set()  # those of them whose answers were sent
        self._unread = 0  # their sum
        self._sent = 0
        self._queue: deque[BatchSlice] = deque()
        self._queued = 0  # queued instructions
        self._queued_bytes = 0

    def queue(self, batch: Sequence[QueuedInstruction], payloads: Sequence[Payload]) -> None:
        """Queue instructions. Raises ProtocolError over a limit that no client reaches which reads its answers."""
        for batch_slice in _split_after_requests(batch, payloads):
            self._queue.append(batch_slice)
            self._queued += len(batch_slice.instructions)
            self._queued_bytes += batch_slice.nbytes
        too_many = self._queued > self._max_queued or self._queued_bytes > MAX_QUEUED_BYTES
        if len(self._queue) > 1 and too_many:
            raise ProtocolError(
                f"{self._queued} instructions with {self._queued_bytes} bytes wait because "
                f"{self._unread + self._sent} bytes that were asked for are not taken",
                "limit",
            )

    def next(self) -> BatchSlice | None:
        """The next instructions that may be carried out now, if any."""
        if not self._queue or self._is_full(self._queue[0]):
            return None
        batch_slice = self._queue.popleft()
        self._queued -= len(batch_slice.instructions)
        self._queued_bytes -= batch_slice.nbytes
        return batch_slice

    @property
    def queued(self) -> int:
        """The number of instructions that wait."""
        return self._queued

    @property
    def is_empty(self) -> bool:
        """Whether no instruction waits, and no read whose size is not known."""
        return not self._queue and self.asked is None

    def _is_full(self, batch_slice: BatchSlice) -> bool:
        """Whether a slice has to wait. A read waits for all unread bytes, other instructions for small answers only:
        they may be answered with failures."""
        unread = self._sent + self._unread if batch_slice.read is not None else self._sent
        return unread >= MAX_UNREAD

    def begin(self, request: int, nbytes: int) -> None:
        self._unread += nbytes - self._reads.get(request, 0)
        self._reads[request] = nbytes

    def end(self, request: int) -> None:
        """A read was received by the client, or has failed."""
        self._unread -= self._reads.pop(request, 0)
        self._answered.discard(request)
        if self.asked is not None and self.asked.request == request:
            self.asked = None

    def note_read(self, read: TensorRead) -> None:
        """A read is answered. From now on a small one counts as sent bytes."""
        if read_bytes(read) < COUNTED_BYTES:
            self.end(read.request)
        elif read.request in self._reads:
            self._answered.add(read.request)

    def acknowledge(self, request: int) -> None:
        """The client says that it has received a read. Raises ProtocolError if that was not sent: a client could ask
        for any number of bytes and take none of them."""
        is_asked = self.asked is not None and self.asked.request == request
        if is_asked or (request in self._reads and request not in self._answered):
            raise ProtocolError(f"request {short_id(request)} cannot be taken before it is answered")
        self.end(request)

    def note_sent(self, nbytes: int) -> None:
        self._sent += nbytes

    def note_taken(self, nbytes: int) -> None:
        if nbytes > self._sent:
            raise ProtocolError(f"{nbytes} bytes cannot be taken: {self._sent} were sent")
        self._sent -= nbytes

    def require_taken(self) -> None:
        """Raises ProtocolError if too many bytes that were sent are unread."""
        if self._sent > MAX_SENT:
            raise ProtocolError(f"{self._sent} bytes of answers are not taken, and the limit is {MAX_SENT}", "limit")


def _split_after_requests(batch: Sequence[QueuedInstruction], payloads: Sequence[Payload]) -> Iterator[BatchSlice]:
    """A batch split after each instruction that asks for an answer, and after MAX_SLICE instructions."""
    start = carried = 0
    for end, instruction in enumerate(batch, 1):
        if type(instruction) in _ANSWERED or end - start == MAX_SLICE or end == len(batch):
            instructions = batch[start:end]
            count = sum(type(each) in PAYLOAD_RECORDS for each in instructions) if payloads else 0
            yield BatchSlice(instructions, payloads[carried : carried + count])
            start, carried = end, carried + count
