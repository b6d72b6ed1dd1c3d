"""Refuses ops whose results would not fit into the memory of a worker, before the memory is taken.

The sizes of results are known before an op runs, those of temporary memory inside of it are not. Reading how much
memory is left takes longer than most ops, so half of what was left at the last look may be given away without another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gt.core.errors import LimitError
from gt.core.ids import session_of
from gt.core.tables import print_bytes
from gt.worker.engines.engine import Engine, Value
from gt.worker.failed_value import FailedValue

LARGE_BYTES = 1 << 16  # results of this size are reserved one by one; smaller ones are seen when memory is sampled
TINY_BYTES = 1 << 10  # results of this size are never refused
SPARE_BYTES = 1 << 28  # left to the machine, at most: for temporary memory, small tensors and other processes
SPARE_SHARE = 0.05  # largest share of the memory that is left to the machine
GIVEN_SHARE = 0.5  # share of the free memory that may be reserved before it is measured again
_NO_MEMORY = "can't allocate memory"  # part of torch's error text for the CPU


class MemoryGuard:
    """Counts the bytes that ops reserve. `limit` are the bytes of tensors that the worker may hold: those that its user
    gave, or all memory of the device (0: not known). `is_full`: there was no memory left when it was last sampled."""

    def __init__(self, worker: int, engine: Engine, tensors: Mapping[int, Value | FailedValue], limit: int = 0) -> None:
        self.limit = limit or engine.memory()
        self.is_full = False
        self._is_given = bool(limit)
        self._worker = worker
        self._engine = engine
        self._tensors = tensors
        self._spare = 0 if limit else min(SPARE_BYTES, int(SPARE_SHARE * self.limit))
        self._budget = 0

    def reserve(self, nbytes: int) -> None:
        """Raises LimitError if there is no room for new tensors of `nbytes`. Hot path."""
        self._budget -= nbytes
        if self._budget < 0:
            self._look(nbytes)

    def reserve_large(self, nbytes: int) -> None:
        """As `reserve`, but does nothing for small tensors, which are only sampled."""
        if nbytes >= LARGE_BYTES:
            self.reserve(nbytes)

    def sample(self, held: int) -> None:
        """Note whether there is memory left, for ops with small results. `held` are the bytes of all tensors, where
        shared memory may count twice."""
        room = self._free() if self.limit and held > self.limit - self._spare - held // 8 else 1
        available = self._engine.available_memory() if not self._is_given else None
        self.is_full = room <= 0 or (available is not None and available < self._spare // 2)

    def reserving(self, nbytes: int, function: Callable[..., object]) -> Callable[..., object]:
        """A function that reserves `nbytes` before each call; the function itself if these are few."""
        if nbytes < LARGE_BYTES:
            return function
        reserve = self.reserve

        def call(*given: object) -> object:
            reserve(nbytes)
            return function(*given)

        return call

    def explained(self, error: Exception) -> Exception:
        """The error of an op; that of an allocator without memory says who holds it."""
        is_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        if not is_memory and not (isinstance(error, RuntimeError) and _NO_MEMORY in str(error)):
            return error
        found = LimitError(f"{error}\n{self._describe()}")
        found.__cause__ = error
        return found

    def _look(self, nbytes: int) -> None:
        room = self._free()
        if nbytes > room:
            self._budget = 0
            raise LimitError(
                f"worker {self._worker} has no room for {print_bytes(nbytes)} more: {print_bytes(max(room, 0))} are "
                f"left. {self._describe()}. Nothing was allocated; free tensors that are not needed, use more workers, "
                f"or give the worker more memory (python -m gt.worker --memory)"
            )
        self._budget = max(int(GIVEN_SHARE * room) - nbytes, 0)

    def _free(self) -> int:
        """The bytes that may be reserved now."""
        held = sum(self.held_by_session().values())
        room = self.limit - held if self.limit else 1 << 62
        available = self._engine.available_memory()
        return room if available is None else min(room, available - self._spare)

    def held_by_session(self) -> dict[int, int]:
        """The bytes of tensors by session, the largest first; memory that tensors share counts once."""
        seen: set[int] = set()
        held: dict[int, int] = {}
        for ident, value in self._tensors.items():
            if isinstance(value, FailedValue):
                continue
            address, nbytes = self._engine.storage(value)
            if address not in seen:
                seen.add(address)
                held[session_of(ident)] = held.get(session_of(ident), 0) + nbytes
        return dict(sorted(held.items(), key=lambda item: -item[1]))

    def _describe(self) -> str:
        """The memory of the worker, and who holds it."""
        held = self.held_by_session()
        holders = ", ".join(f"session {session} {print_bytes(nbytes)}" for session, nbytes in held.items())
        memory = print_bytes(self.limit) if self.limit else "unknown"
        return f"Of its memory of {memory} ({self._engine.device}), tensors hold {holders or 'nothing'}"
