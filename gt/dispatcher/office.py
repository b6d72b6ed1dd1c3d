"""Instructions, reports, comings and goings in; messages for workers and clients out. No sockets, clocks, threads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from gt.core.events import Direction, Event, Message, Observer
from gt.core.messages import (
    Answer,
    Collective,
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
    ReadTraffic,
    Redistribute,
    Report,
    RunOp,
    StoreReady,
    Synchronize,
    Synchronized,
    Traffic,
    TrafficRead,
    WorkerCreateTensor,
    WorkerDefineOp,
    WorkerDefineProgram,
    WorkerEndSession,
    WorkerFetchTensor,
    WorkerForgetOps,
    WorkerFreeTensors,
    WorkerHostStore,
    WorkerInfo,
    WorkerJoinStore,
    WorkerQueryOp,
    WorkerReadTraffic,
    WorkerRunOp,
    WorkerSynchronize,
    session_of,
)
from gt.core.meta import TensorMeta
from gt.dispatcher.mistakes import Refusal, refuse
from gt.dispatcher.planner import Plan, plan_move, plan_op
from gt.dispatcher.state import Held, LostWorker, Misfit, NoWorkers, Op, Prepared, Session, State, Worker, without
from gt.sharding.spec import DeviceMesh, ShardingSpec, spec_of, whole

log = logging.getLogger("gt.dispatcher")
sharding_log = logging.getLogger("gt.sharding")
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


Reply: TypeAlias = Fetched | Queried | Failed | Synchronized | Traffic


@dataclass
class Pending:
    """A request that workers have not answered yet, where a query's results will be, and what was answered so far: one
    of the replies, a failure if there is any; `made` counts the tensors that the others made all the same."""

    waiting_for: set[int]
    first: int = 0
    written: tuple[int, ...] = ()
    mesh: DeviceMesh | None = None
    received: dict[int, dict[int, int]] = field(default_factory=dict)
    reply: Reply | None = None
    made: int = 0


class Office:
    """Gives messages in the one order that all workers follow. `observer` sees each of them, if there is one."""

    def __init__(self, observer: Observer | None = None) -> None:
        self.state = State()
        self._observer = observer
        self._out: list[Outgoing] = []
        self._pending: dict[int, Pending] = {}
        self._gone: dict[int, tuple[int, str, str]] = {}
        self._warned: set[str] = set()
        self._sessions_opened = 0
        self._workers_joined = 0
        self._store: WorkerJoinStore | None = None
        self._store_host = -1
        self._actions: dict[type, Callable[[Session, Any, Buffer | None], None]] = {
            RunOp: self._run_op,
            FreeTensors: self._free,
            QueryOp: self._query,
            CreateTensor: self._create,
            Redistribute: self._redistribute,
            FetchTensor: self._fetch,
            LocateTensor: self._locate,
            Synchronize: self._synchronize,
            ReadTraffic: self._read_traffic,
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
        alone = DeviceMesh([1], ["w"], [ident])
        self.state.workers[ident] = Worker(WorkerInfo(ident, device, host, pid), alone, ready=False)
        self._note("CONNECT", f"worker {ident}", None)
        if self._store is not None:
            self._command((ident,), self._store)
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
                self._command((self._store_host,), WorkerHostStore())
        elif len(workers) == 2:
            self._command((self._store_host,), WorkerHostStore())
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
        losses = self.state.lose_worker(ident)
        self._free_on_workers(losses.useless)
        for tensor, alias in losses.promoted:
            held = self.state.tensors[tensor]
            self._rename(self.state.sessions[session_of(tensor)], held, alias, tensor, 0)
        if ident == self._store_host:
            self._store = None
            for worker in self.state.workers.values():
                worker.ready = False
            self._arrange_store()
        for request, pending in list(self._pending.items()):
            rest = without(pending.mesh, ident) if pending.mesh is not None and ident in pending.mesh else None
            if rest is not None:
                self._go_on_without(ident, request, pending, rest)
            elif ident in pending.waiting_for:
                self._lose_request(request, ident)
        for session in self.state.sessions:
            self._answer(session, Lost(0, ident, pid, reason, last_op))
        return self._take_out()

    def _go_on_without(self, worker: int, request: int, pending: Pending, rest: DeviceMesh) -> None:
        """Every worker of a query's mesh gives the same answer."""
        pending.mesh = rest
        pending.waiting_for.discard(worker)
        if not pending.waiting_for:
            self._conclude(request, None)

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
        for worker in self.state.workers.values():
            worker.known = {code for code in worker.known if session_of(code) != ident}
        self._command(tuple(self.state.workers), WorkerEndSession(ident))

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
                self._carry_out(session, refuse(self.state, session, instruction, error, self._gone))
            if type(instruction) is Goodbye:
                break
        return self._take_out()

    def _run_op(self, session: Session, op: RunOp, _: Buffer | None) -> None:
        known = session.ops[op.code]
        inputs, outputs = op.inputs, op.outputs
        tensors = self.state.tensors
        try:
            specs = tuple([tensors[ident].spec for ident in inputs])
            prepared = known.plans[specs] if inputs and known.layout is None and not known.again(inputs) else None
        except KeyError:
            prepared = None
        if prepared is None or len(outputs) != known.gives:
            prepared = self._prepare(session, known, op)
        if prepared.moves:
            inputs = self._taken(session, prepared.plan, inputs, known.signature.op, op.site)
        place = self.state.place
        copies = self._consume(known.signature.writes, op.inputs) if known.signature.writes else []
        for ident, held in zip(outputs, prepared.results, strict=True):
            place(ident, held)
        if session.watches:
            self._collect(session, prepared.plan.collectives, op.site)
        command = WorkerRunOp(prepared.code, inputs, outputs, op.scalars, op.site)
        self._command(prepared.plan.workers, command, None, prepared.meets)
        self._free_on_workers(copies)

    def _prepare(self, session: Session, op: Op, call: RunOp) -> Prepared:
        """The plan for an op with these inputs, of which the workers are told when it is new."""
        inputs = call.inputs
        if len(inputs) != op.takes or len(call.outputs) != op.gives:
            raise Misfit(f"{op.signature.op} takes {op.takes} tensors and gives {op.gives}")
        held = self._with_targets_together(session, op, call)
        if op.layout is not None:
            self._require(op.layout.mesh)
        alone = held[0].spec.mesh if held else self.state.least_loaded()
        again = op.again(inputs)
        specs: list[ShardingSpec | tuple[int, int]] = [tensor.spec for tensor in held]
        key = (*specs, *again.items()) or (op.layout or whole(alone, 0),)
        found = op.plans.get(key)
        if found is None:
            metas = [tensor.meta for tensor in held]
            plan = plan_op(op.signature, metas, [tensor.spec for tensor in held], alone, bool(again), again)
            found = op.plans[key] = self._announce(session, plan, op.code, op.signature.op, op.takes)
            self._warn(session, plan.gathered, call.site)
        if found.plan.program is None:
            self._tell(session, found.plan.workers, op.code)
        return found

    def _warn(self, session: Session, op: str, site: int) -> None:
        """Say once of each op that it cannot run on shards."""
        if op and op not in self._warned:
            self._warned.add(op)
            where = session.site(site)
            text = "%s has no sharding rule for this call: its inputs are gathered and it runs whole (%s)"
            sharding_log.warning(text, op, where)

    def _with_targets_together(self, session: Session, op: Op, call: RunOp) -> list[Held]:
        """The inputs of an op, after all that it writes to was brought to where the first of it is."""
        held = [self.state.held(ident) for ident in call.inputs]
        writes = op.signature.writes
        apart = [place for place in writes if held[place].spec.mesh is not held[writes[0]].spec.mesh]
        for place in apart:
            self._relayout(session, call.inputs[place], held[writes[0]].spec.mesh, call.site)
        return [self.state.held(ident) for ident in call.inputs] if apart else held

    def _require(self, mesh: DeviceMesh) -> None:
        """The workers of a mesh that a client names must be there."""
        for worker in mesh.workers:
            if worker in self._gone:
                raise LostWorker(worker)
            if worker not in self.state.workers:
                raise Misfit(f"the mesh {mesh} names worker {worker}, which is not there")

    def _announce(self, session: Session, plan: Plan, code: int, op: str, takes: int) -> Prepared:
        results = tuple([Held.of(meta, spec) for meta, spec in plan.results])
        moves = plan.takes != tuple([(place, None) for place in range(takes)])
        if plan.program is None:
            return Prepared(plan, code, results, moves, False)
        code = session.new_id()
        session.programs[code] = op
        self._command(plan.workers, WorkerDefineProgram(code, op, plan.program))
        return Prepared(plan, code, results, moves, bool(plan.collectives))

    def _taken(self, session: Session, plan: Plan, inputs: tuple[int, ...], op: str, site: int) -> tuple[int, ...]:
        """The ids of what a plan takes, after moving what is not there yet."""
        as_they_are = [inputs[place] for place, spec in plan.takes if spec is None]
        return tuple(
            [
                inputs[place]
                if spec is None
                else self._available(session, inputs[place], spec, op, site, inputs[place] in as_they_are)
                for place, spec in plan.takes
            ]
        )

    def _available(
        self, session: Session, ident: int, spec: ShardingSpec, op: str, site: int, keeps: bool = False
    ) -> int:
        """The id of a tensor in the layout that an op needs. Copies are kept until the tensor is freed or changed; a
        partial tensor that is reduced is not kept as it was, unless the op `keeps` it for another of its inputs."""
        held = self.state.held(ident)
        if held.spec is spec:
            return ident
        copies = self.state.copies.get(ident, {})
        if spec in copies:
            return copies[spec]
        instead = bool(held.spec.partial) and held.spec.mesh is spec.mesh and not spec.partial and not keeps
        alias = ident if instead else session.new_id()
        self._move(session, held, ident, alias, spec, op, site)
        if instead:
            self.state.lay_out(ident, spec)
        else:
            self.state.add_copy(ident, spec, alias)
        return alias

    def _move(
        self, session: Session, held: Held, ident: int, alias: int, spec: ShardingSpec, op: str, site: int
    ) -> None:
        key = (held.meta, held.spec, spec)
        prepared = session.moves.get(key)
        if prepared is None:
            plan = plan_move(held.meta, held.spec, spec)
            prepared = session.moves[key] = self._announce(session, plan, 0, "redistribute", 1)
        if session.watches:
            self._collect(session, prepared.plan.collectives, site, op)
        command = WorkerRunOp(prepared.code, (ident,), (alias,), (), site)
        self._command(prepared.plan.workers, command, None, prepared.meets)

    def _consume(self, writes: Sequence[int], inputs: Sequence[int]) -> list[tuple[int, DeviceMesh]]:
        """Written tensors go on under new ids and their old ids are gone. Gives the copies of what they were, to be
        freed when the op has used them."""
        return [copy for place in writes for copy in self.state.remove(inputs[place])[1:]]

    def _query(self, session: Session, query: QueryOp, _: Buffer | None) -> None:
        """Runs on whole tensors, since only running it tells what it gives."""
        op = session.ops[query.code]
        if len(query.inputs) != op.takes or len(query.written) != len(op.signature.writes):
            raise Misfit(f"{op.signature.op} takes {op.takes} tensors and writes {len(op.signature.writes)}")
        held = [self.state.held(ident) for ident in query.inputs]
        mesh = self._meeting_place(op, held)
        for place in op.signature.writes:
            self._relayout(session, query.inputs[place], mesh, query.site)
        inputs = tuple(
            [
                self._available(
                    session, ident, whole(mesh, len(self.state.held(ident).meta.shape)), op.signature.op, query.site
                )
                for ident in query.inputs
            ]
        )
        self._tell(session, mesh.workers, query.code)
        metas = [self.state.held(query.inputs[place]).meta for place in op.signature.writes]
        copies = self._consume(op.signature.writes, query.inputs)
        for ident, meta in zip(query.written, metas, strict=True):
            self.state.place(ident, Held.of(meta, whole(mesh, len(meta.shape))))
        self._pending[query.request] = Pending(set(mesh.workers), query.first, query.written, mesh)
        command = WorkerQueryOp(
            query.request, query.code, inputs, query.written, query.first, query.scalars, query.site
        )
        self._command(mesh.workers, command)
        self._free_on_workers(copies)

    def _meeting_place(self, op: Op, held: Sequence[Held]) -> DeviceMesh:
        """Where a query runs: where what it writes to is, or else where most bytes are."""
        if op.signature.writes:
            return held[op.signature.writes[0]].spec.mesh
        largest = max(held, key=lambda tensor: tensor.meta.nbytes, default=None)
        return self.state.least_loaded() if largest is None else largest.spec.mesh

    def _relayout(self, session: Session, ident: int, mesh: DeviceMesh, site: int) -> None:
        """Make a tensor whole on a mesh for good."""
        held = self.state.held(ident)
        target = whole(mesh, len(held.meta.shape))
        if held.spec is target:
            return
        alias = self._available(session, ident, target, "", site)
        if alias == ident:
            return
        freed = self.state.remove(ident)
        self.state.place(ident, Held.of(held.meta, target))
        apart = tuple([worker for worker in held.spec.mesh.workers if worker not in mesh])
        if apart:
            self._command(apart, WorkerFreeTensors((ident,)))
        self._rename(session, self.state.tensors[ident], alias, ident, site)
        self._free_on_workers([(copy, where) for copy, where in freed[1:] if copy != alias])

    def _rename(self, session: Session, held: Held, alias: int, ident: int, site: int) -> None:
        """Give what workers know by one id another one."""
        key = (held.meta, held.spec, held.spec)
        prepared = session.moves.get(key)
        if prepared is None:
            plan = plan_move(held.meta, held.spec, held.spec)
            prepared = session.moves[key] = self._announce(session, plan, 0, "redistribute", 1)
        self._command(held.spec.mesh.workers, WorkerRunOp(prepared.code, (alias,), (ident,), (), site))
        self._command(held.spec.mesh.workers, WorkerFreeTensors((alias,)))

    def _tell(self, session: Session, workers: Sequence[int], code: int) -> None:
        """Define an op where it is about to run for the first time."""
        new = [worker for worker in workers if code not in self.state.workers[worker].known]
        if new:
            for worker in new:
                self.state.workers[worker].known.add(code)
            self._command(tuple(new), WorkerDefineOp(code, session.ops[code].signature))

    def _create(self, session: Session, created: CreateTensor, buffer: Buffer | None) -> None:
        mesh = self.state.least_loaded()
        self.state.place(created.id, Held.of(created.meta, whole(mesh, len(created.meta.shape))))
        command = WorkerCreateTensor(created.id, created.meta, created.segment, created.site)
        self._command(mesh.workers, command, buffer)

    def _redistribute(self, session: Session, move: Redistribute, _: Buffer | None) -> None:
        held = self.state.held(move.input)
        spec = spec_of(move.layout)
        if len(spec.dims) != len(held.meta.shape):
            raise Misfit(f"a layout of {len(spec.dims)} dims for a tensor of {len(held.meta.shape)}")
        self._require(spec.mesh)
        self._move(session, held, move.input, move.output, spec.normal(held.meta.shape), "redistribute", move.site)
        self.state.place(move.output, Held.of(held.meta, spec.normal(held.meta.shape)))

    def _free(self, session: Session, free: FreeTensors, _: Buffer | None) -> None:
        freed: list[tuple[int, DeviceMesh]] = []
        for ident in free.ids:
            freed += self.state.remove(ident)
        self._free_on_workers(freed)

    def _free_on_workers(self, freed: Sequence[tuple[int, DeviceMesh]]) -> None:
        by_mesh: dict[DeviceMesh, list[int]] = {}
        for ident, mesh in freed:
            by_mesh.setdefault(mesh, []).append(ident)
        for mesh, ids in by_mesh.items():
            self._command(mesh.workers, WorkerFreeTensors(tuple(ids)))

    def _fetch(self, session: Session, fetch: FetchTensor, _: Buffer | None) -> None:
        """A tensor that is whole somewhere is read there; another one is gathered on one worker first."""
        held = self.state.held(fetch.id)
        source = next((s for s in (held.spec, *self.state.copies.get(fetch.id, {})) if s.is_whole), None)
        spec = source or whole(self.state.workers[held.spec.mesh.workers[0]].alone, len(held.meta.shape))
        ident = self._available(session, fetch.id, spec, "fetch", 0)
        worker = spec.mesh.workers[0]
        shared = session.host == self.state.workers[worker].info.host
        self._pending[fetch.request] = Pending({worker})
        self._command((worker,), WorkerFetchTensor(fetch.request, ident, shared))
        if source is None:
            self._drop_copy(fetch.id, spec)

    def _drop_copy(self, ident: int, spec: ShardingSpec) -> None:
        """A gathered copy that was made for a reader only."""
        alias = self.state.drop_copy(ident, spec)
        if alias is not None:
            self._command(spec.mesh.workers, WorkerFreeTensors((alias,)))

    def _locate(self, session: Session, locate: LocateTensor, _: Buffer | None) -> None:
        self._answer(session.ident, Located(locate.request, self.state.held(locate.id).spec.record()))

    def _synchronize(self, session: Session, synchronize: Synchronize, _: Buffer | None) -> None:
        if not self.state.workers:
            raise NoWorkers
        self._pending[synchronize.request] = Pending(set(self.state.workers))
        self._command(tuple(self.state.workers), WorkerSynchronize(synchronize.request))

    def _read_traffic(self, session: Session, read: ReadTraffic, _: Buffer | None) -> None:
        if not self.state.workers:
            raise NoWorkers
        session.watches = read.watch
        self._pending[read.request] = Pending(set(self.state.workers))
        self._command(tuple(self.state.workers), WorkerReadTraffic(read.request))

    def _collect(self, session: Session, collectives: Sequence[Collective], site: int, op: str = "") -> None:
        session.collectives += [
            msgspec.structs.replace(collective, site=site, op=op or collective.op) for collective in collectives
        ]

    def _define_op(self, session: Session, define: DefineOp, _: Buffer | None) -> None:
        session.ops[define.code] = Op.of(define.code, define.signature)

    def _forget_ops(self, session: Session, forget: ForgetOps, _: Buffer | None) -> None:
        """The plans of these ops go with them, on the workers too, and so do all moves."""
        ops = [session.ops.pop(code) for code in forget.codes if code in session.ops]
        for prepared in [*[prepared for op in ops for prepared in op.plans.values()], *session.moves.values()]:
            workers = tuple([worker for worker in prepared.plan.workers if worker in self.state.workers])
            if session.programs.pop(prepared.code, None) is not None and workers:
                self._command(workers, WorkerForgetOps((prepared.code,)))
        session.moves.clear()
        for number, worker in self.state.workers.items():
            known = tuple(worker.known.intersection(forget.codes))
            worker.known.difference_update(known)
            if known:
                self._command((number,), WorkerForgetOps(known))

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
            return self.lose_worker(worker, f"left: {report.reason}", "")
        elif report.request in self._pending:
            self._settle(worker, report, buffer)
        return self._take_out()

    def _settle(self, worker: int, report: Reply, buffer: Buffer | None) -> None:
        """An answer to a request; the client gets it when no other worker is waited for."""
        pending = self._pending[report.request]
        pending.waiting_for.discard(worker)
        if pending.reply is None or isinstance(report, Failed):
            pending.reply = report
        if isinstance(report, Traffic):
            pending.received[worker] = report.received
        elif isinstance(report, Queried):
            pending.made = len(_metas(report))
        if not pending.waiting_for:
            self._conclude(report.request, buffer)

    def _conclude(self, request: int, buffer: Buffer | None) -> None:
        pending = self._pending.pop(request)
        session, reply = self.state.sessions[session_of(request)], pending.reply
        assert reply is not None
        if isinstance(reply, Traffic):
            collectives, session.collectives = tuple(session.collectives), []
            self._answer(session.ident, TrafficRead(request, pending.received, collectives))
            return
        if isinstance(reply, Queried):
            self._place_results(pending, reply)
        elif pending.made and pending.mesh is not None:
            made = range(pending.first, pending.first + pending.made)
            self._command(pending.mesh.workers, WorkerFreeTensors(tuple(made)))
        self._answer(session.ident, reply, buffer)

    def _place_results(self, pending: Pending, report: Queried) -> None:
        """The tensors that a query made, and those that it may have resized."""
        assert pending.mesh is not None
        metas = _metas(report)
        for offset, meta in enumerate(metas):
            self.state.place(pending.first + offset, Held.of(meta, whole(pending.mesh, len(meta.shape))))
        for written, meta in zip(pending.written, report.written, strict=True):
            self.state.remove(written)
            self.state.place(written, Held.of(meta, whole(pending.mesh, len(meta.shape))))

    def _announce_store(self, worker: int, ready: StoreReady) -> None:
        """Process groups meet at the store that one worker hosts."""
        self._store = WorkerJoinStore("127.0.0.1", ready.port, f"hosted by {worker}")
        self._command(tuple(self.state.workers), self._store)
        for member in self.state.workers.values():
            member.ready = True

    # Losses and mistakes

    def _carry_out(self, session: Session, refusal: Refusal) -> None:
        self._free_on_workers(refusal.freed)
        if refusal.lost_with is not None and refusal.request:
            self._lose_request(refusal.request, refusal.lost_with)
        elif refusal.answer is not None:
            self._answer(session.ident, refusal.answer)

    def _lose_request(self, request: int, worker: int) -> None:
        self._pending.pop(request, None)
        pid, reason, last_op = self._gone[worker]
        self._answer(session_of(request), Lost(request, worker, pid, reason, last_op))

    def waits(self) -> dict[int, set[int]]:
        """For whom each session waits."""
        waits: dict[int, set[int]] = {}
        for request, pending in self._pending.items():
            waits.setdefault(session_of(request), set()).update(pending.waiting_for)
        return waits

    def describe_op(self, code: int, site: int) -> str:
        """What a worker is at, from the code and the site of its last command; empty where it has run none."""
        session = self.state.sessions.get(session_of(code))
        if not code:
            return ""
        if session is None:
            return "an op of a session that has ended"
        return f"{session.op_name(code)} ({session.site(site)})"

    # Sending

    def _command(
        self, workers: tuple[int, ...], command: Command, buffer: Buffer | None = None, meet: bool = False
    ) -> None:
        if self._observer is not None:
            for worker in workers:
                self._note("WORKER_SEND", f"worker {worker}", command)
        self._out.append(ToWorkers(workers, command, buffer, meet))

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
        op = session.op_name(code) if session is not None else ""
        if isinstance(message, DefineOp | WorkerDefineOp):
            op = message.signature.op
        ident = getattr(message, "id", getattr(message, "output", 0))
        owner = session or self.state.sessions.get(session_of(ident))
        place = getattr(message, "site", None)
        site = owner.site(place) if owner is not None and place is not None else ""
        if isinstance(message, DefineSite):
            site = f"{message.file}:{message.line}"
        self._observer(Event(direction, peer, message, op, site))


def _metas(report: Queried) -> list[TensorMeta]:
    return [result for result in report.results if isinstance(result, TensorMeta)]
