"""Records the memory that the tensors of a session take, for sessions that ask for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

from gt.core.ids import is_dispatcher_id, session_of
from gt.core.message_fields import id_fields
from gt.core.messages import Command, MemoryUse
from gt.worker.engines.engine import Engine, Value
from gt.worker.failed_value import FailedValue

HeldTensors: TypeAlias = Mapping[int, Value | FailedValue]


class MemoryPurpose(NamedTuple):
    """The site that memory was taken for, 0 if that was before the recording; and whether the memory holds a copy."""

    site: int
    is_copy: bool


class _StorageMemory:
    """Memory of one storage, which several tensors may share."""

    __slots__ = ("nbytes", "tensors", "use")

    def __init__(self, nbytes: int, use: MemoryPurpose) -> None:
        self.nbytes = nbytes
        self.tensors = 0
        self.use = use


class MemoryRecording:
    """The memory of one session. `live` are the bytes of each use now, `_at_peak` those at the peak, which is None
    while `live` is the peak, so that `live` is copied only when memory is freed after a peak."""

    def __init__(self) -> None:
        self.live: dict[MemoryPurpose, int] = {}
        self.most_copies = 0
        self._total = self._copies = self._peak = 0
        self._at_peak: dict[MemoryPurpose, int] | None = None
        self._held: dict[int, _StorageMemory] = {}
        self._address_of: dict[int, int] = {}

    def add(self, ident: int, storage: tuple[int, int], use: MemoryPurpose) -> None:
        address, nbytes = storage
        held = self._held.get(address)
        if held is None:
            held = self._held[address] = _StorageMemory(0, use)
        held.tensors += 1
        self._address_of[ident] = address
        self._count(held, nbytes)

    def discard(self, ident: int) -> None:
        address = self._address_of.pop(ident, None)
        if address is None:
            return
        held = self._held[address]
        held.tensors -= 1
        if not held.tensors:
            self._count(held, 0)
            del self._held[address]

    def holds(self, ident: int, address: int) -> bool:
        return self._address_of.get(ident) == address

    def _count(self, held: _StorageMemory, nbytes: int) -> None:
        """Set the size of a storage, and update the totals and the peak."""
        change = nbytes - held.nbytes
        if change < 0 and self._at_peak is None:
            self._at_peak = dict(self.live)
        held.nbytes = nbytes
        self.live[held.use] = self.live.get(held.use, 0) + change
        self._total += change
        if held.use.is_copy:
            self._copies += change
            self.most_copies = max(self.most_copies, self._copies)
        if self._total > self._peak:
            self._peak, self._at_peak = self._total, None

    def uses(self) -> tuple[MemoryUse, ...]:
        peak = self.live if self._at_peak is None else self._at_peak
        uses = [use for use in {**self.live, **peak} if self.live.get(use) or peak.get(use)]
        return tuple(MemoryUse(*use, self.live.get(use, 0), peak.get(use, 0)) for use in uses)


class MemoryRecorder:
    """Records the memory of sessions that ask for it. `is_on` says whether any does; a worker reads it once per batch,
    so that recording costs nothing while it is off."""

    def __init__(self, engine: Engine, tensors: HeldTensors) -> None:
        self.is_on = False
        self._engine = engine
        self._tensors = tensors
        self._recordings: dict[int, MemoryRecording] = {}

    def take(self, session: int, *, goes_on: bool) -> tuple[tuple[MemoryUse, ...], int]:
        """End the recording of a session: returns the memory of each use, and the most bytes of copies. With `goes_on`
        a new recording begins."""
        recording = self._recordings.pop(session, None)
        if goes_on:
            self._recordings[session] = self._begin(session)
        self.is_on = bool(self._recordings)
        return ((), 0) if recording is None else (recording.uses(), recording.most_copies)

    def forget(self, session: int) -> None:
        self._recordings.pop(session, None)
        self.is_on = bool(self._recordings)

    def _begin(self, session: int) -> MemoryRecording:
        recording = MemoryRecording()
        for ident in [ident for ident in self._tensors if session_of(ident) == session]:
            self._update(recording, ident, 0)
        return recording

    def note(self, command: Command) -> None:
        """Follow the tensors that a command has made or freed."""
        site = getattr(command, "site", 0)
        for ident in self._ids_of(command):
            recording = self._recordings.get(session_of(ident))
            if recording is not None:
                self._update(recording, ident, site)

    def _ids_of(self, command: Command) -> Iterator[int]:
        """The tensors of a command, those of new tensors first: they are made before others are freed."""
        fields = id_fields(type(command))
        yield from fields.new(command)
        if fields.first_result is not None:
            result = getattr(command, fields.first_result)
            while result in self._tensors:
                yield result
                result += 1
        yield from fields.tensors(command)

    def _update(self, recording: MemoryRecording, ident: int, site: int) -> None:
        value = self._tensors.get(ident)
        if value is None or isinstance(value, FailedValue):
            recording.discard(ident)
            return
        storage = self._engine.storage(value)
        if recording.holds(ident, storage[0]):
            return
        recording.discard(ident)  # a reduced gradient replaces the partial one under the same id
        recording.add(ident, storage, MemoryPurpose(site, is_dispatcher_id(ident)))
