"""The interface of a client's connection to its dispatcher, in this process or in another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from gt.core.messages import Answer, Instruction
from gt.wire.codec import Buffer

CLOSED = "the session was closed while another thread used it"


class UploadWriter(NamedTuple):
    """The bytes of an upload that are not in one piece: `write` copies them to memory of their size."""

    nbytes: int
    write: Callable[[memoryview], None]


Upload: TypeAlias = Buffer | UploadWriter


def as_buffer(upload: Upload) -> Buffer:
    if not isinstance(upload, UploadWriter):
        return upload
    data = bytearray(upload.nbytes)
    upload.write(memoryview(data))
    return data


class Received(NamedTuple):
    """An answer, and the bytes of its byte ranges. Those in shared memory are copied out by the client: the memory is
    used again when the buffers are garbage."""

    answer: Answer
    buffers: Sequence[Buffer] = ()
    is_shared: bool = False


class ClientChannel(Protocol):
    """The client's end of a connection. Uploads belong to the messages with a byte range, in order, and their memory
    may be changed after `send`."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether `send` returns before the work is done, so that the sender has to limit how far it runs ahead."""

    @property
    def is_full(self) -> bool:
        """Whether so much of what was sent has not arrived that the sender has to wait. `receive` may make room."""

    def send(self, batch: Sequence[Instruction], uploads: Sequence[Upload]) -> None: ...

    def wait(self) -> None:
        """Wait a moment for an answer. Signals interrupt it, and other threads may use the channel meanwhile."""

    def read_directly(self, ident: int) -> Buffer | None:
        """The bytes of a tensor of a worker in this process; None if they have to be requested."""

    def receive(self) -> list[Received]:
        """Some of the answers that have arrived; none if all were received. Raises ServerLost when no more can come."""

    def how_it_ended(self, pid: int) -> str:
        """The exit code and the last output of a worker that this process has started; "" for other processes."""

    def close(self) -> None: ...
