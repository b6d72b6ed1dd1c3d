"""Reads a dispatcher for a dashboard, from another thread, while the dispatcher goes on."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import islice
from typing import TypeAlias

import msgspec

from gt.core.ids import session_of
from gt.core.program_status import ProgramStatus, WorkerState
from gt.core.program_view import (
    FailuresState,
    HeldPart,
    LineMemory,
    LostWorker,
    MemoryState,
    PairTraffic,
    TensorState,
)
from gt.core.worker_progress import COUNTERS, LENGTH
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.recent_batches import RecentBatches
from gt.dispatcher.status import read_status, read_unlocked, read_workers
from gt.dispatcher.tensor_records import TensorRecord
from gt.sharding.spec import ShardingSpec, local_box

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
