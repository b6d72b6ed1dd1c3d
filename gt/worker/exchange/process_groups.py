"""Exchanges over a process group of torch.distributed.

A step in which all members give and take boxes of one shape is a collective of the group: an all-gather or an
all-to-all that moves bytes, which each member then combines, or a sum of the dtypes in NATIVE_SUMS. Other steps are
sends and receives. Tasks of one kind share their messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import torch

from gt.worker.exchange.collective_works import (
    AllToAllWork,
    GatherWork,
    PointToPointWork,
    SlicedReduceWork,
    SumWork,
    collecting,
    taken_layout,
)
from gt.worker.exchange.deferred_failure_flags import DeferredFailureFlags, FlagSource
from gt.worker.exchange.failure_store import FailureStore
from gt.worker.exchange.group_backends import GroupBackend
from gt.worker.exchange.group_messages import Entry, GroupMessages, ReceivedMessage
from gt.worker.exchange.in_flight_sends import InFlightSends
from gt.worker.exchange.interface import MoveResult, MoveTask
from gt.worker.exchange.local_steps import LocalStep
from gt.worker.exchange.watched_waits import WatchedWaits
from gt.worker.failed_value import FailedValue

NATIVE_SUMS = ("float32", "float64", "int32", "int64")
"""The dtypes that Gloo and NCCL sum as GT does. Short floats need a wider dtype, NaN must pass a maximum, and boolean
reductions have their own rules, so all other reductions are computed by the members."""

_CHECK_SECONDS = timedelta(seconds=0.05)  # between two looks at the members that a collective waits for


class ProcessGroup:
    """Exchanges among `members`, whose ranks follow their order. `number` counts the exchanges, so that members agree
    on the names of failures; `ways` counts them by way. `check` raises if one of some members is lost. After an error
    of a collective no exchange follows: members would no longer count alike."""

    def __init__(
        self,
        worker: int,
        members: tuple[int, ...],
        backend: GroupBackend,
        sends: InFlightSends,
        failures: FailureStore,
        ways: Counter[str],
        check: Callable[[tuple[int, ...]], None],
        flags: DeferredFailureFlags | None = None,
        waits: WatchedWaits | None = None,
    ) -> None:
        self.worker = worker
        self.members = members
        self.backend = backend
        self.sends = sends
        self.number = 0
        self.prefetched: dict[int, ReceivedMessage] = {}
        self._ways = ways
        self._failures = failures
        self._flags = flags
        self._check = check
        self._waits = waits or WatchedWaits()
        self._error: Exception | None = None

    def begin(self, tasks: Sequence[MoveTask]) -> GroupWork:
        if self._error is not None:
            raise RuntimeError(f"workers {self.members} exchange nothing any more: {self._error}")
        self.number += 1
        try:
            return GroupWork(self, tasks)
        except Exception as error:
            self._end(error)  # the other members have begun, and would wait for this one
            raise

    def agree(self, *, has_memory: bool) -> bool:
        """Whether all members have the memory for an exchange. Needs none itself."""
        lacking = self.backend.spare.lacking.fill_(int(not has_memory))
        self.wait(self.backend.all_reduce(lacking))
        return not lacking.item()

    def wait(self, work: Any) -> None:
        """Wait for a collective. Raises where a member is lost, and then ends the group, so that members which wait for
        this one get an error too."""
        try:
            while not self._is_done(work):
                self._check(self.members)
        except Exception as error:
            self._end(error)
            raise

    def _end(self, error: Exception) -> None:
        self._error = error
        self.backend.abort()

    def _is_done(self, work: Any) -> bool:
        try:
            work.wait(_CHECK_SECONDS)
        except RuntimeError:
            if work.is_completed():
                work.wait(_CHECK_SECONDS)  # raises again, unless it was completed meanwhile
                return True
            return False
        return True

    def wait_for_message(self, work: Any, peer: int, timeout: timedelta) -> None:
        """Wait for a send or a receive, which cannot be asked whether it is done. Raises where the peer is lost."""
        lost = RuntimeError(f"worker {peer} is lost")
        self._waits.call(lambda: work.wait(timeout), lambda: self._check((peer,)), lambda: self._end(lost))

    def send(self, pieces: Sequence[torch.Tensor], peer: int) -> Any:
        rank = self.members.index(peer)
        return self._watched([self.backend.send(piece, rank) for piece in pieces], peer)

    def _watched(self, works: Sequence[Any], peer: int) -> Any:
        return MessageWork(self, works, peer) if self.backend.blocks else works[-1]

    def prefetch(self, step: LocalStep) -> bool:
        """Begin to receive the boxes of a later exchange, if it goes by sends and receives. Returns whether it does."""
        if work_of(step) is not PointToPointWork or step.nbytes >= PointToPointWork.agreed_bytes:
            return False
        for peer in step.peers:
            with collecting([]):  # a peer that has ended, or no memory, is noticed when its box is needed
                nbytes = taken_layout([step], peer).nbytes
                self.prefetched[peer] = self.receive(peer, nbytes, self.buffer(nbytes))
        return True

    def receive(self, peer: int, nbytes: int, buffer: torch.Tensor | Exception) -> ReceivedMessage:
        """Begin to receive a message. Without memory for it, its bytes are dropped, since the peer sends them."""
        rank = self.members.index(peer)
        works = [self.backend.receive(piece, rank) for piece in self.backend.spare.received(buffer, nbytes)]
        return ReceivedMessage(self._watched(works, peer), buffer)

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.backend.device)

    def doubt(self) -> torch.Tensor | None:
        """A scalar on the device, not 0 if this worker's values may be wrong; None if no flags are deferred."""
        return self._flags.doubt if self._flags is not None else None

    def is_set(self, flags: Sequence[torch.Tensor], number: int, task: int) -> bool:
        """Whether a flag of a task is set. Flags that are on a device are kept, and read later."""
        if self._flags is None:
            return any(bool(flag) for flag in flags)
        for flag in flags:
            self._flags.add(flag, FlagSource(self.members, number, task))
        return False

    def write_failure(self, number: int, task: int, failed: FailedValue) -> None:
        self._failures.write(self.members, number, task, failed)

    def read_failure(self, number: int, task: int) -> FailedValue:
        return self._failures.read(self.members, number, task)

    def way_of(self, step: LocalStep) -> str:
        return f"{self.backend.name} {work_of(step).way}"

    def count(self, entries: Sequence[Entry]) -> None:
        self._ways[self.way_of(entries[0].task.step)] += 1

    def close(self) -> None:
        self.backend.abort()


class MessageWork(NamedTuple):
    """The sends of the pieces of a message to a peer, or the receives of those from one."""

    group: ProcessGroup
    works: Sequence[Any]
    peer: int

    def wait(self, timeout: timedelta) -> None:
        for work in self.works:
            self.group.wait_for_message(work, self.peer, timeout)


class GroupWork:
    """One exchange: the collectives of its tasks, launched in one order on all members. Before a large one the members
    agree that all have the memory for it; if one has not, nothing is launched, and all fail."""

    def __init__(self, group: ProcessGroup, tasks: Sequence[MoveTask]) -> None:
        self._results: list[MoveResult] = [None] * len(tasks)
        self._works: list[tuple[list[Entry], _Work]] = []
        entries: dict[_WorkType, list[Entry]] = {}
        for position, task in enumerate(tasks):
            entries.setdefault(work_of(task.step), []).append(Entry(position, task))
        if not group.backend.blocks or not any(_is_large(work, chosen) for work, chosen in entries.items()):
            self._reserve(group, entries)
        elif not self._reserve_agreed(group, tasks, entries):
            return
        for chosen, work in self._works:
            work.launch()
            group.count(chosen)

    def _reserve(self, group: ProcessGroup, entries: Mapping[_WorkType, list[Entry]]) -> None:
        self._works = [(entries[work], work(group, entries[work])) for work in _IN_ORDER if work in entries]

    def _reserve_agreed(
        self, group: ProcessGroup, tasks: Sequence[MoveTask], entries: Mapping[_WorkType, list[Entry]]
    ) -> bool:
        """Take the memory for all works. Returns whether all members have; if not, the results are failures."""
        lacks: Exception | None = None
        try:
            self._reserve(group, entries)
            lacks = next((work.lacks for _, work in self._works if work.lacks is not None), None)
        except Exception as error:
            lacks = error
        if lacks is not None:
            messages = GroupMessages(group, [Entry(position, task) for position, task in enumerate(tasks)])
            for place in range(len(tasks)):
                messages.fail(place, lacks)
            tasks = [task for _, task in messages.entries]
        if group.agree(has_memory=lacks is None):
            return True
        self._works = []
        for position, task in enumerate(tasks):
            if task.step.after is not None:
                has_failed = isinstance(task.value, FailedValue)
                self._results[position] = task.value if has_failed else group.read_failure(group.number, position)
        return False

    def finish(self) -> list[MoveResult]:
        for entries, work in self._works:
            for entry, result in zip(entries, work.finish(), strict=True):
                self._results[entry.position] = result
        return self._results


_Work: TypeAlias = SumWork | SlicedReduceWork | GatherWork | AllToAllWork | PointToPointWork
_WorkType: TypeAlias = (
    type[SumWork] | type[SlicedReduceWork] | type[GatherWork] | type[AllToAllWork] | type[PointToPointWork]
)
_IN_ORDER: tuple[_WorkType, ...] = (SumWork, SlicedReduceWork, GatherWork, AllToAllWork, PointToPointWork)


def _is_large(work: _WorkType, entries: Sequence[Entry]) -> bool:
    return sum([entry.task.step.nbytes for entry in entries]) >= work.agreed_bytes


def work_of(step: LocalStep) -> _WorkType:
    """The work that does a step. All members choose the same."""
    if step.kind == "all-reduce":
        return SumWork if step.reduction == "sum" and step.dtype in NATIVE_SUMS else SlicedReduceWork
    if not step.is_even:
        return PointToPointWork
    return GatherWork if step.kind == "all-gather" else AllToAllWork
