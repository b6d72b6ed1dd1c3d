"""How much a session may read at once: what it was not yet given, and what it has not yet taken, has a limit.

The bytes of an answer are memory of a worker, of the server or shared, until the client has taken them. A client that
asks for more waits: its instructions after that stay in the server, in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gt.core.errors import ProtocolError
from gt.core.messages import COUNTED_BYTES, CreateTensor, Fetched, FetchTensor, Instruction
from gt.wire.codec import Payload

MAX_UNREAD = 1 << 28  # bytes; a read is begun while fewer are unread, so that each can be done, however large
MAX_SENT = 1 << 29  # bytes of answers, reads of COUNTED_BYTES and more left out, that a session has not taken
MAX_HELD = 1 << 17  # instructions that may wait for that
MAX_HELD_BYTES = 1 << 30  # of the tensors that they bring


class BatchPart(NamedTuple):
    """Instructions of which at most the last one reads, and the payloads that belong to them."""

    instructions: Sequence[Instruction]
    payloads: Sequence[Payload]

    @property
    def read(self) -> FetchTensor | None:
        last = self.instructions[-1]
        return last if type(last) is FetchTensor else None

    @property
    def nbytes(self) -> int:
        return sum([len(frame) for payload in self.payloads for frame in payload])


class ReadLimits:
    """What one session reads. `asked` is the read that was begun last, until its bytes are counted.

    A read counts from its beginning: one of COUNTED_BYTES or more until the client has said that it is received, a
    smaller one until it is sent. All that was sent counts, those large reads left out, until the client has said that
    it is taken.
    """

    def __init__(self) -> None:
        self.asked: FetchTensor | None = None
        self._reads: dict[int, int] = {}  # bytes by request
        self._unread = 0  # their sum
        self._sent = 0
        self._held: deque[BatchPart] = deque()
        self._waiting = 0  # instructions that are held
        self._waiting_bytes = 0

    def hold(self, batch: Sequence[Instruction], payloads: Sequence[Payload]) -> None:
        """Raises ProtocolError where more is held than a session that takes its answers ever needs."""
        for part in parts_of(batch, payloads):
            self._held.append(part)
            self._waiting += len(part.instructions)
            self._waiting_bytes += part.nbytes
        too_many = self._waiting > MAX_HELD or self._waiting_bytes > MAX_HELD_BYTES
        if len(self._held) > 1 and too_many:
            raise ProtocolError(
                f"{self._waiting} instructions with {self._waiting_bytes} bytes wait because "
                f"{self._unread + self._sent} bytes that were asked for are not taken"
            )

    def next(self) -> BatchPart | None:
        """What may be done now, if anything."""
        if not self._held or self._is_full(self._held[0]):
            return None
        part = self._held.popleft()
        self._waiting -= len(part.instructions)
        self._waiting_bytes -= part.nbytes
        return part

    def _is_full(self, part: BatchPart) -> bool:
        """Instructions that read nothing have answers too: failures, for example."""
        unread = self._sent + self._unread if part.read is not None else self._sent
        return unread >= MAX_UNREAD

    def begin(self, request: int, nbytes: int) -> None:
        self._unread += nbytes - self._reads.get(request, 0)
        self._reads[request] = nbytes

    def end(self, request: int) -> None:
        """The client has what it asked for, or was told that it cannot."""
        self._unread -= self._reads.pop(request, 0)
        if self.asked is not None and self.asked.request == request:
            self.asked = None

    def note_fetched(self, fetched: Fetched) -> None:
        """A read is answered. A small one counts with what is sent from now on."""
        if fetched.segment.nbytes < COUNTED_BYTES:
            self.end(fetched.request)

    def note_sent(self, nbytes: int) -> None:
        self._sent += nbytes

    def note_taken(self, nbytes: int) -> None:
        if nbytes > self._sent:
            raise ProtocolError(f"{nbytes} bytes cannot be taken where {self._sent} were sent")
        self._sent -= nbytes

    def require_taken(self) -> None:
        """Raises ProtocolError where a session does not take what it is sent, although it is asked for nothing more."""
        if self._sent > MAX_SENT:
            raise ProtocolError(f"{self._sent} bytes of answers are not taken, and the limit is {MAX_SENT}")


def parts_of(batch: Sequence[Instruction], payloads: Sequence[Payload]) -> Iterator[BatchPart]:
    """A batch cut after each of its reads."""
    start = carried = 0
    for place in [place for place, instruction in enumerate(batch, 1) if type(instruction) is FetchTensor]:
        part = batch[start:place]
        bring = sum([type(instruction) is CreateTensor for instruction in part])
        yield BatchPart(part, payloads[carried : carried + bring])
        start, carried = place, carried + bring
    if start < len(batch):
        yield BatchPart(batch[start:], payloads[carried:])
