"""What leaves the office: messages for workers and clients, in one order."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from gt.core.events import Direction, Event, Message, Observer
from gt.core.messages import Answer, Command, DefineOp, DefineSite
from gt.core.record_fields import owner_of
from gt.dispatcher.state import State

Buffer: TypeAlias = memoryview | bytes | bytearray


class ToWorkers(msgspec.Struct, frozen=True, gc=False):
    """A command for some workers. Where they `meet`, they exchange tensors while they run it."""

    workers: tuple[int, ...]
    command: Command
    buffer: Buffer | None = None
    meet: bool = False


class ToClient(msgspec.Struct, frozen=True, gc=False):
    session: int
    answer: Answer
    buffer: Buffer | None = None


Outgoing: TypeAlias = ToWorkers | ToClient


class MessageQueue:
    """Collects messages. `observer` sees each of them, if there is one, when it is certain that it is sent."""

    def __init__(self, state: State, observer: Observer | None) -> None:
        self.observer = observer
        self._state = state
        self.out: list[Outgoing] = []

    def command(
        self, workers: tuple[int, ...], command: Command, buffer: Buffer | None = None, meet: bool = False
    ) -> None:
        self.out.append(ToWorkers(workers, command, buffer, meet))

    def answer(self, session: int, answer: Answer, buffer: Buffer | None = None) -> None:
        """Nothing is said to a session that has ended."""
        if session in self._state.sessions:
            self.out.append(ToClient(session, answer, buffer))

    def take(self) -> list[Outgoing]:
        """What was collected since the last time."""
        out, self.out = self.out, []
        return out

    def note_from(self, start: int) -> None:
        """Tell the observer of the messages from one on."""
        for message in self.out[start:]:
            if isinstance(message, ToClient):
                self.note("SEND", f"client {message.session}", message.answer)
            else:
                for worker in message.workers:
                    self.note("WORKER_SEND", f"worker {worker}", message.command)

    def note(self, direction: Direction, peer: str, message: Message | None) -> None:
        """Tell the observer, with codes resolved to what they stand for."""
        if self.observer is None:
            return
        session = self._state.sessions.get(owner_of(message)) if message is not None else None
        op_id, site_id = getattr(message, "op_id", None), getattr(message, "site", None)
        op = session.op_name(op_id) if session is not None and op_id is not None else ""
        if isinstance(message, DefineOp):
            op = message.signature.op
        site = session.site(site_id) if session is not None and site_id is not None else ""
        if isinstance(message, DefineSite):
            site = f"{message.file}:{message.line}"
        self.observer(Event(direction, peer, message, op, site))
