"""All-reduces through shared memory that are too large for every member to read all of them.

The flat values of several tasks follow each other as one vector. Each member reduces one slice of it, in the order of
the members, and the others copy the result. If there are only two members, each reduces the whole vector, which touches
fewer bytes. A long vector is reduced chunk by chunk, so that the parts of a chunk are still in the cache when the
others read them, and so that it needs little shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol

from gt.core.meta import ITEM_BYTES, TensorMeta
from gt.sharding.boxes import Interval, balanced_cuts
from gt.worker.engines.engine import Value
from gt.worker.exchange.arena import ArenaBlock
from gt.worker.exchange.interface import MoveResult, MoveTask
from gt.worker.exchange.local_steps import LocalStep, elements
from gt.worker.failed_value import FailedValue

ONE_SHOT_BYTES = 1 << 16  # up to here every member reads all values and reduces them for itself
CHUNK_BYTES = 1 << 22
_ALIGNMENT = 64


class ReductionGroup(Protocol):
    """The exchanges of a group: see SharedMemoryGroup."""

    worker: int
    members: tuple[int, ...]

    def next_number(self) -> int: ...
    def allocate(self, nbytes: int) -> ArenaBlock: ...
    def publish(self, number: int, block: ArenaBlock | None, *, has_failed: bool = False) -> None: ...
    def block_of(self, peer: int, number: int) -> memoryview | None: ...
    def finish(self, number: int) -> None: ...
    def write_failure(self, number: int, task: int, failed: FailedValue) -> None: ...
    def read_failure(self, number: int, task: int) -> FailedValue: ...


def large_reductions(steps: Sequence[LocalStep]) -> list[int]:
    """The positions of the all-reduces that this module does; none if all of them together are small."""
    reduced = [position for position, step in enumerate(steps) if step.kind == "all-reduce"]
    metas = [steps[position].before for position in reduced]
    nbytes = sum(meta.nbytes for meta in metas if meta is not None)
    return reduced if nbytes > ONE_SHOT_BYTES else []


def all_reduce(group: ReductionGroup, tasks: Sequence[MoveTask]) -> list[MoveResult]:
    """The totals of tasks; those of one dtype and reduction are one vector."""
    kinds = dict.fromkeys((task.step.dtype, task.step.reduction) for task in tasks)
    results: list[MoveResult] = [None] * len(tasks)
    for kind in kinds:
        chosen = [number for number, task in enumerate(tasks) if (task.step.dtype, task.step.reduction) == kind]
        reduced = _Vector(group, [tasks[number] for number in chosen]).reduce()
        for number, result in zip(chosen, reduced, strict=True):
            results[number] = result
    return results


class _Vector:
    """The flat values of some tasks, one after the other. `_failed` has the failures of tasks without a result."""

    def __init__(self, group: ReductionGroup, tasks: Sequence[MoveTask]) -> None:
        self._group = group
        self._tasks = tasks
        self._engine = tasks[0].engine
        self._step = tasks[0].step
        self._itemsize = ITEM_BYTES[self._step.dtype]
        self._ends = list(accumulate(elements(task.step.before) for task in tasks if task.step.before is not None))
        self._header = -(-len(tasks) // _ALIGNMENT) * _ALIGNMENT
        sources = [self._flat_source(task) for task in tasks]
        self._failed = {number: each for number, each in enumerate(sources) if isinstance(each, FailedValue)}
        self._sources: list[Value] = sources
        self._announced: set[int] = set()

    def _flat_source(self, task: MoveTask) -> Value | FailedValue:
        if isinstance(task.value, FailedValue):
            return task.value
        engine, meta = task.engine, task.step.before
        assert meta is not None
        return task.attempt(lambda: engine.flat(engine.with_strides(task.value, meta.stride)))

    def reduce(self) -> list[MoveResult]:
        totals = [task.attempt(lambda: _empty(task)) for task in self._tasks]
        flats = [None if isinstance(total, FailedValue) else self._engine.flat(total) for total in totals]
        length = max(1, CHUNK_BYTES // self._itemsize)
        for start in range(0, self._ends[-1], length):
            self._reduce_chunk((start, min(start + length, self._ends[-1])), flats)
        return [self._failed.get(number, total) for number, total in enumerate(totals)]

    def _reduce_chunk(self, chunk: Interval, totals: Sequence[Value | None]) -> None:
        """Give this member's chunk, and reduce those of all members."""
        group = self._group
        number = group.next_number()
        own = self._give(number, chunk[1] - chunk[0], lambda data: self._copy_in(data, chunk))
        addends = [own if member == group.worker else self._taken(member, number) for member in group.members]
        if len(group.members) == 2:
            self._reduce_whole(chunk, addends, totals)
            group.finish(number)
        else:
            self._reduce_slices(number, chunk, addends, totals)

    def _reduce_whole(self, chunk: Interval, addends: Sequence[Value | None], totals: Sequence[Value | None]) -> None:
        for task, own, place in self._overlaps(chunk):
            total = totals[task]
            if total is not None and task not in self._failed:
                done = self._tasks[task].attempt(lambda: self._reduce_into(total[own], addends, place))
                if isinstance(done, FailedValue):
                    self._failed[task] = done

    def _reduce_slices(
        self, number: int, chunk: Interval, addends: Sequence[Value | None], totals: Sequence[Value | None]
    ) -> None:
        """Reduce this member's slice of a chunk, give that, and copy the others'."""
        group, (start, stop) = self._group, chunk
        cuts = balanced_cuts(stop - start, (len(group.members),))
        low, high = cuts[group.members.index(group.worker)]
        after = group.next_number()
        total = self._give(after, high - low, lambda data: self._reduce_into(data, addends, slice(low, high)))
        group.finish(number)
        for member, (low, high) in zip(group.members, cuts, strict=True):
            data = total if member == group.worker else self._taken(member, after)
            if data is not None:
                self._copy_out(data, (start + low, start + high), totals)
        group.finish(after)

    # Shared memory

    def _give(self, number: int, length: int, fill: Callable[[Value], None]) -> Value | None:
        """Publish `length` elements, which `fill` writes; returns them. None if `fill` fails: then all tasks fail."""
        group = self._group
        try:
            block = group.allocate(self._header + length * self._itemsize)
            data = self._flat(block.data, length)
            fill(data)
        except Exception as error:
            failed = self._tasks[0].fail("redistribute", (), error)
            for task in range(len(self._tasks)):
                self._failed.setdefault(task, failed)
                group.write_failure(number, task, failed)
            group.publish(number, None, has_failed=True)
            return None
        for task in range(len(self._tasks)):
            block.data[task] = task in self._failed
            if task in self._failed and task not in self._announced:
                self._announced.add(task)
                group.write_failure(number, task, self._failed[task])
        group.publish(number, block)
        return data

    def _taken(self, member: int, number: int) -> Value | None:
        """The elements that a member gives in an exchange; None if it could not compute them."""
        block = self._group.block_of(member, number)
        for task in range(len(self._tasks)):
            if task not in self._failed and (block is None or block[task]):
                self._failed[task] = self._group.read_failure(number, task)
        return None if block is None else self._flat(block, (len(block) - self._header) // self._itemsize)

    def _flat(self, data: memoryview, length: int) -> Value:
        meta = TensorMeta((length,), (1,), 0, self._step.dtype)
        return self._engine.from_buffer(data[self._header :], meta, True)

    # Elements

    def _copy_in(self, data: Value, chunk: Interval) -> None:
        for task, own, place in self._overlaps(chunk):
            if task not in self._failed:
                data[place] = self._sources[task][own]

    def _copy_out(self, data: Value, interval: Interval, totals: Sequence[Value | None]) -> None:
        for task, own, place in self._overlaps(interval):
            total = totals[task]
            if total is not None:
                total[own] = data[place]

    def _reduce_into(self, data: Value, addends: Sequence[Value | None], place: slice) -> None:
        slices = [addend[place] for addend in addends if addend is not None]
        if len(slices) == len(addends) and place.start < place.stop:
            self._step.reduce_into(self._engine, slices, data)

    def _overlaps(self, interval: Interval) -> Iterator[tuple[int, slice, slice]]:
        """The tasks whose elements lie in an interval of the vector: where in the task, and where in the interval."""
        low, high = interval
        begin = 0
        for task, end in enumerate(self._ends):
            start, stop = max(low, begin), min(high, end)
            if start < stop:
                yield task, slice(start - begin, stop - begin), slice(start - low, stop - low)
            begin = end


def _empty(task: MoveTask) -> Value:
    assert task.step.after is not None
    return task.engine.empty(task.step.after)
