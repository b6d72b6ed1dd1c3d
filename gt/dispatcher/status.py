"""The status of a dispatcher for tools: read by another thread while the dispatcher goes on."""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import islice
from typing import TypeAlias, TypeVar

import msgspec

from gt.core import worker_progress
from gt.core.ids import session_of
from gt.core.program_view import (
    FailuresState,
    HeldPart,
    LineMemory,
    LostWorker,
    MemoryState,
    PairTraffic,
    ProgramStatus,
    SessionState,
    TensorState,
    WorkerState,
)
from gt.core.worker_progress import COUNTERS, EXCHANGING, LENGTH, STATE_NAMES, is_member
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.recent_batches import RecentBatches
from gt.dispatcher.state_records import WorkerRecord
from gt.dispatcher.tensor_records import TensorRecord
from gt.sharding.spec import ShardingSpec, local_box
from gt.wire.process_identity import is_stopped, this_host

STOPPED = "stopped"
STOPPED_NANOSECONDS = 500_000_000  # a worker is checked for being stopped after this long in one state
_ATTEMPTS = 5  # the dispatcher's thread may change a table while it is read


_Read = TypeVar("_Read")


def read_status(dispatcher: Dispatcher, progress: Mapping[int, Sequence[int]]) -> ProgramStatus:
    """The status of the program. `progress` has each worker's progress: shared memory, or reports of other machines."""

    def read() -> ProgramStatus:
        workers = _workers(dispatcher, progress)
        return ProgramStatus(time.monotonic_ns(), os.getpid(), workers, tuple(_sessions(dispatcher)))

    return read_unlocked(read)


def read_workers(dispatcher: Dispatcher, progress: Mapping[int, Sequence[int]]) -> tuple[WorkerState, ...]:
    """The workers only, which is cheap: the time does not depend on the number of tensors."""
    return read_unlocked(lambda: _workers(dispatcher, progress))


def read_unlocked(read: Callable[[], _Read]) -> _Read:
    """Read tables that the dispatcher's thread may change meanwhile: again, if it did."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return read()
        except RuntimeError:
            time.sleep(0.001)
    return read()


def _workers(dispatcher: Dispatcher, progress: Mapping[int, Sequence[int]]) -> tuple[WorkerState, ...]:
    cells = {worker: tuple(cell[: worker_progress.COUNTERS]) for worker, cell in progress.items()}
    records = list(dispatcher.state.workers.values())
    names = {record.info.worker: _state_name(record, cells.get(record.info.worker, ())) for record in records}
    return tuple([_worker(dispatcher, record, cells, names) for record in records])


def _state_name(record: WorkerRecord, cell: Sequence[int]) -> str:
    if not record.ready:
        return "starting"
    if len(cell) < worker_progress.COUNTERS or not 0 <= cell[worker_progress.STATE] < len(STATE_NAMES):
        return "unknown"
    lasts = time.monotonic_ns() - cell[worker_progress.SINCE]
    # A worker that was stopped shows what it did before.
    is_other_process = record.info.host == this_host() and record.info.pid != os.getpid()
    if lasts > STOPPED_NANOSECONDS and is_other_process and is_stopped(record.info.pid):
        return STOPPED
    return STATE_NAMES[cell[worker_progress.STATE]]


def _worker(
    dispatcher: Dispatcher, record: WorkerRecord, cells: Mapping[int, Sequence[int]], names: Mapping[int, str]
) -> WorkerState:
    info, name = record.info, names[record.info.worker]
    cell = cells.get(info.worker, ())
    if len(cell) < worker_progress.COUNTERS or not record.ready:
        return WorkerState(info.worker, info.hostname or info.host, info.pid, info.device, record.memory, name)
    return WorkerState(
        info.worker,
        info.hostname or info.host,
        info.pid,
        info.device,
        record.memory,
        name,
        *dispatcher.find_op(cell[worker_progress.OP], cell[worker_progress.SITE]),
        _waits_for(info.worker, cells, names) if name == STATE_NAMES[EXCHANGING] else (),
        *cell[worker_progress.SINCE : worker_progress.SENT + 1],
    )


def _waits_for(worker: int, cells: Mapping[int, Sequence[int]], names: Mapping[int, str]) -> tuple[int, ...]:
    """The workers of an exchange that have not come to the op for which a worker exchanges tensors, or were stopped
    there. One whose exchange began later is done with this one."""
    own = cells[worker]
    members = [(other, cell) for other, cell in cells.items() if is_member(own, other)]
    return tuple(other for other, cell in members if names.get(other) == STOPPED or not _has_come(cell, own))


def _has_come(cell: Sequence[int], own: Sequence[int]) -> bool:
    end = worker_progress.STATE + 1
    is_later = cell[worker_progress.STATE] == EXCHANGING and cell[worker_progress.SINCE] > own[worker_progress.SINCE]
    return cell[:end] == own[:end] or is_later


def _sessions(dispatcher: Dispatcher) -> list[SessionState]:
    state = dispatcher.state
    tensors: Counter[int] = Counter()
    nbytes: Counter[int] = Counter()
    for ident, tensor in list(state.tensors.items()):
        session = session_of(ident)
        tensors[session] += 1
        nbytes[session] += tensor.nbytes * tensor.spec.mesh.size
    requests = Counter(map(session_of, list(state.pending)))
    queued = dispatcher.queued()
    return [
        SessionState(ident, each.host, each.pid, tensors[ident], nbytes[ident], queued.get(ident, 0), requests[ident])
        for ident, each in list(state.sessions.items())
    ]


EXAMINED = 512  # the largest tensors, whose lines are looked up
LARGEST = 12  # kinds of them whose layouts are shown

Progress: TypeAlias = Mapping[int, Sequence[int]]


class DispatcherView:
    """The `ProgramView` of a dispatcher. `read_progress` gives the memory in which each worker shows what it does, and
    `read_refused` the counts of what its server has refused."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        read_progress: Callable[[], Progress],
        read_refused: Callable[[], dict[str, int]] = dict,
    ) -> None:
        self._dispatcher = dispatcher
        self._read_progress = read_progress
        self._read_refused = read_refused

    def read_workers(self) -> tuple[WorkerState, ...]:
        return read_workers(self._dispatcher, self._read_progress())

    def read_status(self) -> ProgramStatus:
        status = read_status(self._dispatcher, self._read_progress())
        return msgspec.structs.replace(status, refused=self._read_refused())

    def watch_lines(self, on: bool) -> None:
        self._dispatcher.recent = RecentBatches() if on else None

    def read_memory(self) -> MemoryState:
        return read_unlocked(self._read_memory)

    def read_traffic(self) -> tuple[PairTraffic, ...]:
        return tuple(
            PairTraffic(sender, worker, nbytes)
            for worker, cell in self._read_progress().items()
            for sender, nbytes in _peers(cell)
            if sender != worker
        )

    def read_failures(self) -> FailuresState:
        log = self._dispatcher.failures
        lost = [
            LostWorker(number, dead.pid, dead.reason, dead.last_op)
            for number, dead in list(self._dispatcher.state.dead_workers.items())
        ]
        return read_unlocked(lambda: FailuresState(log.count, log.latest(), tuple(lost)))

    def _read_memory(self) -> MemoryState:
        state, recent = self._dispatcher.state, self._dispatcher.recent
        tensors = list(state.tensors.items())
        largest = nlargest(EXAMINED, tensors, key=lambda item: _nbytes(item[1]))
        lines = recent.find_lines([ident for ident, _ in largest]) if recent is not None else {}
        total = sum([_nbytes(tensor) for _, tensor in tensors])
        return MemoryState(
            total,
            len(tensors),
            sum([mesh.size * nbytes for mesh, nbytes in list(state.copy_bytes.items())]),
            _by_line(largest, lines, total, len(tensors)),
            tuple(self._describe_alike(largest, lines)),
            recent.dropped if recent is not None else 0,
        )

    def _describe_alike(
        self, largest: Sequence[tuple[int, TensorRecord]], lines: Mapping[int, str]
    ) -> Iterator[TensorState]:
        """Tensors that are alike are described once."""
        alike: dict[tuple[int, ShardingSpec, tuple[int, ...], str, str], list[int]] = {}
        for ident, (meta, spec, *_) in largest:
            key = (session_of(ident), spec, meta.shape, meta.dtype, lines.get(ident, ""))
            alike.setdefault(key, []).append(ident)
        sizes = {ident: _nbytes(tensor) for ident, tensor in largest}
        for (session, spec, shape, dtype, line), idents in islice(alike.items(), LARGEST):
            copies = sum([len(self._dispatcher.state.copies.get(ident, ())) for ident in idents])
            texts, nbytes, parts = (str(spec), str(spec.mesh)), sizes[idents[0]], held_parts(spec, shape)
            yield TensorState(session, shape, dtype, *texts, nbytes, len(idents), copies, line, parts)


def _nbytes(tensor: TensorRecord) -> int:
    return tensor.nbytes * tensor.spec.mesh.size


def _by_line(
    largest: Sequence[tuple[int, TensorRecord]], lines: Mapping[int, str], total: int, count: int
) -> tuple[LineMemory, ...]:
    nbytes: Counter[str] = Counter()
    tensors: Counter[str] = Counter()
    for ident, tensor in largest:
        if ident in lines:
            nbytes[lines[ident]] += _nbytes(tensor)
            tensors[lines[ident]] += 1
    found = [LineMemory(line, size, tensors[line]) for line, size in nbytes.most_common()]
    rest = LineMemory("", total - nbytes.total(), count - tensors.total())
    return (*found, rest) if rest.tensors > 0 else tuple(found)


def _peers(cell: Sequence[int]) -> list[tuple[int, int]]:
    pairs = [(cell[at] - 1, cell[at + 1]) for at in range(COUNTERS, min(LENGTH, len(cell)), 2)]
    return [(peer, nbytes) for peer, nbytes in pairs if peer >= 0]


@functools.lru_cache(maxsize=256)
def held_parts(spec: ShardingSpec, shape: tuple[int, ...]) -> tuple[HeldPart, ...]:
    """The part of each worker. Parts that have to be reduced are different ones, although their intervals are equal."""
    mesh = spec.mesh
    numbers: dict[object, int] = {}
    parts = []
    for worker in mesh.workers:
        box = local_box(spec, shape, worker)
        along = tuple(mesh.coordinate(worker)[mesh.axis_names.index(axis)] for axis in spec.partial)
        parts.append(HeldPart(worker, numbers.setdefault((box, along), len(numbers)), box))
    return tuple(parts)
