"""The interface of a client's connection to its dispatcher, in this process or in another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from gt.core.messages import Answer, Instruction

Buffer: TypeAlias = memoryview | bytes | bytearray

CLOSED = "the session was closed while another thread used it"


class ClientChannel(Protocol):
    """The client's end of a connection. Buffers belong to the messages with a segment, in order, and may be reused
    after `send`."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether `send` returns before the work is done, so that the sender has to limit how far it runs ahead."""

    def send(self, batch: Sequence[Instruction], buffers: Sequence[Buffer]) -> None: ...

    def wait(self) -> None:
        """Wait a moment for an answer. Signals interrupt it, and other threads may use the channel meanwhile."""

    def receive(self) -> list[tuple[Answer, Buffer | None]]:
        """Some of the answers that have arrived; none if all were received. Raises ServerLost when no more can come."""

    def how_it_ended(self, pid: int) -> str:
        """The exit code and the last output of a worker that this process has started; "" for other processes."""

    def close(self) -> None: ...
