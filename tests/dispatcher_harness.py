"""A dispatcher without sockets, whose state is checked after every message."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.ids import FIRST_DISPATCHER_ID, short_id
from gt.core.message_events import Observer
from gt.core.messages import (
    Answer,
    ByteRange,
    Command,
    CreateTensor,
    DefineOp,
    ForgetOps,
    FreeTensors,
    Instruction,
    QueryOp,
    Redistribute,
    Report,
    RunOp,
    StoreReady,
    WorkerDefineProgram,
    WorkerFetchTensor,
)
from gt.core.meta import TensorMeta
from gt.core.signatures import Number, Signature
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.message_queue import Outgoing, ToClient, ToWorkers
from gt.sharding.spec import DeviceMesh, ShardingSpec, whole
from gt.sharding.spec_text import parse_spec
from gt.wire.codec import Buffer
from tests.dispatcher.invariants import check_invariants
from tests.records import NO_RULE, SMALL, own

A, B, C, D, E = map(own, range(1, 6))
OP, OP2, REQUEST, REQUEST2 = own(100), own(101), own(200), own(201)
NAMES = {A: "A", B: "B", C: "C", D: "D", E: "E", OP: "op", OP2: "op2"}
PAIR = DeviceMesh([2], ["x"], [0, 1])


def solo_mesh(worker: int) -> DeviceMesh:
    return DeviceMesh([1], ["w"], [worker])


def at(worker: int, rank: int = 1) -> ShardingSpec:
    """The layout of a tensor on one worker."""
    return whole(solo_mesh(worker), rank)


def over(text: str, mesh: DeviceMesh = PAIR) -> ShardingSpec:
    return parse_spec(text, mesh)


def given(number: int) -> int:
    """The n-th id that the dispatcher gave in session 1."""
    return own(FIRST_DISPATCHER_ID + number)


class DispatcherHarness:
    """A dispatcher whose `workers` can exchange tensors. Each call returns the messages to send."""

    def __init__(self, workers: int = 1, observer: Observer | None = None) -> None:
        self.dispatcher = Dispatcher(observer)
        self.state = self.dispatcher.state
        for _ in range(workers):
            self.join()
        if workers > 1:
            self.report(0, StoreReady(40000))

    def join(self, host: str = "here", address: str = "127.0.0.1") -> list[Outgoing]:
        pid = 1000 + self.state.workers_joined
        number, outgoing = self.dispatcher.join_worker("cpu", host, pid, address=address)
        assert number in self.state.workers
        return self.checked(outgoing)

    def open(self, host: str = "here") -> int:
        return self.dispatcher.open_session(host, 2000)

    def close(self, session: int = 1) -> list[Outgoing]:
        return self.checked(self.dispatcher.end_session(session))

    def tell(self, *batch: Instruction, session: int = 1, buffers: Sequence[Buffer] = ()) -> list[Outgoing]:
        """One instruction at a time, so that the state is checked after each."""
        outgoing: list[Outgoing] = []
        remaining = list(buffers)
        for instruction in batch:
            given = [remaining.pop(0) if remaining else b""] if isinstance(instruction, CreateTensor) else []
            outgoing += self.checked(self.dispatcher.instruct(session, [instruction], given))
        return outgoing

    def report(self, worker: int, report: Report, buffer: Buffer | None = None) -> list[Outgoing]:
        return self.checked(self.dispatcher.report(worker, report, buffer))

    def lose(self, worker: int, reason: str = "was killed", last_op: str = "aten.mm") -> list[Outgoing]:
        return self.checked(self.dispatcher.lose_worker(worker, reason, last_op))

    def create(self, *ids: int, meta: TensorMeta = SMALL, session: int = 1) -> list[Outgoing]:
        return self.tell(*[create(ident, meta) for ident in ids], session=session)

    def redistribute(self, source: int, target: int, text: str, mesh: DeviceMesh = PAIR) -> list[Outgoing]:
        return self.tell(Redistribute(source, target, over(text, mesh).record(), 0))

    def layout(self, ident: int) -> str:
        """The layout of a tensor as text: `x, - on 0 1`."""
        spec = self.state.tensors[ident].spec
        return f"{spec} on {_row(spec.mesh.workers)}"

    def define(self, op_id: int, signature: Signature, session: int = 1) -> list[Outgoing]:
        return self.tell(DefineOp(op_id, signature), session=session)

    def checked(self, outgoing: list[Outgoing]) -> list[Outgoing]:
        check_invariants(self.state)
        return outgoing


def create(ident: int, meta: TensorMeta = SMALL, site: int = 0) -> CreateTensor:
    return CreateTensor(ident, meta, ByteRange("", meta.nbytes), None, site)


def run(
    op_id: int, inputs: tuple[int, ...], outputs: tuple[int, ...], scalars: tuple[Number, ...] = (), site: int = 0
) -> RunOp:
    return RunOp(op_id, inputs, outputs, scalars, 0, site)


def query(
    op_id: int, inputs: tuple[int, ...], written: tuple[int, ...] = (), first: int = D, request: int = REQUEST
) -> QueryOp:
    return QueryOp(request, op_id, inputs, written, first, (), 0, 0)


def harness_with(workers: int = 1, observer: Observer | None = None) -> DispatcherHarness:
    """Session 1, and A, B of 16 bytes each: on workers 0 and 1 where there are two."""
    harness = DispatcherHarness(workers, observer)
    harness.open()
    harness.create(A, B)
    return harness


def sharded_harness(workers: int = 2, text: str = "x", meta: TensorMeta = SMALL) -> DispatcherHarness:
    """Session 1 and a tensor A, laid out over workers 0 and 1."""
    harness = DispatcherHarness(workers)
    harness.open()
    harness.create(E, meta=meta)
    harness.redistribute(E, A, text)
    harness.tell(FreeTensors((E,)))
    return harness


def gathered_harness() -> DispatcherHarness:
    """A over workers 0 and 1, and c2, a whole copy of it on both."""
    harness = sharded_harness()
    harness.define(OP, NO_RULE)
    harness.tell(run(OP, (A,), (B,)))
    assert harness.state.copies == {A: {over("-"): given(2)}}
    return harness


def told(outgoing: Sequence[Outgoing]) -> list[str]:
    """Messages as text: `0 1: c2(A) -> c1` is an op on workers 0 and 1; `0+1` exchange tensors while they run it. c1,
    c2, ... are the ids that the dispatcher gave."""
    return [f"client: {kind(out.answer)}" if isinstance(out, ToClient) else _told(out) for out in outgoing]


def _told(out: ToWorkers) -> str:
    return f"{_row(out.workers, '+' if out.exchanges else ' ')}: {_print(out.command)}"


def _row(workers: Sequence[int], between: str = " ") -> str:
    return between.join(map(str, workers))


def _names(*ids: int) -> str:
    return ", ".join([NAMES.get(ident) or short_id(ident) for ident in ids])


def _print(command: Command) -> str:
    match command:
        case RunOp(op_id, inputs, outputs):
            return f"{_names(op_id)}({_names(*inputs)}) -> {_names(*outputs)}"
        case QueryOp(_, op_id, inputs, written):
            return f"{_names(op_id)}?({_names(*inputs)}) -> {_names(*written)}".removesuffix(" -> ")
        case DefineOp(op_id):
            return f"define {_names(op_id)}"
        case WorkerDefineProgram(op_id, op):
            return f"define {_names(op_id)}: {op}"
        case FreeTensors(ids):
            return f"free {_names(*ids)}"
        case ForgetOps(op_ids):
            return f"forget {_names(*op_ids)}"
        case WorkerFetchTensor(_, ident):
            return f"fetch {_names(ident)}"
    return kind(command)


def answers(outgoing: Sequence[Outgoing]) -> list[Answer]:
    return [message.answer for message in outgoing if isinstance(message, ToClient)]


def kind(record: object) -> str:
    """The kind of a record, for the name of a test."""
    return type(record).__name__
