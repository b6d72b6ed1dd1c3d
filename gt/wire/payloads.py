"""The bytes of tensors on their way between a client and workers: in shared memory where it pays, else in messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from gt.core.errors import ProtocolError
from gt.core.messages import Answer, CreateTensor, Fetched, Instruction, Rejected, Segment
from gt.wire import shared_memory
from gt.wire.channel import Buffer
from gt.wire.codec import Frame, Payload, join

Fill: TypeAlias = Callable[[memoryview, Buffer], None]
"""Copies bytes into a segment, as fast as the client can."""


def pack(
    batch: Sequence[Instruction], buffers: Sequence[Buffer], fill: Fill | None, token: str = ""
) -> tuple[list[Instruction], list[Payload]]:
    """Instructions and payloads as they are sent. Without `fill` no memory is shared with the workers. `token` is that
    of the session."""
    remaining = iter(buffers)
    packed: list[Instruction] = []
    payloads: list[Payload] = []
    for instruction in batch:
        if isinstance(instruction, CreateTensor):
            instruction, payload = _pack_one(instruction, next(remaining), fill, token)
            payloads.append(payload)
        packed.append(instruction)
    return packed, payloads


def _pack_one(created: CreateTensor, buffer: Buffer, fill: Fill | None, token: str) -> tuple[CreateTensor, Payload]:
    nbytes = created.segment.nbytes
    if fill is None or nbytes < shared_memory.SHARE_BYTES:
        return created, [buffer]
    try:
        name, segment = shared_memory.create(nbytes, token=token)
    except OSError:  # there is too little shared memory
        return created, [buffer]
    fill(segment, buffer)
    return msgspec.structs.replace(created, segment=Segment(name, nbytes)), []


def unpack(answer: Answer, payload: Sequence[Frame] | None) -> tuple[Answer, Buffer | None]:
    """An answer as its client sees it. Bytes that are gone, with the worker that sent them, are the failure of one
    request, and not of those that are answered with it."""
    if not isinstance(answer, Fetched):
        return answer, None
    segment = answer.segment
    if not segment.name:
        return answer, bytearray(join(payload or ())) if segment.nbytes else b""
    try:
        return answer, shared_memory.take(segment.name, segment.nbytes)
    except ProtocolError as error:
        return Rejected(answer.request, str(error)), None
