"""Exchanges between CPU workers of one machine, through memory that they share.

A member copies its part into its arena and publishes the number of the exchange; the others wait for that number and
take their boxes straight from the arena. A member does not wait until the others have read its part: the memory of an
exchange is used again when all members have finished it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from gt.core.meta import TensorMeta
from gt.worker.engines.engine import Engine, Value
from gt.worker.exchange.arena import Arena, ArenaBlock, MemoryFile
from gt.worker.exchange.failure_store import FailureStore
from gt.worker.exchange.interface import MoveResult, MoveTask
from gt.worker.exchange.local_steps import LocalStep
from gt.worker.exchange.member_status import SLOTS, GroupPeer, MemberStatus
from gt.worker.exchange.shared_memory_reductions import all_reduce, large_reductions
from gt.worker.failed_value import FailedValue

_ALIGNMENT = 64
_T = TypeVar("_T")


class SharedMemoryGroup:
    """Exchanges among `members`, which all do the same ones in the same order. `peers` are the others. After an error
    of the group itself, such as a lost member, no exchange of it follows: members would no longer count alike."""

    def __init__(
        self,
        worker: int,
        members: tuple[int, ...],
        memory: MemoryFile,
        peers: Mapping[int, GroupPeer],
        arena: Arena,
        failures: FailureStore,
        ways: Counter[str],
    ) -> None:
        self.worker = worker
        self.members = members
        self._memory = memory
        self._status = MemberStatus(memory.data)
        self._peers = peers
        self._arena = arena
        self._failures = failures
        self._ways = ways
        self._number = 0
        self._error: Exception | None = None

    def begin(self, tasks: Sequence[MoveTask]) -> SharedMemoryWork:
        if self._error is not None:
            raise RuntimeError(f"workers {self.members} exchange nothing any more: {self._error}")
        self._ways[self.way_of(tasks[0].step)] += 1
        return SharedMemoryWork(self, tasks)

    def way_of(self, step: LocalStep) -> str:
        return "shared memory"

    def give_up(self, error: Exception) -> None:
        self._error = error
        self._status.give_up()

    def close(self) -> None:
        self._status.give_up()
        self._memory.close()

    # One exchange

    def next_number(self) -> int:
        """The number of the next exchange, once its slot is free."""
        self._number += 1
        if not self._is_finished(self._number - SLOTS):
            self._wait_for_finish(self._number - SLOTS)
        return self._number

    def allocate(self, nbytes: int) -> ArenaBlock:
        return self._arena.allocate(nbytes)

    def publish(self, number: int, block: ArenaBlock | None, *, has_failed: bool = False) -> None:
        if block is not None:
            self._arena.hold(block, lambda: self._is_finished(number), lambda: self._wait_for_finish(number))
        self._status.publish(number, block, has_failed=has_failed)

    def block_of(self, peer: int, number: int) -> memoryview | None:
        return self._peers[peer].block(number)

    def finish(self, number: int) -> None:
        """This member has taken all that it takes in an exchange."""
        self._status.finish(number, wakes=any(peer.waits for peer in self._peers.values()))

    def _is_finished(self, number: int) -> bool:
        """Whether no member reads the block of an exchange any more. This member counts: it may reduce its block."""
        return self._status.finished >= number and all(peer.has_finished(number) for peer in self._peers.values())

    def _wait_for_finish(self, number: int) -> None:
        self._status.waits = True
        try:
            for peer in self._peers.values():
                peer.wait_for_finish(number)
        finally:
            self._status.waits = False

    # Failures

    def write_failure(self, number: int, task: int, failed: FailedValue) -> None:
        self._failures.write(self.members, number, task, failed)

    def read_failure(self, number: int, task: int) -> FailedValue:
        return self._failures.read(self.members, number, task)


class SharedMemoryWork:
    """One exchange, or several: a large all-reduce takes one or two for each of its chunks."""

    def __init__(self, group: SharedMemoryGroup, tasks: Sequence[MoveTask]) -> None:
        self._group = group
        self._tasks = list(tasks)
        self._reduced = large_reductions([task.step for task in tasks])
        self._others = [position for position in range(len(tasks)) if position not in self._reduced]
        self._number = 0
        if self._others:
            self._guarded(self._publish)

    def finish(self) -> list[MoveResult]:
        results: list[MoveResult] = [None] * len(self._tasks)
        if self._others:
            taken = self._guarded(self._take)
            for position, result in zip(self._others, taken, strict=True):
                results[position] = result
        if self._reduced:
            totals = self._guarded(lambda: all_reduce(self._group, self._tasks_of(self._reduced)))
            for position, result in zip(self._reduced, totals, strict=True):
                results[position] = result
        return results

    def _guarded(self, act: Callable[[], _T]) -> _T:
        """Call a function, and give up the group if it raises. Errors of single tasks become failed values instead."""
        try:
            return act()
        except Exception as error:
            self._group.give_up(error)
            raise

    def _publish(self) -> None:
        """Copy the parts that others take boxes of into shared memory, each with a flag that tells a failure."""
        group, tasks = self._group, self._tasks_of(self._others)
        self._number = group.next_number()
        if not any(task.step.gives for task in tasks):
            group.publish(self._number, None)
            return
        layout = _layout(tuple(task.step.before for task in tasks))
        try:
            block = group.allocate(layout.nbytes)
        except OSError as error:
            for position, task in enumerate(tasks):
                self._fail(position, task.fail("redistribute", (), error))
            group.publish(self._number, None, has_failed=True)
            return
        for position, (task, offset) in enumerate(zip(tasks, layout.offsets, strict=True)):
            value = task.value
            if task.step.gives and not isinstance(value, FailedValue):
                value = task.attempt(lambda: _write(task, block.data, offset))
            if isinstance(value, FailedValue):
                self._fail(position, value)
            block.data[position] = isinstance(value, FailedValue)
        group.publish(self._number, block)

    def _tasks_of(self, positions: Sequence[int]) -> Sequence[MoveTask]:
        return self._tasks if len(positions) == len(self._tasks) else [self._tasks[each] for each in positions]

    def _fail(self, position: int, failed: FailedValue) -> None:
        """A task of which this worker gives nothing fails here as well as on the others."""
        self._group.write_failure(self._number, position, failed)
        place = self._others[position]
        self._tasks[place] = self._tasks[place]._replace(value=failed)

    def _take(self) -> list[MoveResult]:
        group, tasks = self._group, self._tasks_of(self._others)
        takes_from = {peer for task in tasks for peer in task.step.peers}
        try:
            given = {peer: self._given(peer, tasks) for peer in group.members if peer in takes_from}
            return [self._result(position, task, given) for position, task in enumerate(tasks)]
        finally:
            group.finish(self._number)

    def _given(self, peer: int, tasks: Sequence[MoveTask]) -> _Given:
        layout = _layout(tuple(task.step.before_of(peer) for task in tasks))
        return _Given(self._group.block_of(peer, self._number), layout.offsets)

    def _result(self, position: int, task: MoveTask, given: Mapping[int, _Given]) -> MoveResult:
        step = task.step
        if step.after is None:
            return None
        if isinstance(task.value, FailedValue):
            return task.value
        for peer in step.peers:
            data = given[peer].data
            if data is None or data[position]:
                return self._group.read_failure(self._number, position)
        return task.attempt(lambda: _combine(position, task, given))


class _Given(NamedTuple):
    """The block that a peer gives in an exchange, and the offsets of its parts."""

    data: memoryview | None
    offsets: tuple[int, ...]


class _BlockLayout(NamedTuple):
    offsets: tuple[int, ...]
    nbytes: int


@functools.lru_cache(maxsize=4096)
def _layout(metas: tuple[TensorMeta | None, ...]) -> _BlockLayout:
    """The offsets of parts in a block, after one flag for each, and the size of the block."""
    offsets, end = [], len(metas)
    for meta in metas:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        offsets.append(start)
        end = start + (meta.nbytes if meta is not None else 0)
    return _BlockLayout(tuple(offsets), end)


def _combine(position: int, task: MoveTask, given: Mapping[int, _Given]) -> Value:
    step = task.step
    boxes: dict[int, Value] = {}
    for addend in step.addends:
        for box in addend:
            if box.peer == step.worker:
                boxes[box.peer] = task.box(box.source) if box.is_part else task.value
                continue
            data, offsets = given[box.peer]
            assert data is not None
            held = _view(task.engine, data, offsets[position], step.peers[box.peer])
            boxes[box.peer] = held[box.source] if box.is_part else held
    return step.combine(task.engine, boxes, owned=False)


def _write(task: MoveTask, data: memoryview, offset: int) -> None:
    meta = task.step.before
    assert meta is not None
    _view(task.engine, data, offset, meta)[...] = task.value


def _view(engine: Engine, data: memoryview, offset: int, meta: TensorMeta) -> Value:
    return engine.from_buffer(data[offset : offset + meta.nbytes], meta, True)
