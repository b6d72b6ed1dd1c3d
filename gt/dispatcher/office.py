"""Instructions, reports, comings and goings in; messages for workers and clients out. No sockets, clocks, threads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from gt.core.events import Observer
from gt.core.ids import session_of
from gt.core.messages import (
    CreateTensor,
    DefineOp,
    DefineScope,
    DefineSite,
    FetchTensor,
    ForgetOps,
    FreeTensors,
    Goodbye,
    Instruction,
    Located,
    LocateTensor,
    Lost,
    OpFailed,
    QueryOp,
    ReadStats,
    ReadTimeline,
    ReadTraffic,
    Redistribute,
    Report,
    RunOp,
    StoreReady,
    Synchronize,
    WorkerCreateTensor,
    WorkerDefineScope,
    WorkerEndSession,
    WorkerFetchTensor,
    WorkerForgetOps,
    WorkerFreeTensors,
    WorkerHostStore,
    WorkerInfo,
    WorkerJoinStore,
    WorkerQueryOp,
    WorkerReadStats,
    WorkerReadTimeline,
    WorkerReadTraffic,
    WorkerRunOp,
    WorkerSynchronize,
)
from gt.dispatcher.mistakes import Refusal, refuse
from gt.dispatcher.placing import Placing
from gt.dispatcher.plans import Plans
from gt.dispatcher.post import Buffer, Outgoing, Post
from gt.dispatcher.requests import Gone, Requests
from gt.dispatcher.state import (
    Held,
    Misfit,
    NoWorkers,
    Op,
    Scope,
    Session,
    State,
    Worker,
    require_layout,
)
from gt.sharding.spec import DeviceMesh, ShardingSpec, spec_of, whole
from gt.signals.policy import Policy

log = logging.getLogger("gt.dispatcher")


class Office:
    """Gives messages in the one order that all workers follow. `observer` sees each of them, if there is one."""

    def __init__(self, observer: Observer | None = None) -> None:
        self.state = State()
        self._gone: dict[int, Gone] = {}
        self._post = Post(self.state, observer)
        self._placing = Placing(self.state, self._post)
        self._requests = Requests(self.state, self._post, self._gone)
        self._plans = Plans(self.state, self._post, self._placing, self._gone)
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
            ReadStats: self._read_stats,
            ReadTimeline: self._read_timeline,
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
        self._post.note("CONNECT", f"worker {ident}", None)
        for session in self.state.sessions.values():
            for code, scope in session.scopes.items():
                self._post.command((ident,), WorkerDefineScope(session.ident, code, scope.name, scope.compile))
        if self._store is not None:
            self._post.command((ident,), self._store)
            self.state.workers[ident].ready = True
        else:
            self._arrange_store()
        return ident, self._post.take()

    def _arrange_store(self) -> None:
        """Workers can exchange tensors once all know the store that process groups meet at; one of them hosts it. Until
        then one worker does all the work."""
        workers = self.state.workers
        if not workers or self._store is not None:
            return
        if self._store_host not in workers:
            self._store_host = min(workers)
            if len(workers) > 1:
                self._post.command((self._store_host,), WorkerHostStore())
        elif len(workers) == 2:
            self._post.command((self._store_host,), WorkerHostStore())
        workers[self._store_host].ready = True

    def ready_workers(self) -> tuple[WorkerInfo, ...]:
        return tuple([worker.info for worker in self.state.workers.values() if worker.ready])

    def lose_worker(self, ident: int, reason: str, last_op: str) -> list[Outgoing]:
        """A worker is gone: requests that wait for it fail now, and its tensors when they are next used."""
        if ident not in self.state.workers:
            return []
        gone = self._gone[ident] = Gone(self.state.workers[ident].info.pid, reason, last_op)
        self._post.note("DISCONNECT", f"worker {ident}", None)
        losses = self.state.lose_worker(ident)
        self._placing.free(losses.useless)
        for tensor, alias in losses.promoted:
            held = self.state.tensors[tensor]
            self._placing.rename(self.state.sessions[session_of(tensor)], held, alias, tensor, 0)
        if ident == self._store_host:
            self._store = None
            for worker in self.state.workers.values():
                worker.ready = False
            self._arrange_store()
        self._requests.lose_worker(ident)
        for session in self.state.sessions.values():
            for op in session.ops.values():
                useless = [key for key, prepared in op.plans.items() if ident in prepared.plan.workers]
                self._plans.forget(session, [op.plans.pop(key) for key in useless])
            self._post.answer(session.ident, Lost(0, ident, *gone))
        return self._post.take()

    def open_session(self, host: str, pid: int) -> int:
        self._sessions_opened += 1
        ident = self._sessions_opened
        self.state.sessions[ident] = Session(ident, host, pid)
        self._post.note("CONNECT", f"client {ident}", None)
        return ident

    def end_session(self, ident: int) -> list[Outgoing]:
        """A client has left, politely or not: everything it held is freed."""
        self._end(ident)
        return self._post.take()

    def _end(self, ident: int) -> None:
        session = self.state.sessions.pop(ident, None)
        if session is None:
            return
        self._post.note("DISCONNECT", f"client {ident}", None)
        for tensor in self.state.held_by(ident):
            self.state.remove(tensor)
        self._requests.end_session(ident)
        for worker in self.state.workers.values():
            worker.known = {code for code in worker.known if session_of(code) != ident}
        self._post.command(tuple(self.state.workers), WorkerEndSession(ident))

    def take(self) -> list[Outgoing]:
        """What was to be said before something failed that nobody foresaw."""
        return self._post.take()

    # Instructions

    def instruct(self, ident: int, batch: Sequence[Instruction], buffers: Sequence[Buffer]) -> list[Outgoing]:
        log.debug("client %d: %d instructions and %d tensors", ident, len(batch), len(buffers))
        session = self.state.sessions[ident]
        remaining = iter(buffers)
        actions = self._actions
        for instruction in batch:
            if self._post.observer is not None:
                self._post.note("RECV", f"client {ident}", instruction)
            buffer = next(remaining) if type(instruction) is CreateTensor else None
            try:
                actions[type(instruction)](session, instruction, buffer)
            except Exception as error:
                self._carry_out(session, refuse(self.state, session, instruction, error, self._gone))
            if type(instruction) is Goodbye:
                break
        return self._post.take()

    def _run_op(self, session: Session, op: RunOp, _: Buffer | None) -> None:
        known = session.ops[op.code]
        inputs, outputs = op.inputs, op.outputs
        tensors = self.state.tensors
        policy = session.policy(op.scope) if op.scope else None
        writes = known.signature.writes
        try:
            if len(inputs) == 2:  # by hand: a comprehension takes longer
                specs: tuple[ShardingSpec, ...] = (tensors[inputs[0]].spec, tensors[inputs[1]].spec)
            else:
                specs = tuple([tensors[ident].spec for ident in inputs])
            laid = self._plans.with_copies(specs, inputs) if self.state.copies else specs
            prepared = known.plans[laid if policy is None else (policy, *laid)]
        except KeyError:
            prepared = None
        if prepared is None or len(outputs) != known.gives or (writes and known.again(inputs)):
            prepared = self._plans.prepare(session, known, op, policy)
        settles = policy is not None and policy.settles
        if prepared.moves:
            inputs = self._placing.taken(session, prepared.plan, inputs, known.signature.op, op.site, settles)
        if settles:
            self.state.settle([op.inputs[place] for place, spec in prepared.plan.takes if spec is None])
        results = prepared.results
        copies: list[tuple[int, DeviceMesh]] = []
        if writes:
            results = self._as_settled(writes, op.inputs, results)
            copies = self._consume(writes, op.inputs)
        loads = self.state.loads
        for place, held in enumerate(results):  # state.place, without a call for each
            tensors[outputs[place]] = held
            mesh = held.spec.mesh
            loads[mesh] = loads.get(mesh, 0) + held.nbytes
        if session.watches:
            self._placing.collect(session, prepared.plan.collectives, op.site)
        command = WorkerRunOp(prepared.code, inputs, outputs, op.scalars, op.scope, op.site)
        self._post.command(prepared.plan.workers, command, None, prepared.meets)
        if copies:
            self._placing.free(copies)

    def _as_settled(self, writes: Sequence[int], inputs: Sequence[int], results: tuple[Held, ...]) -> tuple[Held, ...]:
        """The results of an op, with new versions as settled as what they are versions of."""
        news = len(results) - len(writes)
        before = [self.state.tensors[inputs[place]].settled for place in writes]
        versions = [
            held if held.settled == settled else held._replace(settled=settled)
            for held, settled in zip(results[news:], before, strict=True)
        ]
        return (*results[:news], *versions)

    def _consume(self, writes: Sequence[int], inputs: Sequence[int]) -> list[tuple[int, DeviceMesh]]:
        """Written tensors go on under new ids and their old ids are gone. Gives the copies of what they were, to be
        freed when the op has used them."""
        return [copy for place in writes for copy in self.state.remove(inputs[place])[1:]]

    def _query(self, session: Session, query: QueryOp, _: Buffer | None) -> None:
        """Runs on whole tensors, since only running it tells what it gives."""
        op = session.ops[query.code]
        if len(query.inputs) != op.takes or len(query.written) != len(op.signature.writes):
            raise Misfit(f"{op.signature.op} takes {op.takes} tensors and writes {len(op.signature.writes)}")
        op.again(query.inputs)  # refuses a tensor that is written at two places
        if len(set(query.written)) < len(query.written):
            raise Misfit(f"{op.signature.op} gives one id to several new versions: {query.written}")
        policy = session.policy(query.scope)
        mesh = self._plans.mesh_of_query(op, [self.state.held(ident) for ident in query.inputs], policy)
        for place in op.signature.writes:
            self._placing.gather_for_good(session, query.inputs[place], mesh, query.site)
        inputs = tuple(
            [
                self._placing.available(
                    session,
                    ident,
                    whole(mesh, len(self.state.held(ident).meta.shape)),
                    op.signature.op,
                    query.site,
                    settles=policy is not None and policy.settles,
                )
                for ident in query.inputs
            ]
        )
        self._plans.tell(session, mesh.workers, query.code)
        metas = [self.state.held(query.inputs[place]).meta for place in op.signature.writes]
        copies = self._consume(op.signature.writes, query.inputs)
        for ident, meta in zip(query.written, metas, strict=True):
            self.state.place(ident, Held.of(meta, whole(mesh, len(meta.shape))))
        self._requests.wait_for_query(query.request, mesh, query.first, query.written)
        command = WorkerQueryOp(
            query.request, query.code, inputs, query.written, query.first, query.scalars, query.scope, query.site
        )
        self._post.command(mesh.workers, command)
        self._placing.free(copies)

    def _create(self, session: Session, created: CreateTensor, buffer: Buffer | None) -> None:
        """Host data goes to one worker, and from there to where the scope wants it."""
        policy = session.policy(created.scope)
        if policy is None:
            mesh, ident = self.state.least_loaded(), created.id
        else:
            self._plans.require(policy.mesh)
            mesh, ident = self.state.workers[policy.mesh.workers[0]].alone, session.new_id()
        held = Held.of(created.meta, whole(mesh, len(created.meta.shape)))
        self._post.command(mesh.workers, WorkerCreateTensor(ident, created.meta, created.segment, created.site), buffer)
        if policy is not None:
            spec = policy.layout(created.meta.shape)
            self._placing.move(session, held, ident, created.id, spec, "upload", created.site)
            self._placing.free([(ident, mesh)])
            held = Held.of(created.meta, spec, settled=True)
        self.state.place(created.id, held)

    def _redistribute(self, session: Session, move: Redistribute, _: Buffer | None) -> None:
        held = self.state.held(move.input)
        spec = spec_of(move.layout)
        require_layout(spec, held.meta)
        self._plans.require(spec.mesh)
        self._placing.move(
            session, held, move.input, move.output, spec.normal(held.meta.shape), "redistribute", move.site
        )
        self.state.place(move.output, Held.of(held.meta, spec.normal(held.meta.shape), settled=True))

    def _free(self, session: Session, free: FreeTensors, _: Buffer | None) -> None:
        for mesh, idents in self.state.remove_all(free.ids).items():
            self._post.command(mesh.workers, WorkerFreeTensors(tuple(idents)))

    def _fetch(self, session: Session, fetch: FetchTensor, _: Buffer | None) -> None:
        """A tensor that is whole somewhere is read there; another one is gathered on one worker first."""
        held = self.state.held(fetch.id)
        spec, ident, gathered = held.spec, fetch.id, False
        if not spec.is_whole:
            copy = next((copy for copy in self.state.copies.get(ident, ()) if copy.is_whole), None)
            gathered = copy is None
            spec = copy or whole(self.state.workers[spec.mesh.workers[0]].alone, len(held.meta.shape))
            ident = self._placing.available(session, ident, spec, "fetch", 0)
        worker = spec.mesh.workers[0]
        shared = session.host == self.state.workers[worker].info.host
        self._requests.wait(fetch.request, (worker,))
        self._post.command((worker,), WorkerFetchTensor(fetch.request, ident, shared))
        if gathered:
            self._placing.drop_copy(fetch.id, spec)

    def _locate(self, session: Session, locate: LocateTensor, _: Buffer | None) -> None:
        self._post.answer(session.ident, Located(locate.request, self.state.held(locate.id).spec.record()))

    def _synchronize(self, session: Session, synchronize: Synchronize, _: Buffer | None) -> None:
        if not self.state.workers:
            raise NoWorkers
        self._requests.wait(synchronize.request, tuple(self.state.workers))
        self._post.command(tuple(self.state.workers), WorkerSynchronize(synchronize.request))

    def _read_traffic(self, session: Session, read: ReadTraffic, _: Buffer | None) -> None:
        if not self.state.workers:
            raise NoWorkers
        session.watches = read.watch
        self._requests.wait(read.request, tuple(self.state.workers))
        self._post.command(tuple(self.state.workers), WorkerReadTraffic(read.request))

    def _read_stats(self, session: Session, read: ReadStats, _: Buffer | None) -> None:
        if not self.state.workers:
            raise NoWorkers
        self._requests.wait(read.request, tuple(self.state.workers))
        self._post.command(tuple(self.state.workers), WorkerReadStats(read.request))

    def _read_timeline(self, session: Session, read: ReadTimeline, _: Buffer | None) -> None:
        if not self.state.workers:
            raise NoWorkers
        self._requests.wait(read.request, tuple(self.state.workers))
        self._post.command(tuple(self.state.workers), WorkerReadTimeline(read.request, read.limit))

    def _define_op(self, session: Session, define: DefineOp, _: Buffer | None) -> None:
        if define.code in session.ops:
            raise Misfit(f"op {define.code} is defined already; the workers that know it would run what it was")
        session.ops[define.code] = Op.of(define.code, define.signature)

    def _forget_ops(self, session: Session, forget: ForgetOps, _: Buffer | None) -> None:
        """The plans of these ops go with them, on the workers too, and so do all moves."""
        ops = [session.ops.pop(code) for code in forget.codes if code in session.ops]
        self._plans.forget(session, [*[plan for op in ops for plan in op.plans.values()], *session.moves.values()])
        session.moves.clear()
        for number, worker in self.state.workers.items():
            known = tuple(worker.known.intersection(forget.codes))
            worker.known.difference_update(known)
            if known:
                self._post.command((number,), WorkerForgetOps(known))

    def _define_site(self, session: Session, define: DefineSite, _: Buffer | None) -> None:
        session.sites[define.code] = (define.file, define.line)

    def _define_scope(self, session: Session, define: DefineScope, _: Buffer | None) -> None:
        policy = Policy(define.policy) if define.policy is not None else None
        session.scopes[define.code] = Scope(define.name, policy, define.compile)
        command = WorkerDefineScope(session.ident, define.code, define.name, define.compile)
        self._post.command(tuple(self.state.workers), command)

    def _goodbye(self, session: Session, goodbye: Goodbye, _: Buffer | None) -> None:
        self._end(session.ident)

    # Reports

    def report(
        self, worker: int, report: Report, buffer: Buffer | None, progress: Sequence[int] = (0, 0)
    ) -> list[Outgoing]:
        """`progress` is the code and the site of the worker's last op."""
        if self._post.observer is not None:
            self._post.note("WORKER_RECV", f"worker {worker}", report)
        if isinstance(report, OpFailed):
            self._post.answer(report.session, report)
        elif isinstance(report, StoreReady):
            self._announce_store(worker, report)
        elif isinstance(report, Goodbye):
            return self.lose_worker(worker, f"left: {report.reason}", self.describe_op(*progress))
        else:
            self._requests.settle(worker, report, buffer)
        return self._post.take()

    def _announce_store(self, worker: int, ready: StoreReady) -> None:
        """Process groups meet at the store that one worker hosts."""
        self._store = WorkerJoinStore("127.0.0.1", ready.port, f"hosted by {worker}")
        self._post.command(tuple(self.state.workers), self._store)
        for member in self.state.workers.values():
            member.ready = True

    # Losses and mistakes

    def _carry_out(self, session: Session, refusal: Refusal) -> None:
        self._placing.free(refusal.freed)
        if refusal.lost_with is not None and refusal.request:
            self._requests.lose(refusal.request, refusal.lost_with)
        elif refusal.answer is not None:
            self._post.answer(session.ident, refusal.answer)

    def waits(self) -> dict[int, set[int]]:
        """For whom each session waits."""
        return self._requests.waits()

    def describe_op(self, code: int, site: int) -> str:
        """What a worker is at, from the code and the site of its last command; empty where it has run none."""
        session = self.state.sessions.get(session_of(code))
        if not code:
            return ""
        if session is None:
            return "an op of a session that has ended"
        return f"{session.op_name(code)} ({session.site(site)})"
