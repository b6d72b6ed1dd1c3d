"""Shared buffers of one session, which are used again, since most of the cost of a fresh one is faulting in its pages.

The client makes them: it fills them for uploads, and workers fill them for reads. So all bytes of a session are in
memory of that session, and one process removes them. A worker maps a buffer once (`AttachedBuffers`).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gt.core.errors import ProtocolError
from gt.core.ids import short_id
from gt.core.messages import ByteRange
from gt.wire import shared_memory

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
    """`session_secret` seals the names. A buffer is in use under the id of its upload or read until `release`, or
    until the bytes that `parts` gave are garbage."""

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
