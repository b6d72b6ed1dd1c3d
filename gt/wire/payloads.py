"""The bytes of tensors between a client and workers: large ones in shared memory, the others in messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from gt.core.errors import ProtocolError
from gt.core.messages import Answer, CreateTensor, Fetched, Instruction, Rejected, Segment
from gt.wire import shared_memory
from gt.wire.client_channel import Buffer
from gt.wire.codec import Frame, Payload, join

CopyBytes: TypeAlias = Callable[[memoryview, Buffer], None]
"""Copies bytes into a shared segment."""


def pack(
    batch: Sequence[Instruction], buffers: Sequence[Buffer], copy: CopyBytes | None, session_secret: str = ""
) -> tuple[list[Instruction], list[Payload]]:
    """Put large buffers into shared memory, and the others into payloads. Without `copy` no memory is shared with the
    workers. `session_secret` seals the names of segments."""
    remaining = iter(buffers)
    packed: list[Instruction] = []
    payloads: list[Payload] = []
    for instruction in batch:
        if isinstance(instruction, CreateTensor):
            instruction, payload = _pack_one(instruction, next(remaining), copy, session_secret)
            payloads.append(payload)
        packed.append(instruction)
    return packed, payloads


def _pack_one(
    created: CreateTensor, buffer: Buffer, copy: CopyBytes | None, session_secret: str
) -> tuple[CreateTensor, Payload]:
    nbytes = created.segment.nbytes
    if copy is None or nbytes < shared_memory.SHARE_BYTES:
        return created, [buffer]
    try:
        name, segment = shared_memory.create(nbytes, session_secret=session_secret)
    except OSError:  # there is too little shared memory
        return created, [buffer]
    copy(segment, buffer)
    return msgspec.structs.replace(created, segment=Segment(name, nbytes)), []


def unpack(answer: Answer, payload: Sequence[Frame] | None) -> tuple[Answer, Buffer | None]:
    """An answer with its bytes. Where a segment was removed, because its worker has ended, the answer becomes a
    rejection of that request only."""
    if not isinstance(answer, Fetched):
        return answer, None
    segment = answer.segment
    if not segment.name:
        return answer, bytearray(join(payload or ())) if segment.nbytes else b""
    try:
        return answer, shared_memory.take(segment.name, segment.nbytes)
    except ProtocolError as error:
        return Rejected(answer.request, str(error)), None
