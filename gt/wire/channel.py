"""What a role sees of the corridor, whether the other end is in this process or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from gt.core.messages import Answer, Instruction

Buffer: TypeAlias = memoryview | bytes | bytearray

SLICE_MS = 2  # how long a receiver holds a socket before a sender of another thread gets it


class ClientChannel(Protocol):
    """A client's end. Buffers belong to the messages with a segment, in order, and may be reused after `send`."""

    @property
    def remote(self) -> bool:
        """Whether work goes on after `send` returns, so that the sender must not run ahead without limit."""

    def send(self, batch: Sequence[Instruction], buffers: Sequence[Buffer]) -> None: ...

    def receive(self, timeout: float) -> list[tuple[Answer, Buffer | None]]:
        """What has arrived, waiting at most `timeout` seconds for it. Raises ServerLost when nothing more can come."""

    def how_it_ended(self, pid: int) -> str:
        """What this side knows of the end of a process it started, or nothing."""

    def close(self) -> None: ...
