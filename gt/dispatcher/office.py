"""Instructions, reports, comings and goings in; messages for workers and clients out. No sockets, clocks, threads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from gt.core.events import Direction, Event, Message, Observer
from gt.core.messages import (
    Answer,
    Command,
    CreateTensor,
    DefineOp,
    DefineScope,
    DefineSite,
    Failed,
    Fetched,
    FetchTensor,
    ForgetOps,
    FreeTensors,
    Goodbye,
    Instruction,
    Located,
    LocateTensor,
    Lost,
    OpFailed,
    Queried,
    QueryOp,
    Rejected,
    Report,
    RunOp,
    StoreReady,
    Synchronize,
    Synchronized,
    WorkerCreateTensor,
    WorkerDefineOp,
    WorkerEndSession,
    WorkerFetchTensor,
    WorkerForgetOps,
    WorkerFreeTensors,
    WorkerHostStore,
    WorkerInfo,
    WorkerJoinStore,
    WorkerQueryOp,
    WorkerRunOp,
    WorkerSynchronize,
    WorkerTransfer,
    session_of,
)
from gt.core.meta import TensorMeta
from gt.dispatcher.planner import LostInput, Move, NoWorkers, least_loaded, plan_op
from gt.dispatcher.state import Misfit, Op, Session, State, Worker

log = logging.getLogger("gt.dispatcher")
Buffer: TypeAlias = memoryview | bytes | bytearray


class ToWorker(msgspec.Struct, frozen=True, gc=False):
    worker: int
    command: Command
    buffer: Buffer | None = None


class ToClient(msgspec.Struct, frozen=True, gc=False):
    session: int
    answer: Answer
    buffer: Buffer | None = None


Outgoing: TypeAlias = ToWorker | ToClient


@dataclass
class Pending:
    """A request that workers have not answered yet, and where a query's results will be."""

    waiting_for: set[int]
    first: int = 0
    written: tuple[int, ...] = ()


class Office:
    """Gives messages in the one order that all workers follow. `observer` sees each of them, if there is one."""

    def __init__(self, observer: Observer | None = None) -> None:
        self.state = State()
        self._observer = observer
        self._out: list[Outgoing] = []
        self._pending: dict[int, Pending] = {}
        self._gone: dict[int, tuple[int, str, str]] = {}
        self._sessions_opened = 0
        self._workers_joined = 0
        self._store: WorkerJoinStore | None = None
        self._store_host = -1
        self._actions: dict[type, Callable[[Session, Any, Buffer | None], None]] = {
            RunOp: self._run_op,
            FreeTensors: self._free,
            QueryOp: self._query,
            CreateTensor: self._create,
            FetchTensor: self._fetch,
            LocateTensor: self._locate,
            Synchronize: self._synchronize,
            DefineOp: self._define_op,
            ForgetOps: self._forget_ops,
            DefineSite: self._define_site,
            DefineScope: self._define_scope,
            Goodbye: self._goodbye,
        }

    # Comings and goings

    def join_worker(self, device: str, host: str, pid: int) -> tuple[int, list[Outgoing]]:
        """A worker that joins gets an id of its own that no other worker had."""
        ident = self._workers_joined
        self._workers_joined += 1
        self.state.workers[ident] = Worker(WorkerInfo(ident, device, host, pid), ready=False)
        self._note("CONNECT", f"worker {ident}", None)
        if self._store is not None:
            self._command(ident, self._store)
            self.state.workers[ident].ready = True
        else:
            self._arrange_store()
        return ident, self._take_out()

    def _arrange_store(self) -> None:
        """Workers can exchange tensors once all know the store that process groups meet at; one of them hosts it. Until
        then one worker does all the work."""
        workers = self.state.workers
        if not workers or self._store is not None:
            return
        if self._store_host not in workers:
            self._store_host = min(workers)
            if len(workers) > 1:
                self._command(self._store_host, WorkerHostStore())
        elif len(workers) == 2:
            self._command(self._store_host, WorkerHostStore())
        workers[self._store_host].ready = True

    def ready_workers(self) -> tuple[WorkerInfo, ...]:
        return tuple([worker.info for worker in self.state.workers.values() if worker.ready])

    def lose_worker(self, ident: int, reason: str, last_op: str) -> list[Outgoing]:
        """A worker is gone: requests that wait for it fail now, and its tensors when they are next used."""
        if ident not in self.state.workers:
            return []
        pid = self.state.workers[ident].info.pid
        self._gone[ident] = (pid, reason, last_op)
        self._note("DISCONNECT", f"worker {ident}", None)
        self.state.lose_worker(ident)
        if ident == self._store_host:
            self._store = None
            for worker in self.state.workers.values():
                worker.ready = False
            self._arrange_store()
        for request, pending in list(self._pending.items()):
            if ident in pending.waiting_for:
                self._lose_request(request, ident)
        for session in self.state.sessions:
            self._answer(session, Lost(0, ident, pid, reason, last_op))
        return self._take_out()

    def open_session(self, host: str, pid: int) -> int:
        self._sessions_opened += 1
        ident = self._sessions_opened
        self.state.sessions[ident] = Session(ident, host, pid)
        self._note("CONNECT", f"client {ident}", None)
        return ident

    def end_session(self, ident: int) -> list[Outgoing]:
        """A client has left, politely or not: everything it held is freed."""
        self._end(ident)
        return self._take_out()

    def _end(self, ident: int) -> None:
        session = self.state.sessions.pop(ident, None)
        if session is None:
            return
        self._note("DISCONNECT", f"client {ident}", None)
        for tensor in self.state.held_by(ident):
            self.state.remove(tensor)
        for request in [request for request in self._pending if session_of(request) == ident]:
            del self._pending[request]
        for number, worker in self.state.workers.items():
            worker.known = {code for code in worker.known if session_of(code) != ident}
            self._command(number, WorkerEndSession(ident))

    # Instructions

    def instruct(self, ident: int, batch: Sequence[Instruction], buffers: Sequence[Buffer]) -> list[Outgoing]:
        log.debug("client %d: %d instructions and %d tensors", ident, len(batch), len(buffers))
        session = self.state.sessions[ident]
        remaining = iter(buffers)
        actions = self._actions
        for instruction in batch:
            if self._observer is not None:
                self._note("RECV", f"client {ident}", instruction)
            buffer = next(remaining) if type(instruction) is CreateTensor else None
            try:
                actions[type(instruction)](session, instruction, buffer)
            except Exception as error:
                self._refuse(session, instruction, error)
            if type(instruction) is Goodbye:
                break
        return self._take_out()

    def _run_op(self, session: Session, op: RunOp, _: Buffer | None) -> None:
        code, inputs, outputs = op.code, op.inputs, op.outputs
        known = session.ops[code]
        if len(inputs) != known.takes or len(outputs) != known.gives:
            raise Misfit(f"{known.signature.op} takes {known.takes} tensors and gives {known.gives}")
        worker, moves = plan_op(self.state, inputs, known.writes)
        if moves:
            self._move(moves)
        if code not in self.state.workers[worker].known:
            self._tell(session, worker, code)
        place = self.state.place_sized
        for ident, meta, nbytes in zip(outputs, known.outputs, known.sizes, strict=False):
            place(ident, meta, nbytes, worker)
        if known.writes:
            written = [inputs[place] for place in known.writes]
            self._renew(worker, written, outputs[len(known.outputs) :])
        self._command(worker, WorkerRunOp(code, inputs, outputs, op.scalars, op.site))

    def _query(self, session: Session, op: QueryOp, _: Buffer | None) -> None:
        known = session.ops[op.code]
        if len(op.inputs) != known.takes or len(op.written) != len(known.writes):
            raise Misfit(f"{known.signature.op} takes {known.takes} tensors and writes {len(known.writes)}")
        worker, moves = plan_op(self.state, op.inputs, known.writes)
        self._move(moves)
        self._tell(session, worker, op.code)
        self._renew(worker, [op.inputs[place] for place in known.writes], op.written)
        self._pending[op.request] = Pending({worker}, op.first, op.written)
        self._command(worker, WorkerQueryOp(op.request, op.code, op.inputs, op.written, op.first, op.scalars, op.site))

    def _renew(self, worker: int, written: Sequence[int], renewed: Sequence[int]) -> None:
        """Written tensors go on under new ids, at the one place where they were written."""
        for old, new in zip(written, renewed, strict=True):
            meta = self.state.metas[old]
            for holder in self.state.remove(old):
                if holder != worker:
                    self._command(holder, WorkerFreeTensors((old,)))
            self.state.place(new, meta, worker)

    def _move(self, moves: Sequence[Move]) -> None:
        for ident, source, target in moves:
            command = WorkerTransfer(ident, self.state.metas[ident], source, target)
            self._command(source, command)
            self._command(target, command)
            self.state.copy(ident, target)

    def _tell(self, session: Session, worker: int, code: int) -> None:
        """Define an op where it is about to run for the first time."""
        known = self.state.workers[worker].known
        if code not in known:
            known.add(code)
            self._command(worker, WorkerDefineOp(code, session.ops[code].signature))

    def _create(self, session: Session, created: CreateTensor, buffer: Buffer | None) -> None:
        worker = least_loaded(self.state)
        self.state.place(created.id, created.meta, worker)
        self._command(worker, WorkerCreateTensor(created.id, created.meta, created.segment, created.site), buffer)

    def _free(self, session: Session, free: FreeTensors, _: Buffer | None) -> None:
        per_worker: dict[int, list[int]] = {}
        for ident in free.ids:
            for worker in self.state.remove(ident):
                per_worker.setdefault(worker, []).append(ident)
        for worker, ids in per_worker.items():
            self._command(worker, WorkerFreeTensors(tuple(ids)))

    def _fetch(self, session: Session, fetch: FetchTensor, _: Buffer | None) -> None:
        worker = plan_op(self.state, (fetch.id,), ()).worker
        shared = session.host == self.state.workers[worker].info.host
        self._pending[fetch.request] = Pending({worker})
        self._command(worker, WorkerFetchTensor(fetch.request, fetch.id, shared))

    def _locate(self, session: Session, locate: LocateTensor, _: Buffer | None) -> None:
        plan_op(self.state, (locate.id,), ())
        self._answer(session.ident, Located(locate.request, self.state.homes[locate.id]))

    def _synchronize(self, session: Session, synchronize: Synchronize, _: Buffer | None) -> None:
        if not self.state.workers:
            raise NoWorkers
        self._pending[synchronize.request] = Pending(set(self.state.workers))
        for worker in self.state.workers:
            self._command(worker, WorkerSynchronize(synchronize.request))

    def _define_op(self, session: Session, define: DefineOp, _: Buffer | None) -> None:
        session.ops[define.code] = Op.of(define.signature)

    def _forget_ops(self, session: Session, forget: ForgetOps, _: Buffer | None) -> None:
        for code in forget.codes:
            session.ops.pop(code, None)
        for number, worker in self.state.workers.items():
            known = tuple(worker.known.intersection(forget.codes))
            worker.known.difference_update(known)
            if known:
                self._command(number, WorkerForgetOps(known))

    def _define_site(self, session: Session, define: DefineSite, _: Buffer | None) -> None:
        session.sites[define.code] = (define.file, define.line)

    def _define_scope(self, session: Session, define: DefineScope, _: Buffer | None) -> None:
        session.scopes[define.code] = define.name

    def _goodbye(self, session: Session, goodbye: Goodbye, _: Buffer | None) -> None:
        self._end(session.ident)

    # Reports

    def report(self, worker: int, report: Report, buffer: Buffer | None) -> list[Outgoing]:
        if self._observer is not None:
            self._note("WORKER_RECV", f"worker {worker}", report)
        if isinstance(report, OpFailed):
            self._answer(report.session, report)
        elif isinstance(report, StoreReady):
            self._announce_store(worker, report)
        elif isinstance(report, Goodbye):
            return self.lose_worker(worker, f"left: {report.reason}", self.last_op(worker, -1))
        elif report.request in self._pending:
            self._settle(worker, report, buffer)
        return self._take_out()

    def _settle(self, worker: int, report: Fetched | Queried | Failed | Synchronized, buffer: Buffer | None) -> None:
        """An answer to a request; the client gets it when no other worker is waited for."""
        pending = self._pending[report.request]
        pending.waiting_for.discard(worker)
        if pending.waiting_for:
            return
        del self._pending[report.request]
        ident = session_of(report.request)
        if isinstance(report, Queried) and ident in self.state.sessions:
            self._place_results(self.state.sessions[ident], pending, worker, report)
        self._answer(ident, report, buffer)

    def _place_results(self, session: Session, pending: Pending, worker: int, report: Queried) -> None:
        """The tensors that a query made, and those that it may have resized."""
        metas = [result for result in report.results if isinstance(result, TensorMeta)]
        for offset, meta in enumerate(metas):
            self.state.place(pending.first + offset, meta, worker)
        for written, meta in zip(pending.written, report.written, strict=True):
            self.state.remove(written)
            self.state.place(written, meta, worker)

    def _announce_store(self, worker: int, ready: StoreReady) -> None:
        """Process groups meet at the store that one worker hosts."""
        self._store = WorkerJoinStore("127.0.0.1", ready.port, f"hosted by {worker}")
        for number, member in self.state.workers.items():
            self._command(number, self._store)
            member.ready = True

    # Losses and mistakes

    def _refuse(self, session: Session, instruction: Instruction, error: Exception) -> None:
        """An instruction that cannot be done: something it needs is lost, or the client is wrong about something."""
        try:
            if isinstance(error, LostInput):
                self._refuse_lost(session, instruction, error.worker)
            elif isinstance(error, NoWorkers) and self._gone:
                self._refuse_lost(session, instruction, max(self._gone))
            elif isinstance(error, KeyError | NoWorkers | Misfit):
                self._reject(session, instruction, error)
            else:
                raise error
        except KeyError as unknown:
            self._reject(session, instruction, unknown)

    def _refuse_lost(self, session: Session, instruction: Instruction, worker: int) -> None:
        """An instruction needs what was lost with a worker: a request is answered so, and results are lost too."""
        if isinstance(instruction, CreateTensor):
            self.state.lose(instruction.id, instruction.meta, worker)
        elif isinstance(instruction, RunOp):
            known = session.ops[instruction.code]
            self._require_known(instruction.inputs)
            for ident, meta in zip(instruction.outputs, known.outputs, strict=False):
                self.state.lose(ident, meta, worker)
            renewed = instruction.outputs[len(known.outputs) :]
            self._lose_written([instruction.inputs[place] for place in known.writes], renewed, worker)
        elif isinstance(instruction, QueryOp):
            self._require_known(instruction.inputs)
            written = [instruction.inputs[place] for place in session.ops[instruction.code].writes]
            self._lose_written(written, instruction.written, worker)
        request = getattr(instruction, "request", 0)
        if request:
            self._lose_request(request, worker)

    def _require_known(self, inputs: Sequence[int]) -> None:
        for ident in inputs:
            if ident not in self.state.metas:
                raise KeyError(ident)

    def _lose_written(self, written: Sequence[int], renewed: Sequence[int], worker: int) -> None:
        """What should have been overwritten has no value now; the old one is freed, as the write would have done."""
        for old, new in zip(written, renewed, strict=True):
            meta = self.state.metas[old]
            for holder in self.state.remove(old):
                self._command(holder, WorkerFreeTensors((old,)))
            self.state.lose(new, meta, worker)

    def _lose_request(self, request: int, worker: int) -> None:
        self._pending.pop(request, None)
        pid, reason, last_op = self._gone[worker]
        self._answer(session_of(request), Lost(request, worker, pid, reason, last_op))

    def _reject(self, session: Session, instruction: Instruction, error: Exception) -> None:
        request = getattr(instruction, "request", 0)
        reason = f"{type(instruction).__name__} is not possible: {type(error).__name__}: {error}"
        self._answer(session.ident, Rejected(request, reason))

    def waits(self) -> dict[int, set[int]]:
        """For whom each session waits."""
        waits: dict[int, set[int]] = {}
        for request, pending in self._pending.items():
            waits.setdefault(session_of(request), set()).update(pending.waiting_for)
        return waits

    def last_op(self, worker: int, progress: int) -> str:
        """What a worker was at: the op of the command number it had come to, or (-1) the last one it was sent."""
        known = self.state.workers.get(worker)
        if known is None:
            return ""
        after = known.sent - progress if progress >= 0 else 0
        reached = list(known.recent)[: len(known.recent) - after]
        ops = [command for command in reached if isinstance(command, WorkerRunOp | WorkerQueryOp)]
        return self._resolve(ops[-1]) if ops else ""

    def _resolve(self, command: WorkerRunOp | WorkerQueryOp) -> str:
        session = self.state.sessions.get(session_of(command.code))
        if session is None or command.code not in session.ops:
            return "of a session that has ended"
        return f"{session.ops[command.code].signature.op} ({session.site(command.site)})"

    # Sending

    def _command(self, worker: int, command: Command, buffer: Buffer | None = None) -> None:
        record = self.state.workers[worker]
        record.sent += 1
        record.recent.append(command)
        if self._observer is not None:
            self._note("WORKER_SEND", f"worker {worker}", command)
        self._out.append(ToWorker(worker, command, buffer))

    def _answer(self, session: int, answer: Answer, buffer: Buffer | None = None) -> None:
        if session not in self.state.sessions:
            return
        if self._observer is not None:
            self._note("SEND", f"client {session}", answer)
        self._out.append(ToClient(session, answer, buffer))

    def _take_out(self) -> list[Outgoing]:
        out, self._out = self._out, []
        return out

    def _note(self, direction: Direction, peer: str, message: Message | None) -> None:
        """Tell the observer, with codes resolved to what they stand for."""
        if self._observer is None:
            return
        code = getattr(message, "code", -1)
        session = self.state.sessions.get(session_of(code)) if code >= 0 else None
        op = session.ops[code].signature.op if session is not None and code in session.ops else ""
        if isinstance(message, DefineOp | WorkerDefineOp):
            op = message.signature.op
        owner = session or self.state.sessions.get(session_of(getattr(message, "id", 0)))
        place = getattr(message, "site", None)
        site = owner.site(place) if owner is not None and place is not None else ""
        if isinstance(message, DefineSite):
            site = f"{message.file}:{message.line}"
        self._observer(Event(direction, peer, message, op, site))
