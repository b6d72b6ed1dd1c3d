"""The queue of messages to workers and clients, in the one order that all workers follow."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from gt.core.message_events import Direction, ObservedMessage, Observer
from gt.core.message_fields import owner_of
from gt.core.messages import Answer, Command, Failed, FreeTensors, OpFailed
from gt.dispatcher.failure_log import FailureLog
from gt.dispatcher.message_descriptions import command_events, created_by, message_event
from gt.dispatcher.state import State
from gt.dispatcher.state_records import SessionRecord
from gt.dispatcher.tensor_records import TensorRecord
from gt.sharding.spec import DeviceMesh
from gt.wire.codec import Buffer, join


class ToWorkers(msgspec.Struct, frozen=True, gc=False):
    """A command for some workers. With `exchanges`, they exchange tensors while they run it."""

    workers: tuple[int, ...]
    command: Command
    buffer: Buffer | None = None
    exchanges: bool = False


class ToClient(msgspec.Struct, frozen=True, gc=False):
    """An answer, with the bytes of its byte ranges."""

    session: int
    answer: Answer
    buffers: tuple[Buffer, ...] = ()


Outgoing: TypeAlias = ToWorkers | ToClient


def split_bytes(buffer: Buffer | None, sizes: Sequence[int]) -> list[Buffer | None]:
    """The bytes of an upload in parts of these sizes. They are one buffer or, from a socket, several frames; there are
    none if they are in shared memory."""
    if len(sizes) == 1 or not buffer:
        return [buffer] * len(sizes)
    is_framed = isinstance(buffer, list)
    data = memoryview(join(buffer) if is_framed else buffer)  # type: ignore[arg-type]
    ends = itertools.accumulate(sizes)
    parts = [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return [[part] if is_framed else part for part in parts]  # type: ignore[misc]


class MessageQueue:
    """Holds messages in `queued` until `take`. The `observer`, if there is one, sees each message once it is certain to
    be sent. `failures` are those that were reported to clients."""

    def __init__(self, state: State, observer: Observer | None) -> None:
        self.observer = observer
        self._state = state
        self.queued: list[Outgoing] = []
        self.failures = FailureLog()

    def command(
        self, workers: tuple[int, ...], command: Command, buffer: Buffer | None = None, exchanges: bool = False
    ) -> None:
        self.queued.append(ToWorkers(workers, command, buffer, exchanges))

    def free(self, freed: Iterable[tuple[int, DeviceMesh]]) -> None:
        """Free tensors on their meshes, with one command for each mesh."""
        by_mesh: dict[DeviceMesh, list[int]] = {}
        for ident, mesh in freed:
            by_mesh.setdefault(mesh, []).append(ident)
        for mesh, idents in by_mesh.items():
            self.command(mesh.workers, FreeTensors(tuple(idents)))

    def answer(self, session: int, answer: Answer, buffers: tuple[Buffer, ...] = ()) -> None:
        """Does nothing for a session that has ended."""
        if session in self._state.sessions:
            self.queued.append(ToClient(session, answer, buffers))
            if isinstance(answer, OpFailed | Failed):
                self.failures.note(self._state.sessions[session], answer.failure)

    def take(self) -> list[Outgoing]:
        queued, self.queued = self.queued, []
        return queued

    def observe_from(self, start: int) -> None:
        """Show the observer the queued messages from position `start` on."""
        assert self.observer is not None
        for message in self.queued[start:]:
            if isinstance(message, ToClient):
                self.observe("SEND", f"client {message.session}", message.answer)
                continue
            owner, created = self._owner(message.command), self._created_by(message.command)
            for event in command_events(owner, message.command, message.workers, created):
                self.observer(event)

    def created_from(self, start: int) -> dict[int, TensorRecord]:
        """The tensors that the queued messages from position `start` on create on workers, and that still exist."""
        commands = [message.command for message in self.queued[start:] if isinstance(message, ToWorkers)]
        return {ident: tensor for command in commands for ident, tensor in self._created_by(command).items()}

    def _created_by(self, command: Command) -> dict[int, TensorRecord]:
        """Those that a command creates, as they are now: tensors, and copies of tensors."""
        tensors, copies = self._state.tensors, self._state.copy_order
        created = created_by(self._owner(command), command)
        found = {ident: tensors[ident] for ident in created if ident in tensors}
        of_copies = [(copy, *copies[copy]) for copy in created if copy in copies]
        return found | {copy: TensorRecord.of(tensors[ident].meta, spec) for copy, ident, spec in of_copies}

    def _owner(self, message: ObservedMessage) -> SessionRecord | None:
        return self._state.sessions.get(owner_of(message))

    def observe(self, direction: Direction, peer: str, message: ObservedMessage | None) -> None:
        """Show the observer a message, with the names of its op, site and scope."""
        if self.observer is not None:
            owner = self._owner(message) if message is not None else None
            self.observer(message_event(owner, direction, peer, message))
