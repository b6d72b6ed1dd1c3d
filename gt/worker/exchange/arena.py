"""Memory of a worker that its peers on the same machine map: kept between exchanges, so that its pages exist already.

It has no name in any directory: peers open it through /proc, which lets in only processes of the same user, and the
kernel frees it when the last process that maps it has ended, however that ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from gt.wire.process_identity import is_running

KEPT_BYTES = 1 << 27  # of the arena; larger values, and those for which it has no room, get memory of their own
MAX_OUTSTANDING = 1 << 28  # bytes that peers have not read; over that a sender waits
_STEP = 1 << 20  # pages are reserved in multiples of so many bytes
_ALIGNMENT = 64


class MemoryFile:
    """A file in memory that this process shares. `number`, its inode, is unique on this machine, unlike the descriptor,
    which is used again."""

    def __init__(self, nbytes: int, reserved: int = 0) -> None:
        self.nbytes = nbytes
        self._reserved = 0
        self.descriptor = os.memfd_create("gt", os.MFD_CLOEXEC)
        try:
            self.number = os.fstat(self.descriptor).st_ino
            os.ftruncate(self.descriptor, nbytes)
            self.reserve(reserved)
            self.data = memoryview(mmap.mmap(self.descriptor, nbytes))
        except BaseException:
            os.close(self.descriptor)
            raise

    def reserve(self, nbytes: int) -> None:
        """Take pages from the system, so that a lack of memory is an error here, and not the end of the process."""
        if nbytes > self._reserved:
            more = min(-(-nbytes // _STEP) * _STEP, self.nbytes)
            os.posix_fallocate(self.descriptor, self._reserved, more - self._reserved)
            self._reserved = more

    def close(self) -> None:
        os.close(self.descriptor)  # the mapping ends with the last view of it


def map_peer_memory(pid: int, mark: str, descriptor: int, number: int, nbytes: int) -> memoryview:
    """Map memory of another process, given by its pid and start mark. Raises OSError if the process has ended, or has
    closed that memory and uses the descriptor for another file."""
    path = f"/proc/{pid}/fd/{descriptor}"
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if not is_running(pid, mark):
            raise ProcessLookupError(f"process {pid} has ended")
        if os.fstat(opened).st_ino != number:
            raise FileNotFoundError(f"process {pid} no longer shares this memory")
        return memoryview(mmap.mmap(opened, nbytes))
    finally:
        os.close(opened)


def memory_address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


class ArenaBlock(NamedTuple):
    """A part of a worker's memory that is used for one exchange."""

    memory: MemoryFile
    offset: int
    nbytes: int
    size: int
    """`nbytes`, rounded up to the alignment."""

    @property
    def data(self) -> memoryview:
        return self.memory.data[self.offset : self.offset + self.nbytes]


class _Outstanding(NamedTuple):
    block: ArenaBlock
    is_read: Callable[[], bool]
    wait: Callable[[], None]


class Arena:
    """Blocks for exchanges; a block is used again when all peers have read it. The blocks of the kept memory follow
    each other and begin again at its start."""

    def __init__(self) -> None:
        self._kept: MemoryFile | None = None
        self._outstanding: deque[_Outstanding] = deque()
        self._outstanding_bytes = 0
        self._unused: MemoryFile | None = None  # memory of the last block, if it is not the kept one and was not held
        self._bottom = self._top = 0  # where the oldest block of the kept memory begins, and where the newest ends

    def allocate(self, nbytes: int) -> ArenaBlock:
        """A block that no peer reads. Waits for peers if too many bytes are outstanding."""
        size = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        self._close_unused()
        self._release()
        while self._outstanding and self._outstanding_bytes + size > MAX_OUTSTANDING:
            self._outstanding[0].wait()
            if not self._release():
                break  # this worker itself has yet to finish that exchange
        offset = self._find_room(size)
        if offset is None:
            memory, offset = MemoryFile(size), 0
            self._unused = memory
        else:
            if self._kept is None:
                self._kept = MemoryFile(KEPT_BYTES)
            memory = self._kept
        memory.reserve(offset + size)
        return ArenaBlock(memory, offset, nbytes, size)

    def hold(self, block: ArenaBlock, is_read: Callable[[], bool], wait: Callable[[], None]) -> None:
        """Keep a block until all peers have read it. `wait` waits for peers."""
        self._unused = None
        self._outstanding.append(_Outstanding(block, is_read, wait))
        self._outstanding_bytes += block.size
        if block.memory is self._kept:
            self._top = block.offset + block.size

    def close(self) -> None:
        self._close_unused()
        for memory in {entry.block.memory for entry in self._outstanding} | {self._kept}:
            if memory is not None:
                memory.close()
        self._outstanding.clear()
        self._kept = None

    def _close_unused(self) -> None:
        """Close the memory of a block that was never held: it could not be filled, and no peer knows of it."""
        if self._unused is not None:
            self._unused.close()
            self._unused = None

    def _find_room(self, size: int) -> int | None:
        """An offset of the kept memory: after the newest block, or at the start; None if there is no room."""
        if self._top >= self._bottom:
            if self._top + size <= KEPT_BYTES:
                return self._top
            return 0 if size < self._bottom else None
        return self._top if self._top + size < self._bottom else None

    def _release(self) -> bool:
        """Forget blocks that were read, oldest first. Returns whether there were any."""
        count = len(self._outstanding)
        while self._outstanding and self._outstanding[0].is_read():
            block = self._outstanding.popleft().block
            self._outstanding_bytes -= block.size
            if block.memory is not self._kept:
                block.memory.close()
                continue
            rest = next((entry.block.offset for entry in self._outstanding if entry.block.memory is self._kept), None)
            if rest is None:  # from the start again, where the pages are in use already
                self._bottom = self._top = 0
            else:
                self._bottom = rest
        return len(self._outstanding) < count
