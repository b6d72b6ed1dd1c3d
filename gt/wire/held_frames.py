"""The bytes of large uploads, which stay at the dispatcher until the worker has memory for them.

ZeroMQ takes memory for a frame as soon as the frame arrives, and closes the connection if there is none. So the worker
makes the memory of an upload first, and asks for the frames then, a few at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gt.core.errors import ProtocolError
from gt.wire.codec import CHUNK, Frame
from gt.wire.payloads import require_memory
from gt.wire.sockets import SentFrame

_MARK = b""  # the first frame of a message that has held frames, and no header
_NUMBER_BYTES = 8  # its second frame: the number of the first one after it
_ASKED = 4  # frames that are asked for together
_ON_THE_WAY = 4 * _ASKED  # frames that are asked for and have not arrived, at most
_COPIES = 3  # of a frame that is received: ZeroMQ's own, that which is decrypted, and Python's


class HeldFrames:
    """Frames for one worker, at the dispatcher. The frames of a connection are numbered from 0."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._frames: deque[SentFrame] = deque()
        self._first = 0  # the number of the first frame that is still held

    def add(self, frames: Sequence[SentFrame]) -> None:
        self._frames.extend(frames)
        self.nbytes += sum(map(len, frames))

    def take(self, start: int, stop: int) -> list[SentFrame]:
        """The message with the frames from one number to another; empty if these are none. Earlier frames are dropped.
        Raises ProtocolError for frames that are not held."""
        end = self._first + len(self._frames)
        if not self._first <= start <= stop <= end:
            raise ProtocolError(f"frames {start} to {stop} are asked for, and {self._first} to {end} are held")
        taken = [self._frames.popleft() for _ in range(stop - self._first)]
        self.nbytes -= sum(map(len, taken))
        first, self._first = self._first, stop
        return [_MARK, start.to_bytes(_NUMBER_BYTES, "big"), *taken[start - first :]] if start < stop else []


class HeldBytes(NamedTuple):
    """The bytes of an upload, in frames that the dispatcher holds for `reader`, from number `start` on."""

    reader: HeldFramesReader
    start: int
    nbytes: int

    def read(self) -> memoryview:
        """Raises MemoryError if the worker has no memory for the bytes."""
        return self.reader.read(self.start, self.nbytes)


class HeldFramesReader:
    """The worker's end of a connection with held frames. `allocate` gives memory of a size, or raises MemoryError.
    `ask` asks for the frames from one number to another, and drops those before them; `wait` receives messages, and
    passes them to `note`."""

    def __init__(
        self, allocate: Callable[[int], memoryview], ask: Callable[[int, int], None], wait: Callable[[], None]
    ) -> None:
        self._allocate = allocate
        self._ask = ask
        self._wait = wait
        self._arrived: deque[tuple[int, Frame]] = deque()
        self._announced = 0  # frames of all messages so far
        self._asked = 0  # the number after the last frame that was asked for, or dropped

    def note(self, frames: Sequence[Frame]) -> bool:
        """Keep the frames of a message if they are held ones."""
        if len(frames) < 3 or frames[0] != _MARK:
            return False
        self._arrived.extend(enumerate(frames[2:], int.from_bytes(frames[1], "big")))
        return True

    def announce(self, nbytes: int) -> HeldBytes:
        """The next upload, whose bytes are held."""
        start = self._announced
        self._announced += _frame_count(nbytes)
        return HeldBytes(self, start, nbytes)

    def drop_rest(self) -> None:
        """Let the dispatcher drop what was announced and not read: there was no memory for it."""
        if self._asked < self._announced:
            self._ask(self._announced, self._announced)
            self._asked = self._announced

    def read(self, start: int, nbytes: int) -> memoryview:
        """The bytes in frames from number `start` on."""
        target = self._allocate(nbytes)
        require_memory(_COPIES * min(nbytes, _ON_THE_WAY * CHUNK))
        stop, position, self._asked = start + _frame_count(nbytes), 0, start
        for number in range(start, stop):
            while self._asked < stop and self._asked - number <= _ON_THE_WAY - _ASKED:
                end = min(self._asked + _ASKED, stop)
                self._ask(self._asked, end)
                self._asked = end
            frame = self._next(number)
            target[position : position + len(frame)] = frame
            position += len(frame)
        return target

    def _next(self, number: int) -> Frame:
        """The frame with a number. Those before it are of an upload that was interrupted."""
        while True:
            while not self._arrived:
                self._wait()
            found, frame = self._arrived.popleft()
            if found == number:
                return frame


def _frame_count(nbytes: int) -> int:
    return -(-nbytes // CHUNK)
