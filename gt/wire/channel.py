"""What a role sees of the corridor, whether the other end is in this process or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from gt.core.messages import Answer, Instruction

Buffer: TypeAlias = memoryview | bytes | bytearray

CLOSED = "the session was closed while another thread used it"


class ClientChannel(Protocol):
    """A client's end. Buffers belong to the messages with a segment, in order, and may be reused after `send`."""

    @property
    def remote(self) -> bool:
        """Whether work goes on after `send` returns, so that the sender must not run ahead without limit."""

    def send(self, batch: Sequence[Instruction], buffers: Sequence[Buffer]) -> None: ...

    def wait(self) -> None:
        """Until something may have arrived, at most for a moment. Can be interrupted; others may use the channel."""

    def receive(self) -> list[tuple[Answer, Buffer | None]]:
        """Some of what has arrived; nothing if all was received. Raises ServerLost when nothing more can come."""

    def how_it_ended(self, pid: int) -> str:
        """What this side knows of the end of a process it started, or nothing."""

    def close(self) -> None: ...
