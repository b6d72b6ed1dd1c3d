"""The boxes of the tasks of an exchange as messages between the members of a process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from gt.worker.engines.engine import Value
from gt.worker.exchange.group_backends import GroupBackend
from gt.worker.exchange.in_flight_sends import InFlightSends
from gt.worker.exchange.interface import MoveResult, MoveTask
from gt.worker.exchange.local_steps import Slices, first_failure
from gt.worker.exchange.message_layout import MessageLayout
from gt.worker.failed_value import FailedValue


class Entry(NamedTuple):
    """A task and its position among the tasks of an exchange, under which its failure is written to the store."""

    position: int
    task: MoveTask


class ReceivedMessage(NamedTuple):
    """A receive that was begun, and the memory it fills; the error of its allocation if there is none."""

    work: Any
    buffer: torch.Tensor | Exception


class MessageGroup(Protocol):
    """The attributes and methods of ProcessGroup that messages need."""

    worker: int
    members: tuple[int, ...]
    number: int
    backend: GroupBackend
    sends: InFlightSends
    prefetched: dict[int, ReceivedMessage]

    def buffer(self, nbytes: int) -> torch.Tensor: ...
    def receive(self, peer: int, nbytes: int, buffer: torch.Tensor | Exception) -> ReceivedMessage: ...
    def send(self, pieces: Sequence[torch.Tensor], peer: int) -> Any: ...
    def doubt(self) -> torch.Tensor | None: ...
    def is_set(self, flags: Sequence[torch.Tensor], number: int, task: int) -> bool: ...
    def wait(self, work: Any) -> None: ...
    def write_failure(self, number: int, task: int, failed: FailedValue) -> None: ...
    def read_failure(self, number: int, task: int) -> FailedValue: ...


class GroupMessages:
    """The boxes of some tasks of one exchange, as bytes with flags."""

    def __init__(self, group: MessageGroup, entries: Sequence[Entry]) -> None:
        self.group = group
        self.entries = list(entries)
        self.number = group.number

    def write(self, messages: Sequence[GivenMessage]) -> None:
        """Write the boxes of all tasks. A task of which one box cannot be written fails here and on all takers."""
        for place, (position, task) in enumerate(self.entries):
            failed = self._write_boxes(messages, place)
            if failed is not None:
                self.group.write_failure(self.number, position, failed)
                self.entries[place] = Entry(position, task._replace(value=failed))
                for each in messages:
                    self._write_box(each, place)

    def fail(self, place: int, error: Exception) -> None:
        """This worker has no memory for a message of a task."""
        position, task = self.entries[place]
        failed = task.value if isinstance(task.value, FailedValue) else task.fail("redistribute", (), error)
        self.group.write_failure(self.number, position, failed)
        self.entries[place] = Entry(position, task._replace(value=failed))

    def _write_boxes(self, messages: Sequence[GivenMessage], place: int) -> FailedValue | None:
        return first_failure(self._write_box(each, place) for each in messages)

    def _write_box(self, message: GivenMessage, place: int) -> FailedValue | None:
        slices = message.boxes[place]
        if slices is None:
            return None
        return message.layout.write(message.buffer, self.entries[place].task, place, slices, self.group.doubt())

    def failure(self, place: int, messages: Mapping[int, BoxMessage]) -> FailedValue | None:
        """The failure of a task: this worker's own, or that of a peer whose message has a flag."""
        position, task = self.entries[place]
        if isinstance(task.value, FailedValue):
            return task.value
        flags = [layout.flag(buffer, place) for layout, buffer in messages.values()]
        if self.group.is_set(flags, self.number, position):
            return self.group.read_failure(self.number, position)
        return None

    def combine(self, place: int, messages: Mapping[int, BoxMessage]) -> MoveResult:
        """The result of a task, from messages by sender."""
        task = self.entries[place].task
        step = task.step
        if step.after is None:
            return None
        if isinstance(task.value, FailedValue):
            return task.value
        taken = {peer: messages[peer] for peer in step.peers}
        failure = self.failure(place, taken)
        if failure is not None:
            return failure

        def combine() -> Value:
            boxes = {peer: layout.box(task.engine, buffer, place) for peer, (layout, buffer) in taken.items()}
            own = [box.source for addend in step.addends for box in addend if box.peer == step.worker]
            if own:
                boxes[step.worker] = task.box(own[0])
            return step.combine(task.engine, boxes, owned=False)

        return task.attempt(combine)

    # Launching

    def gather(
        self, layout: MessageLayout, given: Sequence[Slices], mine: torch.Tensor, rows: torch.Tensor
    ) -> MessageRows:
        """Every member gives all others the same boxes. `mine` is memory for one message, `rows` for those of all."""
        self.write([GivenMessage(layout, mine, given)])
        return MessageRows(self.group.backend.all_gather(rows, mine), layout, rows)

    def all_to_all(
        self, layout: MessageLayout, given: Mapping[int, Sequence[Slices]], mine: torch.Tensor, rows: torch.Tensor
    ) -> MessageRows:
        """Every member gives each member boxes of its own, all of the same shapes. `mine` and `rows` are memory for one
        message of each member."""
        members = self.group.members
        starts = {peer: members.index(peer) * layout.nbytes for peer in given}
        self.write(
            [GivenMessage(layout, mine[start : start + layout.nbytes], given[peer]) for peer, start in starts.items()]
        )
        return MessageRows(self.group.backend.all_to_all(rows, mine), layout, rows)

    def received(self, rows: MessageRows) -> dict[int, BoxMessage]:
        """Wait for one row of bytes from each member."""
        self.group.wait(rows.work)
        size = rows.layout.nbytes
        return {
            member: BoxMessage(rows.layout, rows.buffer[rank * size : (rank + 1) * size])
            for rank, member in enumerate(self.group.members)
        }


class BoxMessage(NamedTuple):
    """The bytes of a message that was received, and their layout."""

    layout: MessageLayout
    buffer: torch.Tensor


class GivenMessage(NamedTuple):
    """A message of this worker: the boxes of the tasks, None where the receiver takes none."""

    layout: MessageLayout
    buffer: torch.Tensor
    boxes: Sequence[Slices | None]


class MessageRows(NamedTuple):
    """A collective that fills one row of bytes for each member."""

    work: Any
    layout: MessageLayout
    buffer: torch.Tensor
