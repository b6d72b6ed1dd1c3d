"""Describes messages for the monitor: with the names of their op, line and scope, and the tensors that they create.

The live log describes each message when it is sent, a capture when it has ended. Both get the same events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gt.core.message_events import Details, Direction, Event, ObservedMessage, TensorCreated
from gt.core.messages import Command, DefineOp, DefineSite, RunOp, RunProgram, WorkerCreateTensor
from gt.dispatcher.op_definitions import MOVE
from gt.dispatcher.state_records import SessionRecord
from gt.dispatcher.tensor_records import TensorRecord
from gt.sharding.spec import local_box


def message_event(
    session: SessionRecord | None,
    direction: Direction,
    peer: str,
    message: ObservedMessage | None,
    time: int = 0,
    details: Details = (),
) -> Event:
    """A message with the names of its op, site and scope. `session` is that of the ids in the message."""
    op, site = describe_message(session, message)
    return Event(direction, peer, message, op, site, time, (*details, *_describe_scope(session, message)))


def command_events(
    session: SessionRecord | None,
    command: Command,
    workers: Sequence[int],
    tensors: Mapping[int, TensorRecord],
    time: int = 0,
) -> Iterator[Event]:
    """The events of a command to some workers, one by one if it stands for several. After a command that creates or
    moves tensors follows an event for each of them. `tensors` are those that were created."""
    for single in expand_command(session, command):
        for worker in workers:
            yield from _events_at_worker(session, single, worker, tensors, time)


def _events_at_worker(
    session: SessionRecord | None, command: Command, worker: int, tensors: Mapping[int, TensorRecord], time: int
) -> Iterator[Event]:
    peer = f"worker {worker}"
    if isinstance(command, WorkerCreateTensor):
        yield message_event(session, "WORKER_SEND", peer, command, time, _describe_part(tensors, command.id, worker))
        return
    yield message_event(session, "WORKER_SEND", peer, command, time)
    op, site = describe_message(session, command)
    for ident in created_by(session, command):
        details = _describe_part(tensors, ident, worker)
        if details or op != MOVE:  # a move goes through ids that exist for a moment, and takes parts from workers
            yield Event("WORKER_SEND", peer, TensorCreated(ident), op, site, time, details)


def created_by(session: SessionRecord | None, command: Command) -> Sequence[int]:
    """The tensors that a command creates from nothing or in another layout: uploaded ones, the results of ops without
    inputs, and what moves give to workers."""
    if isinstance(command, WorkerCreateTensor):
        return (command.id,)
    if isinstance(command, RunOp):
        is_move = session is not None and session.op_name(command.op_id) == MOVE
        return command.outputs if is_move or not command.inputs else ()
    part = session.program_parts.get(command.program_id) if isinstance(command, RunProgram) and session else None
    if part is None:
        return ()
    slots = [slot for op in part.program.ops if not op.inputs for slot in op.outputs]
    return [part.program.id(command, slot) for slot in slots]  # type: ignore[arg-type]


def expand_command(session: SessionRecord | None, command: Command) -> Sequence[Command]:
    """The commands that a RunProgram stands for; any other command alone."""
    if not isinstance(command, RunProgram) or session is None:
        return (command,)
    part = session.program_parts.get(command.program_id)
    return part.program.expand(command) if part is not None else (command,)  # type: ignore[return-value]


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


def _describe_part(tensors: Mapping[int, TensorRecord], ident: int, worker: int) -> Details:
    """The part of a tensor on a worker. Nothing is known of a tensor that a program has freed already."""
    tensor = tensors.get(ident)
    return describe_part(tensor, worker) if tensor is not None and worker in tensor.spec.mesh else ()


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
