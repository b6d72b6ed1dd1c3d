"""An office without sockets, whose state is checked after every message."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.events import Observer
from gt.core.messages import (
    Answer,
    CreateTensor,
    DefineOp,
    Instruction,
    Number,
    QueryOp,
    Report,
    RunOp,
    Segment,
    Signature,
    StoreReady,
)
from gt.core.meta import TensorMeta
from gt.dispatcher.office import Buffer, Office, Outgoing, ToClient
from tests.records import SMALL, own

A, B, C, D, E = map(own, range(1, 6))
OP, OP2, REQUEST, REQUEST2 = own(100), own(101), own(200), own(201)


class Desk:
    """`workers` that can exchange tensors. What the office has to say of a call is what the call returns."""

    def __init__(self, workers: int = 1, observer: Observer | None = None) -> None:
        self.office = Office(observer)
        self.state = self.office.state
        for _ in range(workers):
            self.join()
        if workers > 1:
            self.report(0, StoreReady(40000))

    def join(self, host: str = "here") -> list[Outgoing]:
        number, outgoing = self.office.join_worker("cpu", host, 1000 + self.office._workers_joined)
        assert number in self.state.workers
        return self._checked(outgoing)

    def open(self, host: str = "here") -> int:
        return self.office.open_session(host, 2000)

    def close(self, session: int = 1) -> list[Outgoing]:
        return self._checked(self.office.end_session(session))

    def tell(self, *batch: Instruction, session: int = 1, buffers: Sequence[Buffer] = ()) -> list[Outgoing]:
        """One instruction at a time, so that the state is checked after each."""
        outgoing: list[Outgoing] = []
        remaining = list(buffers)
        for instruction in batch:
            given = [remaining.pop(0) if remaining else b""] if isinstance(instruction, CreateTensor) else []
            outgoing += self._checked(self.office.instruct(session, [instruction], given))
        return outgoing

    def report(self, worker: int, report: Report, buffer: Buffer | None = None) -> list[Outgoing]:
        return self._checked(self.office.report(worker, report, buffer))

    def lose(self, worker: int, reason: str = "was killed", last_op: str = "aten.mm") -> list[Outgoing]:
        return self._checked(self.office.lose_worker(worker, reason, last_op))

    def create(self, *ids: int, meta: TensorMeta = SMALL, session: int = 1) -> list[Outgoing]:
        return self.tell(*[create(ident, meta) for ident in ids], session=session)

    def define(self, code: int, signature: Signature, session: int = 1) -> list[Outgoing]:
        return self.tell(DefineOp(code, signature), session=session)

    def _checked(self, outgoing: list[Outgoing]) -> list[Outgoing]:
        self.state.validate()
        return outgoing


def create(ident: int, meta: TensorMeta = SMALL, site: int = 0) -> CreateTensor:
    return CreateTensor(ident, meta, Segment("", meta.nbytes), 0, site)


def run(
    code: int, inputs: tuple[int, ...], outputs: tuple[int, ...], scalars: tuple[Number, ...] = (), site: int = 0
) -> RunOp:
    return RunOp(code, inputs, outputs, scalars, 0, site)


def query(
    code: int, inputs: tuple[int, ...], written: tuple[int, ...] = (), first: int = D, request: int = REQUEST
) -> QueryOp:
    return QueryOp(request, code, inputs, written, first, (), 0, 0)


def desk_with(workers: int = 1) -> Desk:
    """Session 1, and A, B of 16 bytes each: on workers 0 and 1 where there are two."""
    desk = Desk(workers)
    desk.open()
    desk.create(A, B)
    return desk


def answers(outgoing: Sequence[Outgoing]) -> list[Answer]:
    return [message.answer for message in outgoing if isinstance(message, ToClient)]


def kind(record: object) -> str:
    """How a record is called in the name of a test."""
    return type(record).__name__
