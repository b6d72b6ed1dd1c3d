"""The bytes of tensors between a client and workers: large ones in shared memory, the others in messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from gt.core.errors import ProtocolError
from gt.core.messages import (
    Answer,
    CreateTensor,
    Failed,
    FetchTensor,
    Instruction,
    Lost,
    MoreRoomNeeded,
    Rejected,
    TensorRead,
    Uploaded,
)
from gt.wire.client_channel import Received, Upload, UploadWriter, as_buffer
from gt.wire.codec import Buffer, Payload, join
from gt.wire.shared_buffer_pool import SharedBufferPool
from gt.wire.shared_memory import SHARE_BYTES

CopyBytes: TypeAlias = Callable[[memoryview, Buffer], None]
"""Copies bytes into a shared buffer."""


class Payloads:
    """Puts the bytes of a client's messages into shared memory of its session, and takes those of answers out of it.
    Without `copy` no memory is shared with the workers."""

    def __init__(self, copy: CopyBytes | None) -> None:
        self._copy = copy
        self._pool = SharedBufferPool()

    def open(self, session_secret: str, shares_memory: bool = True) -> None:
        """The session has begun. `session_secret` seals the names of its shared buffers."""
        self._pool.session_secret = session_secret
        if not shares_memory:
            self._copy = None

    def close(self) -> None:
        self._pool.close()

    def pack(
        self, batch: Sequence[Instruction], uploads: Sequence[Upload]
    ) -> tuple[Sequence[Instruction], list[Payload]]:
        """Put large uploads into shared memory, and the others into payloads; give large reads a place there."""
        if not uploads and FetchTensor not in set(map(type, batch)):  # most batches: ops only
            return batch, []
        remaining = iter(uploads)
        packed: list[Instruction] = []
        payloads: list[Payload] = []
        for instruction in batch:
            if isinstance(instruction, CreateTensor):
                instruction, payload = self._pack_upload(instruction, next(remaining))
                payloads.append(payload)
            elif isinstance(instruction, FetchTensor) and instruction.place is not None:
                instruction = self._pack_read(instruction, instruction.place.nbytes)
            packed.append(instruction)
        return packed, payloads

    def _pack_upload(self, created: CreateTensor, upload: Upload) -> tuple[CreateTensor, Payload]:
        nbytes = created.byte_range.nbytes
        reserved = self._pool.reserve(created.id, nbytes) if self._copy is not None and nbytes >= SHARE_BYTES else None
        if reserved is None or self._copy is None:
            return created, [as_buffer(upload)]
        byte_range, data = reserved
        if isinstance(upload, UploadWriter):
            upload.write(data)
        else:
            self._copy(data, upload)
        return msgspec.structs.replace(created, byte_range=byte_range), []

    def _pack_read(self, fetch: FetchTensor, nbytes: int) -> FetchTensor:
        shares = self._copy is not None and nbytes >= SHARE_BYTES
        reserved = self._pool.reserve(fetch.request, nbytes) if shares else None
        return msgspec.structs.replace(fetch, place=reserved[0] if reserved is not None else None)

    def unpack(self, answer: Answer, payloads: Sequence[Payload]) -> Received:
        """An answer with its bytes. Where they are not in the memory that was given for them, it becomes a rejection of
        that request only."""
        if isinstance(answer, Uploaded | MoreRoomNeeded):
            self._pool.release(answer.request)
        elif isinstance(answer, Failed | Lost | Rejected):
            self._pool.discard(answer.request)
        if not isinstance(answer, TensorRead):
            return Received(answer)
        shared = [byte_range for byte_range in answer.byte_ranges if byte_range.name]
        try:
            taken = iter(self._pool.parts(answer.request, shared))
        except ProtocolError as error:
            return Received(Rejected(answer.request, str(error)))
        buffers = [
            next(taken) if byte_range.name else _joined(payload)
            for byte_range, payload in zip(answer.byte_ranges, payloads, strict=True)
        ]
        return Received(answer, buffers, bool(shared))


def _joined(payload: Payload) -> Buffer:
    return bytearray(join(payload)) if payload else b""
