"""The ways in which a process group exchanges the boxes of some tasks. The constructor of a work launches it."""

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
from gt.worker.exchange.interface import MoveResult, MoveTask
from gt.worker.exchange.local_steps import LocalStep, elements
from gt.worker.exchange.message_layout import MessageLayout, write_flag
from gt.worker.exchange.rendezvous import MEMBER_TIMEOUT
from gt.worker.failed_value import FailedValue


class GatherWork:
    """An all-gather of boxes of one shape."""

    way = "all-gather"

    def __init__(self, group: MessageGroup, entries: Sequence[Entry]) -> None:
        self._messages = GroupMessages(group, entries)
        steps = [entry.task.step for entry in entries]
        self._rows = self._messages.gather(_even_layout(steps), [next(iter(step.gives.values()))[0] for step in steps])

    def finish(self) -> list[MoveResult]:
        received = self._messages.received(self._rows)
        return [self._messages.combine(place, received) for place in range(len(self._messages.entries))]


class AllToAllWork:
    """An all-to-all of boxes of one shape, which each member joins or reduces."""

    way = "all-to-all"

    def __init__(self, group: MessageGroup, entries: Sequence[Entry]) -> None:
        self._messages = GroupMessages(group, entries)
        steps = [entry.task.step for entry in entries]
        given = {peer: [step.gives[peer][0] for step in steps] for peer in steps[0].gives}
        self._rows = self._messages.all_to_all(_even_layout(steps), given)

    def finish(self) -> list[MoveResult]:
        received = self._messages.received(self._rows)
        return [self._messages.combine(place, received) for place in range(len(self._messages.entries))]


class SumWork:
    """All-reduces by the group itself, one for each dtype: flat values, then a flag for each task."""

    way = "all-reduce"

    def __init__(self, group: MessageGroup, entries: Sequence[Entry]) -> None:
        self._group = group
        self._number = group.number
        self._entries = entries
        by_dtype: dict[str, list[Entry]] = {}
        for entry in entries:
            by_dtype.setdefault(entry.task.step.dtype, []).append(entry)
        self._launched = [(chosen, *self._launch(dtype, chosen)) for dtype, chosen in by_dtype.items()]

    def _launch(self, dtype: str, entries: Sequence[Entry]) -> tuple[Any, torch.Tensor]:
        sizes = [_size(task.step) for _, task in entries]
        buffer = torch.zeros(sum(sizes) + len(entries), dtype=getattr(torch, dtype), device=self._group.backend.device)
        start = 0
        for place, ((position, task), size) in enumerate(zip(entries, sizes, strict=True)):
            value = task.value
            if not isinstance(value, FailedValue):
                value = task.attempt(lambda: _copy_flat(task, buffer[start : start + size]))
            if isinstance(value, FailedValue):
                self._group.write_failure(self._number, position, value)
            write_flag(buffer[sum(sizes) + place], value, self._group.doubt())
            start += size
        return self._group.backend.all_reduce(buffer), buffer

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

    def __init__(self, group: MessageGroup, entries: Sequence[Entry]) -> None:
        self._group = group
        self._entries = entries
        count = len(group.members)
        self._lengths = [-(-_size(task.step) // count) for _, task in entries]
        metas = [_flat_meta(task, length) for (_, task), length in zip(entries, self._lengths, strict=True)]
        self._layout = MessageLayout(metas)
        padded = [_padded(task, length * count) for (_, task), length in zip(entries, self._lengths, strict=True)]
        self._messages = GroupMessages(group, _with_values(entries, padded))
        given = {
            peer: [(slice(rank * length, (rank + 1) * length),) for length in self._lengths]
            for rank, peer in enumerate(group.members)
        }
        self._rows = self._messages.all_to_all(self._layout, given)

    def finish(self) -> list[MoveResult]:
        received = self._messages.received(self._rows)
        totals = [self._reduce(place, received) for place in range(len(self._entries))]
        messages = GroupMessages(self._group, _with_values(self._entries, totals))
        gathered = messages.received(messages.gather(self._layout, [(slice(0, length),) for length in self._lengths]))
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
    ended, the boxes of the others are exchanged all the same, so that these stay in step."""

    way = "point-to-point"

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
        layouts = {peer: MessageLayout([_given_meta(step, peer) for step in self._steps]) for peer in self._takers}
        group.sends.reserve(sum(layout.nbytes for layout in layouts.values()))
        given = {peer: self._given(peer, layout) for peer, layout in layouts.items()}
        self._messages.write([*given.values()])
        with group.backend.coalesced():
            for peer, message in given.items():
                with collecting(self._errors):
                    self._send(peer, message.buffer)
            for peer in self._givers:
                with collecting(self._errors):
                    if peer not in self._received:
                        self._received[peer] = group.receive(peer, taken_layout(self._steps, peer).nbytes)

    def _given(self, peer: int, layout: MessageLayout) -> GivenMessage:
        boxes = [step.gives[peer][0] if peer in step.gives else None for step in self._steps]
        return GivenMessage(layout, self._group.buffer(layout.nbytes), boxes)

    def _send(self, peer: int, buffer: torch.Tensor) -> None:
        self._group.sends.add(peer, [self._group.send(buffer, peer)], [buffer])

    def finish(self) -> list[MoveResult]:
        messages: dict[int, BoxMessage] = {}
        for peer, (work, buffer) in self._received.items():
            with collecting(self._errors):
                wait_for_collective(work)
                messages[peer] = BoxMessage(taken_layout(self._steps, peer), buffer)
                self._group.sends.confirm(peer, except_last=int(peer in self._takers))
        if self._errors:
            raise self._errors[0]
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
