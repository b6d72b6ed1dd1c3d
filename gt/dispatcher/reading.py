"""How much a session may read at once: what it was not yet given, and what it has not yet taken, has a limit.

The bytes of a read are memory of a worker, of the server or shared, until the client has taken them. A client that asks
for more waits: its instructions after that stay in the server, in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gt.core.errors import ProtocolError
from gt.core.messages import COUNTED_BYTES, CreateTensor, FetchTensor, Instruction
from gt.wire.codec import Payload

MAX_UNREAD = 1 << 28  # bytes; a read is begun while fewer are unread, so that each can be done, however large
MAX_HELD = 1 << 17  # instructions that may wait for that
MAX_HELD_BYTES = 1 << 30  # of the tensors that they bring


class Part(NamedTuple):
    """Instructions of which at most the last one reads, and the payloads that belong to them."""

    instructions: Sequence[Instruction]
    payloads: Sequence[Payload]

    @property
    def read(self) -> FetchTensor | None:
        last = self.instructions[-1]
        return last if type(last) is FetchTensor else None


class Reading:
    """What one session reads. `asked` is the read that was begun last, until its bytes are counted."""

    def __init__(self) -> None:
        self.asked: FetchTensor | None = None
        self._unread: dict[int, int] = {}  # bytes by request
        self._held: deque[Part] = deque()

    def hold(self, batch: Sequence[Instruction], payloads: Sequence[Payload]) -> None:
        """Raises ProtocolError where more is held than a session that takes its answers ever needs."""
        self._held.extend(parts_of(batch, payloads))
        count = sum([len(part.instructions) for part in self._held]) if len(self._held) > 1 else 0
        nbytes = sum([len(frame) for part in self._held for payload in part.payloads for frame in payload])
        if count > MAX_HELD or (count and nbytes > MAX_HELD_BYTES):
            raise ProtocolError(
                f"{count} instructions with {nbytes} bytes wait because {sum(self._unread.values())} bytes that were "
                f"asked for are not taken"
            )

    def next(self) -> Part | None:
        """What may be done now, if anything."""
        if not self._held or (self._held[0].read is not None and sum(self._unread.values()) >= MAX_UNREAD):
            return None
        return self._held.popleft()

    def begin(self, request: int, nbytes: int) -> None:
        if nbytes >= COUNTED_BYTES:
            self._unread[request] = nbytes

    def end(self, request: int) -> None:
        """The client has what it asked for, or was told that it cannot."""
        self._unread.pop(request, None)
        if self.asked is not None and self.asked.request == request:
            self.asked = None


def parts_of(batch: Sequence[Instruction], payloads: Sequence[Payload]) -> Iterator[Part]:
    """A batch cut after each of its reads."""
    start = carried = 0
    for place in [place for place, instruction in enumerate(batch, 1) if type(instruction) is FetchTensor]:
        part = batch[start:place]
        bring = sum([type(instruction) is CreateTensor for instruction in part])
        yield Part(part, payloads[carried : carried + bring])
        start, carried = place, carried + bring
    if start < len(batch):
        yield Part(batch[start:], payloads[carried:])
