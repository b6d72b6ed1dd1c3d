"""The bytes of tensors between a client and workers: large ones in shared memory, the others in messages."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from gt.core.errors import ProtocolError
from gt.core.ids import short_id
from gt.core.messages import (
    Answer,
    ByteRange,
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
from gt.core.tables import print_bytes
from gt.wire import shared_memory
from gt.wire.client_channel import Received, Upload, UploadWriter, as_buffer
from gt.wire.codec import Buffer, Payload, join
from gt.wire.shared_memory import SHARE_BYTES

# The client makes them: it fills them for uploads, and workers fill them for reads. So all bytes of a session are in
# memory of that session, and one process removes them. A worker maps a buffer once (`AttachedBuffers`).


log = logging.getLogger("gt.wire")

MAX_KEPT = 1 << 29  # bytes that a session keeps; larger buffers are removed after their use
_ALIGNMENT = 1 << 16


@dataclass(eq=False)
class _KeptBuffer:
    name: str
    data: memoryview

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(shared_memory.path_of(self.name))


@dataclass
class SharedBufferPool:
    """Shared buffers of a session, whose names `session_secret` seals. A buffer is in use under the id of its upload or
    read until `release`, or until the bytes that `parts` gave are garbage."""

    session_secret: str = ""
    _free: list[_KeptBuffer] = field(default_factory=list)  # the least recently used first
    _used: dict[int, _KeptBuffer] = field(default_factory=dict)
    _returned: deque[int] = field(default_factory=deque)  # finalizers of `parts` may run at any point: they only append
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _has_warned: bool = False

    def reserve(self, ident: int, nbytes: int) -> tuple[ByteRange, memoryview] | None:
        """A buffer for an upload or read; None if there is too little shared memory."""
        with self._lock:
            while self._returned:
                self.release(self._returned.popleft())
            buffer = self._take_free(nbytes) or self._create(nbytes)
            if buffer is None:
                return None
            self._used[ident] = buffer
            return ByteRange(buffer.name, nbytes), buffer.data[:nbytes]

    def _take_free(self, nbytes: int) -> _KeptBuffer | None:
        """The smallest free buffer that fits. One much larger is left for larger tensors."""
        fitting = [buffer for buffer in self._free if nbytes <= buffer.nbytes <= 4 * nbytes + _ALIGNMENT]
        if not fitting:
            return None
        found = min(fitting, key=lambda buffer: buffer.nbytes)
        self._free.remove(found)
        return found

    def _create(self, nbytes: int) -> _KeptBuffer | None:
        size = _rounded(nbytes)
        while self._free and self._kept() + size > MAX_KEPT:
            self._free.pop(0).remove()
        try:
            return _KeptBuffer(*shared_memory.create(size, session_secret=self.session_secret))
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("%d bytes go with messages, not through shared memory: %s", nbytes, error)
            return None

    def _kept(self) -> int:
        return sum(buffer.nbytes for buffer in (*self._free, *self._used.values()))

    def release(self, ident: int) -> None:
        """The buffer of an upload or read is no longer used. Does nothing for ids without one."""
        with self._lock:
            buffer = self._used.pop(ident, None)
            if buffer is None:
                return
            if self._kept() + buffer.nbytes > MAX_KEPT:
                buffer.remove()
            else:
                self._free.append(buffer)

    def discard(self, ident: int) -> None:
        """Remove the buffer of a read that failed: some worker may still write to it."""
        with self._lock:
            buffer = self._used.pop(ident, None)
            if buffer is not None:
                buffer.remove()

    def parts(self, ident: int, byte_ranges: Sequence[ByteRange]) -> list[memoryview]:
        """The parts of a read that are in its buffer, each of which keeps the buffer in use. Raises ProtocolError for
        parts that are not in it."""
        if not byte_ranges:
            self.release(ident)
            return []
        used = self._used.get(ident)
        if used is None or any(
            part.name != used.name or part.offset + part.nbytes > used.nbytes for part in byte_ranges
        ):
            raise ProtocolError(f"shared buffer {byte_ranges[0].name} was not given for request {short_id(ident)}")
        data = used.data
        # slices of a memoryview refer to the owner of its bytes, which is garbage when all slices are
        owner = (ctypes.c_byte * data.nbytes).from_buffer(data)
        weakref.finalize(owner, self._returned.append, ident).atexit = False
        view = memoryview(owner).cast("B")
        return [view[part.offset : part.offset + part.nbytes] for part in byte_ranges]

    def close(self) -> None:
        with self._lock:
            for buffer in (*self._free, *self._used.values()):
                buffer.remove()
            self._free.clear()
            self._used.clear()


def _rounded(nbytes: int) -> int:
    """A size that fits many tensors: at most a quarter larger."""
    step = max(_ALIGNMENT, 1 << max(nbytes.bit_length() - 3, 0))
    return -(-nbytes // step) * step


def require_memory(nbytes: int) -> None:
    """Raise MemoryError if the system does not give this process so many bytes: ZeroMQ and native code close
    connections, or end the process, where they find none."""
    try:
        mmap.mmap(-1, nbytes).close()
    except OSError as error:
        raise MemoryError(f"the system does not give {print_bytes(nbytes)} of memory ({error.strerror})") from None


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
