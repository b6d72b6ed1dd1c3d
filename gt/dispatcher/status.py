"""The status of a dispatcher's workers and sessions, read by another thread while the dispatcher goes on."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from gt.core import worker_progress
from gt.core.ids import session_of
from gt.core.program_status import ProgramStatus, SessionState, WorkerState
from gt.core.worker_progress import EXCHANGING, STATE_NAMES, is_member
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.worker_records import WorkerRecord
from gt.wire.process_identity import is_stopped, this_host

STOPPED = "stopped"
STOPPED_NANOSECONDS = 500_000_000  # in one state, after which it is found out whether a worker was stopped
_ATTEMPTS = 5  # the dispatcher's thread may change a table while it is read


_Read = TypeVar("_Read")


def read_status(dispatcher: Dispatcher, progress: Mapping[int, Sequence[int]]) -> ProgramStatus:
    """`progress` has the memory in which each worker shows what it does; those of other machines report it."""

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
