"""The ways in which a process group exchanges the boxes of some tasks.

The constructor of a work takes all the memory that its messages need, when nothing is launched yet: it raises where
that is lacking, or notes the error in `lacks` where the work can do without. `agreed_bytes`: before an exchange of that
size, the members agree that all have the memory.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gt.core.meta import TensorMeta
from gt.worker.engines.engine import Value
from gt.worker.exchange.group_messages import (
    BoxMessage,
    Entry,
    GivenMessage,
    GroupMessages,
    MessageGroup,
    ReceivedMessage,
)
from gt.worker.exchange.in_flight_sends import MAX_IN_FLIGHT
from gt.worker.exchange.interface import MoveResult, MoveTask
from gt.worker.exchange.local_steps import LocalStep, elements
from gt.worker.exchange.message_layout import MessageLayout, write_flag
from gt.worker.exchange.rendezvous import MEMBER_TIMEOUT
from gt.worker.failed_value import FailedValue
from gt.worker.memory_guard import LARGE_BYTES


class GatherWork:
    """An all-gather of boxes of one shape."""

    way = "all-gather"
    agreed_bytes = LARGE_BYTES
    lacks: Exception | None = None

    def __init__(self, group: MessageGroup, entries: Sequence[Entry]) -> None:
        self._messages = GroupMessages(group, entries)
        self._steps = [entry.task.step for entry in entries]
        self._layout = _even_layout(self._steps)
        self._mine = group.buffer(self._layout.nbytes)
        self._buffer = group.buffer(len(group.members) * self._layout.nbytes)
        self._copy = torch.empty_like(self._buffer) if group.backend.blocks else None

    def launch(self) -> None:
        self._copy = None  # the gather of Gloo takes as much memory again as it fills
        given = [next(iter(step.gives.values()))[0] for step in self._steps]
        self._rows = self._messages.gather(self._layout, given, self._mine, self._buffer)

    def finish(self) -> list[MoveResult]:
        received = self._messages.received(self._rows)
        return [self._messages.combine(place, received) for place in range(len(self._messages.entries))]


class AllToAllWork:
    """An all-to-all of boxes of one shape, which each member joins or reduces."""

    way = "all-to-all"
    agreed_bytes = LARGE_BYTES
    lacks: Exception | None = None

    def __init__(self, group: MessageGroup, entries: Sequence[Entry]) -> None:
        self._messages = GroupMessages(group, entries)
        self._steps = [entry.task.step for entry in entries]
        self._layout = _even_layout(self._steps)
        self._mine, self._buffer = (group.buffer(len(group.members) * self._layout.nbytes) for _ in range(2))

    def launch(self) -> None:
        given = {peer: [step.gives[peer][0] for step in self._steps] for peer in self._steps[0].gives}
        self._rows = self._messages.all_to_all(self._layout, given, self._mine, self._buffer)

    def finish(self) -> list[MoveResult]:
        received = self._messages.received(self._rows)
        return [self._messages.combine(place, received) for place in range(len(self._messages.entries))]


class SumWork:
    """All-reduces by the group itself, one for each dtype: flat values, then a flag for each task."""

    way = "all-reduce"
    agreed_bytes = LARGE_BYTES
    lacks: Exception | None = None

    def __init__(self, group: MessageGroup, entries: Sequence[Entry]) -> None:
        self._group = group
        self._number = group.number
        self._entries = entries
        by_dtype: dict[str, list[Entry]] = {}
        for entry in entries:
            by_dtype.setdefault(entry.task.step.dtype, []).append(entry)
        self._reserved = [(chosen, self._buffer(dtype, chosen)) for dtype, chosen in by_dtype.items()]
        self._launched: list[tuple[Sequence[Entry], Any, torch.Tensor]] = []

    def _buffer(self, dtype: str, entries: Sequence[Entry]) -> torch.Tensor:
        size = sum(_size(task.step) for _, task in entries) + len(entries)
        return torch.zeros(size, dtype=getattr(torch, dtype), device=self._group.backend.device)

    def launch(self) -> None:
        self._launched = [(entries, self._launch(entries, buffer), buffer) for entries, buffer in self._reserved]

    def _launch(self, entries: Sequence[Entry], buffer: torch.Tensor) -> Any:
        sizes = [_size(task.step) for _, task in entries]
        start = 0
        for place, ((position, task), size) in enumerate(zip(entries, sizes, strict=True)):
            value = task.value
            if not isinstance(value, FailedValue):
                value = task.attempt(lambda: _copy_flat(task, buffer[start : start + size]))
            if isinstance(value, FailedValue):
                self._group.write_failure(self._number, position, value)
            write_flag(buffer[sum(sizes) + place], value, self._group.doubt())
            start += size
        return self._group.backend.all_reduce(buffer)

    def finish(self) -> list[MoveResult]:
        found: dict[int, MoveResult] = {}
        for entries, work, buffer in self._launched:
            self._group.wait(work)
            flags = buffer[len(buffer) - len(entries) :]
            start = 0
            for flag, (position, task) in zip(flags, entries, strict=True):
                flat = buffer[start : start + _size(task.step)]
                found[position] = self._result(position, task, flat, flag)
                start += len(flat)
        return [found[position] for position, _ in self._entries]

    def _result(self, position: int, task: MoveTask, flat: torch.Tensor, flag: torch.Tensor) -> MoveResult:
        if isinstance(task.value, FailedValue):
            return task.value
        if self._group.is_set([flag], self._number, position):
            return self._group.read_failure(self._number, position)
        return task.attempt(lambda: _from_flat(task, flat))


class SlicedReduceWork:
    """All-reduces that the group cannot do as GT does: every member reduces one slice and gives it to the others."""

    way = "all-to-all and all-gather"
    agreed_bytes = LARGE_BYTES
    lacks: Exception | None = None

    def __init__(self, group: MessageGroup, entries: Sequence[Entry]) -> None:
        self._group = group
        self._entries = entries
        count = len(group.members)
        self._lengths = [-(-_size(task.step) // count) for _, task in entries]
        metas = [_flat_meta(task, length) for (_, task), length in zip(entries, self._lengths, strict=True)]
        self._layout = MessageLayout(metas)
        padded = [_padded(task, length * count) for (_, task), length in zip(entries, self._lengths, strict=True)]
        self._messages = GroupMessages(group, _with_values(entries, padded))
        self._mine, self._buffer = (group.buffer(count * self._layout.nbytes) for _ in range(2))

    def launch(self) -> None:
        given = {
            peer: [(slice(rank * length, (rank + 1) * length),) for length in self._lengths]
            for rank, peer in enumerate(self._group.members)
        }
        self._rows = self._messages.all_to_all(self._layout, given, self._mine, self._buffer)

    def finish(self) -> list[MoveResult]:
        received = self._messages.received(self._rows)
        totals = [self._reduce(place, received) for place in range(len(self._entries))]
        messages = GroupMessages(self._group, _with_values(self._entries, totals))
        given = [(slice(0, length),) for length in self._lengths]
        # The memory of the first messages, which all members have read, so that none can be lacking now.
        rows = messages.gather(self._layout, given, self._buffer[: self._layout.nbytes], self._mine)
        gathered = messages.received(rows)
        return [self._join(messages, place, gathered) for place in range(len(self._entries))]

    def _reduce(self, place: int, received: Mapping[int, BoxMessage]) -> Value | FailedValue:
        failure = self._messages.failure(place, received)
        if failure is not None:
            return failure
        task = self._entries[place].task

        def reduce() -> Value:
            slices = [layout.box(task.engine, buffer, place) for layout, buffer in received.values()]
            return task.step.reduce(task.engine, slices)

        return task.attempt(reduce)

    def _join(self, messages: GroupMessages, place: int, gathered: Mapping[int, BoxMessage]) -> MoveResult:
        failure = messages.failure(place, gathered)
        if failure is not None:
            return failure
        task, length = self._entries[place].task, self._lengths[place]

        def join() -> Value:
            assert task.step.after is not None
            total = task.engine.empty(task.step.after)
            flat = task.engine.flat(total)
            for rank, (layout, buffer) in enumerate(gathered.values()):
                target = flat[rank * length : (rank + 1) * length]
                target[...] = layout.box(task.engine, buffer, place)[: len(target)]
            return total

        return task.attempt(join)


class PointToPointWork:
    """Sends and receives. It waits for the values that it receives, and not for those that it sends. Where one peer has
    ended, the boxes of the others are exchanged all the same, so that these stay in step. Where memory is lacking for a
    message, its bytes go from or to the spare memory of the group: no member waits for this one."""

    way = "point-to-point"
    agreed_bytes = MAX_IN_FLIGHT  # smaller ones are sent without a wait for the takers

    def __init__(self, group: MessageGroup, entries: Sequence[Entry]) -> None:
        self._group = group
        self._messages = GroupMessages(group, entries)
        self._errors: list[Exception] = []
        self._steps = [entry.task.step for entry in entries]
        self._givers = [peer for peer in group.members if any(peer in step.peers for step in self._steps)]
        self._takers = [peer for peer in group.members if any(peer in step.gives for step in self._steps)]
        self._received: dict[int, ReceivedMessage] = {}
        if self._givers:
            self._received, group.prefetched = group.prefetched, {}
        self._layouts = {
            peer: MessageLayout([_given_meta(step, peer) for step in self._steps]) for peer in self._takers
        }
        group.sends.reserve(sum(layout.nbytes for layout in self._layouts.values()))
        self._given = {peer: self._memory(layout.nbytes) for peer, layout in self._layouts.items()}
        missing = [peer for peer in self._givers if peer not in self._received]
        self._taken = {peer: self._memory(taken_layout(self._steps, peer).nbytes) for peer in missing}

    def _memory(self, nbytes: int) -> torch.Tensor | Exception:
        try:
            return self._group.buffer(nbytes)
        except Exception as error:
            return error

    @property
    def lacks(self) -> Exception | None:
        return next(
            (found for found in (*self._given.values(), *self._taken.values()) if isinstance(found, Exception)), None
        )

    def launch(self) -> None:
        given: list[GivenMessage] = []
        for peer, buffer in self._given.items():
            boxes = [step.gives[peer][0] if peer in step.gives else None for step in self._steps]
            if isinstance(buffer, Exception):
                self._fail(buffer, [place for place, box in enumerate(boxes) if box is not None])
            else:
                given.append(GivenMessage(self._layouts[peer], buffer, boxes))
        self._messages.write(given)
        with self._group.backend.coalesced():
            for peer, buffer in self._given.items():
                with collecting(self._errors):
                    self._send(peer, buffer)
            for peer, buffer in self._taken.items():
                with collecting(self._errors):
                    nbytes = taken_layout(self._steps, peer).nbytes
                    self._received[peer] = self._group.receive(peer, nbytes, buffer)

    def _send(self, peer: int, buffer: torch.Tensor | Exception) -> None:
        pieces = self._group.backend.spare.sent(buffer, self._layouts[peer].nbytes)
        self._group.sends.add(peer, [self._group.send(pieces, peer)], pieces)

    def _fail(self, error: Exception, places: Sequence[int]) -> None:
        for place in places:
            self._messages.fail(place, error)

    def finish(self) -> list[MoveResult]:
        messages: dict[int, BoxMessage] = {}
        lacking: dict[int, Exception] = {}
        for peer, (work, buffer) in self._received.items():
            with collecting(self._errors):
                wait_for_collective(work)
                if isinstance(buffer, Exception):
                    lacking[peer] = buffer
                else:
                    messages[peer] = BoxMessage(taken_layout(self._steps, peer), buffer)
                self._group.sends.confirm(peer, except_last=int(peer in self._takers))
        if self._errors:
            raise self._errors[0]
        for peer, error in lacking.items():
            self._fail(error, [place for place, step in enumerate(self._steps) if peer in step.peers])
        return [self._messages.combine(place, messages) for place in range(len(self._steps))]


def taken_layout(steps: Sequence[LocalStep], peer: int) -> MessageLayout:
    """The message of a peer with the boxes that this worker takes from it."""
    return MessageLayout([_taken_meta(step, peer) for step in steps])


def _taken_meta(step: LocalStep, peer: int) -> TensorMeta | None:
    return next((box.meta for addend in step.addends for box in addend if box.peer == peer), None)


def _given_meta(step: LocalStep, peer: int) -> TensorMeta | None:
    return step.gives[peer][1] if peer in step.gives else None


def _even_layout(steps: Sequence[LocalStep]) -> MessageLayout:
    return MessageLayout([step.addends[0][0].meta for step in steps])


def _with_values(entries: Sequence[Entry], values: Sequence[Value | FailedValue]) -> list[Entry]:
    return [
        Entry(position, task._replace(value=value)) for (position, task), value in zip(entries, values, strict=True)
    ]


def _size(step: LocalStep) -> int:
    assert step.before is not None
    return elements(step.before)


def _flat_meta(task: MoveTask, length: int) -> TensorMeta:
    return TensorMeta((length,), (1,), 0, task.step.dtype)


def _dense_flat(task: MoveTask) -> Value:
    assert task.step.before is not None
    return task.engine.flat(task.engine.with_strides(task.value, task.step.before.stride))


def _padded(task: MoveTask, length: int) -> Value | FailedValue:
    """The flat value, followed by elements that no member reads."""
    if isinstance(task.value, FailedValue):
        return task.value

    def pad() -> Value:
        padded = task.engine.empty(_flat_meta(task, length))
        padded[: _size(task.step)] = _dense_flat(task)
        return padded

    return task.attempt(pad)


def _copy_flat(task: MoveTask, target: torch.Tensor) -> None:
    target.copy_(torch.as_tensor(_dense_flat(task)))


def _from_flat(task: MoveTask, flat: torch.Tensor) -> Value:
    assert task.step.after is not None
    total = task.engine.empty(task.step.after)
    torch.as_tensor(task.engine.flat(total)).copy_(flat)
    return total


def wait_for_collective(work: Any) -> None:
    work.wait(MEMBER_TIMEOUT)


@contextmanager
def collecting(errors: list[Exception]) -> Generator[None]:
    try:
        yield
    except Exception as error:
        errors.append(error)
