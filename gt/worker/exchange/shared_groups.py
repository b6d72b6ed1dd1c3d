"""Exchanges between CPU workers of one machine, through memory that they share.

A member copies its part into its arena and publishes the number of the exchange; the others wait for that number and
take their boxes straight from there. Nobody waits for a reader: the memory of an exchange is used again when all
members have finished it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from gt.core.meta import TensorMeta
from gt.worker.engines.engine import Engine, Value
from gt.worker.exchange.arena import Arena, Block, Memory
from gt.worker.exchange.channels import SLOTS, Channel, Peer
from gt.worker.exchange.failure_texts import FailureTexts
from gt.worker.exchange.interface import MoveTask, Result
from gt.worker.exchange.shared_reductions import all_reduce, large_reductions
from gt.worker.failed_value import FailedValue

_ALIGNMENT = 64
_T = TypeVar("_T")


class SharedGroup:
    """Exchanges among `members`, which all do the same ones in the same order. `peers` are the others. After an error
    of the group itself, such as a lost member, no exchange of it follows: members would no longer count alike."""

    def __init__(
        self,
        worker: int,
        members: tuple[int, ...],
        memory: Memory,
        peers: Mapping[int, Peer],
        arena: Arena,
        texts: FailureTexts,
        ways: Counter[str],
    ) -> None:
        self.worker = worker
        self.members = members
        self._memory = memory
        self._channel = Channel(memory.data)
        self._peers = peers
        self._arena = arena
        self._texts = texts
        self._ways = ways
        self._number = 0
        self._error: Exception | None = None

    def begin(self, tasks: Sequence[MoveTask]) -> SharedWork:
        if self._error is not None:
            raise RuntimeError(f"workers {self.members} exchange nothing any more: {self._error}")
        self._ways["shared memory"] += 1
        return SharedWork(self, tasks)

    def give_up(self, error: Exception) -> None:
        self._error = error
        self._channel.give_up()

    def close(self) -> None:
        self._channel.give_up()
        self._memory.close()

    # One exchange

    def next_number(self) -> int:
        """The number of the next exchange, once its slot is free."""
        self._number += 1
        for peer in self._peers.values():
            if not peer.has_finished(self._number - SLOTS):
                peer.wait_for_finish(self._number - SLOTS)
        return self._number

    def allocate(self, nbytes: int) -> Block:
        return self._arena.allocate(nbytes)

    def publish(self, number: int, block: Block | None, *, has_failed: bool = False) -> None:
        if block is not None:
            self._arena.hold(block, lambda: self._is_finished(number), lambda: self._wait_for_finish(number))
        self._channel.publish(number, block, has_failed=has_failed)

    def block_of(self, peer: int, number: int) -> memoryview | None:
        return self._peers[peer].block(number)

    def finish(self, number: int) -> None:
        """This member has taken all that it takes in an exchange."""
        self._channel.finish(number)

    def _is_finished(self, number: int) -> bool:
        """Whether no member reads the block of an exchange any more: this one may reduce its own block."""
        return self._channel.finished >= number and all(peer.has_finished(number) for peer in self._peers.values())

    def _wait_for_finish(self, number: int) -> None:
        for peer in self._peers.values():
            peer.wait_for_finish(number)

    # Failures

    def write_failure(self, number: int, task: int, failed: FailedValue) -> None:
        self._texts.write(self.members, number, task, failed)

    def read_failure(self, number: int, task: int) -> FailedValue:
        return self._texts.read(self.members, number, task)


class SharedWork:
    """One exchange, or several: a large all-reduce takes two for each of its chunks."""

    def __init__(self, group: SharedGroup, tasks: Sequence[MoveTask]) -> None:
        self._group = group
        self._tasks = list(tasks)
        self._reduced = large_reductions([task.part for task in tasks])
        self._others = [position for position in range(len(tasks)) if position not in self._reduced]
        self._number = 0
        if self._others:
            self._guarded(self._publish)

    def finish(self) -> list[Result]:
        results: list[Result] = [None] * len(self._tasks)
        if self._others:
            taken = self._guarded(self._take)
            for position, result in zip(self._others, taken, strict=True):
                results[position] = result
        if self._reduced:
            tasks = [self._tasks[position] for position in self._reduced]
            totals = self._guarded(lambda: all_reduce(self._group, tasks))
            for position, result in zip(self._reduced, totals, strict=True):
                results[position] = result
        return results

    def _guarded(self, act: Callable[[], _T]) -> _T:
        """Errors of single tasks are failures; any other ends the group."""
        try:
            return act()
        except Exception as error:
            self._group.give_up(error)
            raise

    def _publish(self) -> None:
        """Copy the parts that others take boxes of into shared memory, each with a flag that tells a failure."""
        group, tasks = self._group, [self._tasks[position] for position in self._others]
        self._number = group.next_number()
        if not any(task.part.gives for task in tasks):
            group.publish(self._number, None)
            return
        offsets, nbytes = _layout([task.part.before for task in tasks])
        try:
            block = group.allocate(nbytes)
        except OSError as error:
            for position, task in enumerate(tasks):
                self._fail(position, task.fail("redistribute", (), error))
            group.publish(self._number, None, has_failed=True)
            return
        for position, (task, offset) in enumerate(zip(tasks, offsets, strict=True)):
            value = task.value
            if task.part.gives and not isinstance(value, FailedValue):
                value = task.attempt(lambda: _write(task, block.data, offset))
            if isinstance(value, FailedValue):
                self._fail(position, value)
            block.data[position] = isinstance(value, FailedValue)
        group.publish(self._number, block)

    def _fail(self, position: int, failed: FailedValue) -> None:
        """A task of which this worker gives nothing fails here as well as on the others."""
        self._group.write_failure(self._number, position, failed)
        place = self._others[position]
        self._tasks[place] = self._tasks[place]._replace(value=failed)

    def _take(self) -> list[Result]:
        group, tasks = self._group, [self._tasks[position] for position in self._others]
        peers = {peer for task in tasks for peer in task.part.peers}
        try:
            blocks = {peer: group.block_of(peer, self._number) for peer in group.members if peer in peers}
            return [self._combine(position, task, tasks, blocks) for position, task in enumerate(tasks)]
        finally:
            group.finish(self._number)

    def _combine(
        self, position: int, task: MoveTask, tasks: Sequence[MoveTask], blocks: Mapping[int, memoryview | None]
    ) -> Result:
        part = task.part
        if part.after is None:
            return None
        if isinstance(task.value, FailedValue):
            return task.value
        for peer in part.peers:
            block = blocks[peer]
            if block is None or block[position]:
                return self._group.read_failure(self._number, position)
        return task.attempt(lambda: self._combined(position, task, tasks, blocks))

    def _combined(
        self, position: int, task: MoveTask, tasks: Sequence[MoveTask], blocks: Mapping[int, memoryview | None]
    ) -> Value:
        part, engine = task.part, task.engine
        boxes: dict[int, Value] = {}
        for addend in part.addends:
            for piece in addend:
                if piece.peer == part.worker:
                    boxes[piece.peer] = task.box(piece.source)
                    continue
                offsets, _ = _layout([each.part.before_of(piece.peer) for each in tasks])
                held = _view(engine, blocks[piece.peer], offsets[position], part.peers[piece.peer])
                boxes[piece.peer] = held[piece.source]
        return part.combine(engine, boxes, owned=False)


def _layout(metas: Sequence[TensorMeta | None]) -> tuple[list[int], int]:
    """The offsets of parts in a block, after one flag for each, and the size of the block."""
    offsets, end = [], len(metas)
    for meta in metas:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        offsets.append(start)
        end = start + (meta.nbytes if meta is not None else 0)
    return offsets, end


def _write(task: MoveTask, data: memoryview, offset: int) -> None:
    meta = task.part.before
    assert meta is not None
    _view(task.engine, data, offset, meta)[...] = task.value


def _view(engine: Engine, data: memoryview | None, offset: int, meta: TensorMeta) -> Value:
    assert data is not None
    return engine.from_buffer(data[offset : offset + meta.nbytes], meta, True)
