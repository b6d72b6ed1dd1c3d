"""The queue of messages to workers and clients, in the one order that all workers follow."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from gt.core.message_events import Details, Direction, Event, ObservedMessage, Observer, TensorCreated
from gt.core.message_fields import owner_of
from gt.core.messages import (
    Answer,
    Command,
    DefineOp,
    DefineSite,
    FreeTensors,
    RunOp,
    RunSegment,
    WorkerCreateTensor,
)
from gt.dispatcher.session_records import SessionRecord
from gt.dispatcher.state import State
from gt.dispatcher.tensor_records import TensorRecord
from gt.sharding.spec import DeviceMesh, local_box
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
    """Messages wait in `queued` until `take`. The `observer`, if there is one, sees each message once it is certain to
    be sent."""

    def __init__(self, state: State, observer: Observer | None) -> None:
        self.observer = observer
        self._state = state
        self.queued: list[Outgoing] = []

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

    def take(self) -> list[Outgoing]:
        queued, self.queued = self.queued, []
        return queued

    def observe_from(self, start: int) -> None:
        """Show the observer the queued messages from position `start` on."""
        for message in self.queued[start:]:
            if isinstance(message, ToClient):
                self.observe("SEND", f"client {message.session}", message.answer)
            else:
                for command in expand_command(self._owner(message.command), message.command):
                    for worker in message.workers:
                        self._observe_command(worker, command)

    def _observe_command(self, worker: int, command: Command) -> None:
        """Show the observer a command, and after it the tensors that it creates from nothing."""
        peer = f"worker {worker}"
        if isinstance(command, WorkerCreateTensor):
            self.observe("WORKER_SEND", peer, command, self._describe_part(command.id, worker))
            return
        self.observe("WORKER_SEND", peer, command)
        if isinstance(command, RunOp) and not command.inputs and self.observer is not None:
            op, site = describe_message(self._owner(command), command)
            for output in command.outputs:
                details = self._describe_part(output, worker)
                self.observer(Event("WORKER_SEND", peer, TensorCreated(output), op, site, details=details))

    def _describe_part(self, ident: int, worker: int) -> Details:
        """The part of a tensor on a worker. Nothing is known of a tensor that a segment has freed already."""
        tensor = self._state.tensors.get(ident)
        return describe_part(tensor, worker) if tensor is not None and worker in tensor.spec.mesh else ()

    def _owner(self, message: ObservedMessage) -> SessionRecord | None:
        return self._state.sessions.get(owner_of(message))

    def observe(self, direction: Direction, peer: str, message: ObservedMessage | None, details: Details = ()) -> None:
        """Show the observer a message, with the names of its op, site and scope."""
        if self.observer is None:
            return
        session = self._owner(message) if message is not None else None
        op, site = describe_message(session, message)
        self.observer(Event(direction, peer, message, op, site, details=(*details, *_describe_scope(session, message))))


def expand_command(session: SessionRecord | None, command: Command) -> Sequence[Command]:
    """The commands that a RunSegment stands for; any other command alone."""
    if not isinstance(command, RunSegment) or session is None:
        return (command,)
    part = session.segment_parts.get(command.segment_id)
    return part.body.commands(command) if part is not None else (command,)


def describe_message(session: SessionRecord | None, message: ObservedMessage | None) -> tuple[str, str]:
    """The names of a message's op and site; empty if it has none."""
    if isinstance(message, DefineOp):
        return message.signature.op, ""
    if isinstance(message, DefineSite):
        return "", f"{message.file}:{message.line}"
    op_id, site_id = getattr(message, "op_id", None), getattr(message, "site", None)
    op = session.op_name(op_id) if session is not None and op_id is not None else ""
    site = session.site(site_id) if session is not None and site_id is not None else ""
    return op, site


def _describe_scope(session: SessionRecord | None, message: ObservedMessage | None) -> Details:
    scope = session.scopes.get(getattr(message, "scope", 0)) if session is not None else None
    return () if scope is None else (("scope", scope.name),)


def describe_part(tensor: TensorRecord, worker: int) -> Details:
    """The shape of a tensor, the slice of it that a worker holds, and its layout; without spaces, so that `grep` and
    `cut` can find them: axes that cut one dim are separated by a slash."""
    shape = tensor.meta.shape
    box = local_box(tensor.spec, shape, worker)
    spec = str(tensor.spec).replace(", ", ",").replace(" + ", "+").replace("+ ", "+").replace(" ", "/")
    return (
        ("shape", "x".join(map(str, shape)) or "()"),
        ("slice", ",".join([f"{start}:{stop}" for start, stop in box]) or "()"),
        ("spec", spec or "()"),
    )
