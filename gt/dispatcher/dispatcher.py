"""Instructions, reports, comings and goings in; messages for workers and clients out. No sockets, clocks, threads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from gt.core.errors import ProtocolError
from gt.core.events import Observer
from gt.core.ids import session_of
from gt.core.messages import (
    CURRENT,
    BeginStep,
    Command,
    CreateTensor,
    DefineOp,
    DefineScope,
    DefineSite,
    EndStep,
    Failed,
    Fetched,
    FetchTensor,
    ForgetOps,
    FreeTensors,
    Goodbye,
    Instruction,
    Joined,
    Located,
    LocateTensor,
    Lost,
    OpFailed,
    Progress,
    QueryOp,
    ReadStats,
    ReadTimeline,
    ReadTraffic,
    ReadVersions,
    Redistribute,
    Rejected,
    Report,
    RunOp,
    Stats,
    StoreReady,
    Synchronize,
    Synchronized,
    TimelineReport,
    Traffic,
    WorkerAgreeOnStep,
    WorkerBeginStep,
    WorkerCreateTensor,
    WorkerDefineScope,
    WorkerEndSession,
    WorkerEndStep,
    WorkerFetchTensor,
    WorkerHostStore,
    WorkerInfo,
    WorkerJoinStore,
    WorkerReadTraffic,
    WorkerReportProgress,
    WorkerReviveTensor,
)
from gt.dispatcher.deferred_failures import DeferredFailures
from gt.dispatcher.fair_queue import FairQueue
from gt.dispatcher.outgoing import Buffer, MessageQueue, Outgoing, ToClient, ToWorkers
from gt.dispatcher.plan_cache import PlanCache
from gt.dispatcher.rejection import describe_mistake, reject, reject_mistake
from gt.dispatcher.replicas import Replicas
from gt.dispatcher.requests import Requests
from gt.dispatcher.state import (
    DeadWorker,
    Halt,
    IdInUse,
    InvalidInstruction,
    NoValue,
    NoWorkers,
    OpRecord,
    Reply,
    ScopeRecord,
    SessionRecord,
    State,
    TensorRecord,
    layout_of,
    require_layout,
)
from gt.sharding.rules import is_linear_with
from gt.sharding.spec import DeviceMesh, ShardingSpec, whole
from gt.signals.policy import Policy

log = logging.getLogger("gt.dispatcher")


class Dispatcher:
    """Gives messages in the one order that all workers follow. `observer` sees each of them, if there is one."""

    def __init__(self, observer: Observer | None = None) -> None:
        self.state = State()
        self._post = MessageQueue(self.state, observer)
        self._placing = Replicas(self.state, self._post)
        self._requests = Requests(self.state, self._post)
        self._plans = PlanCache(self.state, self._post, self._placing)
        self._turns = FairQueue(self.state)
        self._doubts = DeferredFailures(self.state)
        self._actions: dict[type, Callable[[SessionRecord, Any, Buffer | None], None]] = {
            RunOp: self._run_op,
            FreeTensors: self._free,
            QueryOp: self._query,
            CreateTensor: self._create,
            Redistribute: self._redistribute,
            FetchTensor: self._fetch,
            ReadVersions: self._read_versions,
            BeginStep: self._begin_step,
            EndStep: self._end_step,
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

    # All or nothing

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """What is done inside is done whole; where it raises, neither a change nor a message is left of it."""
        start = len(self._post.out)
        try:
            yield
        except BaseException:
            self._roll_back(start)
            raise
        self.state.commit()
        if self._post.observer is not None:
            self._post.note_from(start)

    def _roll_back(self, start: int) -> None:
        """Take back the changes since the last commit, and the messages from one on."""
        self.state.roll_back()
        del self._post.out[start:]

    # Comings and goings

    def join_worker(self, device: str, host: str, pid: int) -> tuple[int, list[Outgoing]]:
        """A worker that joins gets an id of its own that no other worker had."""
        with self._transaction():
            ident = self.state.add_worker(device, host, pid).info.worker
            self._post.note("CONNECT", f"worker {ident}", None)
            for session in self.state.sessions.values():
                for code, scope in session.scopes.items():
                    self._post.command((ident,), WorkerDefineScope(session.ident, code, scope.name, scope.compile))
            if self.state.store is not None:
                self._post.command((ident,), self.state.store)
                self._make_ready((ident,))
            else:
                self._arrange_store()
        return ident, self._post.take()

    def _arrange_store(self) -> None:
        """Workers can exchange tensors once all know the store that process groups meet at; one of them hosts it. Until
        then one worker does all the work."""
        workers = self.state.workers
        if not workers or self.state.store is not None:
            return
        if self.state.store_host not in workers:
            self.state.set_store(min(workers), None)
            if len(workers) > 1:
                self._post.command((self.state.store_host,), WorkerHostStore())
        elif len(workers) == 2:
            self._post.command((self.state.store_host,), WorkerHostStore())
        self._make_ready((self.state.store_host,))

    def make_ready(self, worker: int) -> None:
        """A worker needs no store to exchange tensors with the others."""
        with self._transaction():
            self._make_ready((worker,))

    def _make_ready(self, workers: Iterable[int]) -> None:
        """Workers get work from now on, and clients may name them."""
        new = [ident for ident in workers if not self.state.workers[ident].ready]
        self.state.make_ready(new)
        for session in self.state.sessions:
            for ident in new:
                self._post.answer(session, Joined(self.state.workers[ident].info))

    def ready_workers(self) -> tuple[WorkerInfo, ...]:
        return tuple([worker.info for worker in self.state.workers.values() if worker.ready])

    def lose_worker(self, ident: int, reason: str, last_op: str) -> list[Outgoing]:
        """A worker is gone: requests that wait for it fail now, before anything else is done, and its tensors when they
        are next used."""
        if ident not in self.state.workers:
            return []
        gone = DeadWorker(self.state.workers[ident].info.pid, reason, last_op)
        with self._transaction():
            self._post.note("DISCONNECT", f"worker {ident}", None)
            self.state.remove_worker(ident, gone)
            self._requests.lose_worker(ident)
            self._judge(self._doubts.take_lost(ident))
        with self._transaction():
            if ident == self.state.store_host:
                self.state.set_store(ident, None)
                self.state.make_ready(self.state.workers, ready=False)
                self._arrange_store()
        held = self.state.held_on(ident)
        for session in list(self.state.sessions.values()):
            self._guard(session, partial(self._lose_of, session, held.get(session.ident, []), ident))
        with self._transaction():
            self.state.forget_loads(ident)
        self._turns.lose_worker(ident)
        return [*self._post.take(), *self._take_turns()]

    def _lose_of(self, session: SessionRecord, held: Sequence[int], worker: int) -> None:
        """What a session loses with a worker: tensors, plans, and what it is told."""
        losses = self.state.lose_parts(held, worker)
        self._placing.free(losses.useless)
        for tensor, alias in losses.promoted:
            self._placing.rename(session, self.state.tensors[tensor], alias, tensor, 0)
        self._plans.forget(session, self.state.forget_plans_on(session, worker))
        self._post.answer(session.ident, Lost(0, worker, *self.state.gone[worker]))

    def _guard(self, session: SessionRecord, action: Callable[[], None]) -> None:
        """Where something cannot be done for a session because of a mistake of ours, that session ends, and no
        other."""
        try:
            with self._transaction():
                action()
        except Exception as error:
            log.exception("the session of client %d ends because of a mistake of GT", session.ident)
            with self._transaction():
                self._post.answer(session.ident, Rejected(0, describe_mistake(error)))
                self._end(session.ident)

    def open_session(self, host: str, pid: int) -> int:
        with self._transaction():
            ident = self.state.add_session(host, pid).ident
            self._post.note("CONNECT", f"client {ident}", None)
        return ident

    def end_session(self, ident: int) -> list[Outgoing]:
        """A client has left, politely or not: everything it held is freed."""
        with self._transaction():
            self._end(ident)
        return self._post.take()

    def _end(self, ident: int) -> None:
        if ident not in self.state.sessions:
            return
        self._post.note("DISCONNECT", f"client {ident}", None)
        self._turns.forget_session(ident)
        self.state.remove_session(ident)
        self._post.command(tuple(self.state.workers), WorkerEndSession(ident))

    def take(self) -> list[Outgoing]:
        """Messages that were queued before an unexpected exception."""
        return self._post.take()

    # Instructions

    def submit(self, ident: int, batch: Sequence[Instruction], buffers: Sequence[Buffer]) -> list[Outgoing]:
        """Carry out instructions of a client that shares the workers with others: as many as it may have unfinished
        now, and the others when workers report progress. A client that leaves waits for nothing."""
        if any(type(instruction) is Goodbye for instruction in batch):
            self._turns.forget_session(ident)
            return self.instruct(ident, [Goodbye()], ())
        self._turns.add(ident, batch, buffers)
        return self._take_turns()

    def is_waiting(self, ident: int) -> bool:
        """Whether instructions of a client wait for its turn."""
        return self._turns.is_waiting(ident)

    def _take_turns(self) -> list[Outgoing]:
        """Carry out what may be carried out now of the instructions that wait."""
        outgoing: list[Outgoing] = []
        while (turn := self._turns.next()) is not None:
            sent = self.instruct(turn.session, turn.batch, turn.buffers)
            outgoing += sent
            workers = tuple({worker: None for out in sent if isinstance(out, ToWorkers) for worker in out.workers})
            if turn.cost and workers:
                mark = self._turns.begin(turn, workers)
                outgoing.append(ToWorkers(workers, WorkerReportProgress(mark)))
        return outgoing

    def instruct(self, ident: int, batch: Sequence[Instruction], buffers: Sequence[Buffer]) -> list[Outgoing]:
        """Carry out instructions, each of them whole or not at all."""
        log.debug("client %d: %d instructions and %d tensors", ident, len(batch), len(buffers))
        session = self.state.sessions.get(ident)
        if session is None:
            return [ToClient(ident, Rejected(0, f"session {ident} has ended"))]
        remaining = iter(buffers)
        actions, post, inverses, out = self._actions, self._post, self.state.undo.inverses, self._post.out
        observed = post.observer is not None
        for instruction in batch:
            start = len(out)
            if observed:
                post.note("RECV", f"client {ident}", instruction)
            buffer = next(remaining) if type(instruction) is CreateTensor else None
            try:
                actions[type(instruction)](session, instruction, buffer)
            except Exception as error:
                self._roll_back(start)
                self._refuse(session, instruction, error)
            if inverses:
                self.state.commit()
            if observed:
                post.note_from(start)
            if type(instruction) is Goodbye:
                break
        return post.take()

    def _refuse(self, session: SessionRecord, instruction: Instruction, error: Exception) -> None:
        start = len(self._post.out)
        try:
            refusal = reject(self.state, session, instruction, error)
            self._placing.free(refusal.freed)
            for answer in refusal.answers:
                self._post.answer(session.ident, answer)
        except Exception as mistake:
            log.exception("%s of client %d could not be refused", type(instruction).__name__, session.ident)
            self._roll_back(start)
            self._post.answer(session.ident, reject_mistake(instruction, mistake))

    def _run_op(self, session: SessionRecord, op: RunOp, _: Buffer | None) -> None:
        state = self.state
        known = session.ops.get(op.op_id) or session.op(op.op_id)
        inputs, outputs = op.inputs, op.outputs
        tensors = state.tensors
        policy = state.policy(session, op.scope) if op.scope else None
        writes = known.signature.writes
        if writes and session.halt is not None and min([inputs[place] for place in writes]) < session.halt.step:
            raise NoValue(session.halt.cause, "a gradient of the step")
        try:
            if len(inputs) == 2:  # by hand: a comprehension takes longer
                specs: tuple[ShardingSpec, ...] = (tensors[inputs[0]].spec, tensors[inputs[1]].spec)
            else:
                specs = tuple([tensors[ident].spec for ident in inputs])
            laid = self._plans.with_copies(specs, inputs) if state.copies else specs
            prepared = known.plans[laid if policy is None else (policy, *laid)]
        except KeyError:
            prepared = None
        if len(outputs) != 1 or outputs[0] in tensors or state.lost or state.resizing:
            state.require_new(outputs)
        if prepared is None or len(outputs) != known.gives or (writes and known.aliased_inputs(inputs)):
            prepared = self._plans.prepare(session, known, op, policy)
        if prepared.plan.linear and not is_linear_with(known.signature.op, op.scalars):
            prepared = self._plans.prepare(session, known, op, policy, reduces_first=True)
        if prepared.plan.gathered:
            self._plans.tell_of_gathering(session, prepared.plan.gathered, op.site)
        settles = policy is not None and policy.pins
        if prepared.moves:
            inputs = self._placing.taken(session, prepared.plan, inputs, known.signature.op, op.site, settles)
        if settles:
            state.settle([op.inputs[place] for place, spec in prepared.plan.takes if spec is None])
        if session.watches:
            self._placing.collect(session, prepared.plan.collectives, op.site)
        copies = state.replace(writes, op.inputs, outputs, prepared.results)
        same = prepared.code == op.op_id and inputs is op.inputs
        command = op if same else RunOp(prepared.code, inputs, outputs, op.scalars, op.scope, op.site)
        self._post.out.append(ToWorkers(prepared.plan.workers, command, None, prepared.meets))  # without a call
        if copies:
            self._placing.free(copies)

    def _query(self, session: SessionRecord, query: QueryOp, _: Buffer | None) -> None:
        """Runs on whole tensors, since only running it tells what it gives."""
        op = session.op(query.op_id)
        op.require_fit_of_query(query.inputs, query.written)
        self.state.require_new(query.written)
        self.state.begin_run(session, query.first)
        policy = self.state.policy(session, query.scope)
        mesh = self._plans.mesh_of_query(op, [self.state.held(ident) for ident in query.inputs], policy)
        if any(self._is_gathered_on(mesh, ident) for ident in query.inputs):
            self._plans.tell_of_gathering(session, op.signature.op, query.site, is_query=True)
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
                    settles=policy is not None and policy.pins,
                )
                for ident in query.inputs
            ]
        )
        self._plans.tell(session, mesh.workers, query.op_id)
        written = [query.inputs[place] for place in op.signature.writes]
        renewed = [(new, self.state.held(old).meta) for old, new in zip(written, query.written, strict=True)]
        copies = [copy for ident in written for copy in self.state.remove(ident)[1:]]
        for ident, meta in renewed:
            self.state.place(ident, TensorRecord.of(meta, whole(mesh, len(meta.shape))))
        self._requests.wait_for_query(query.request, mesh, query.first, renewed)
        command = QueryOp(
            query.request, query.op_id, inputs, query.written, query.first, query.scalars, query.scope, query.site
        )
        self._post.command(mesh.workers, command)
        self._placing.free(copies)

    def _is_gathered_on(self, mesh: DeviceMesh, ident: int) -> bool:
        """Whether a tensor is cut, and has to be put together to be whole on a mesh."""
        spec = self.state.held(ident).spec
        target = whole(mesh, len(spec.dims))
        return spec.mesh.size > 1 and any(spec.dims) and target not in self.state.copies.get(ident, {})

    def _create(self, session: SessionRecord, created: CreateTensor, buffer: Buffer | None) -> None:
        """Host data goes to one worker, and from there to where the scope wants it."""
        self.state.require_new((created.id,))
        policy = self.state.policy(session, created.scope)
        if policy is None:
            mesh, ident = self.state.least_loaded(), created.id
        else:
            self._plans.require(policy.mesh)
            mesh, ident = self.state.workers[policy.mesh.workers[0]].solo_mesh, self.state.new_id(session)
        held = TensorRecord.of(created.meta, whole(mesh, len(created.meta.shape)))
        self.state.note_use(session.ident, mesh.workers)
        self._post.command(mesh.workers, WorkerCreateTensor(ident, created.meta, created.segment, created.site), buffer)
        if policy is not None:
            spec = policy.layout(created.meta.shape)
            self._placing.move(session, held, ident, created.id, spec, "upload", created.site)
            self._placing.free([(ident, mesh)])
            held = TensorRecord.of(created.meta, spec, pinned=True)
        self.state.place(created.id, held)

    def _redistribute(self, session: SessionRecord, move: Redistribute, _: Buffer | None) -> None:
        self.state.require_new((move.output,))
        held = self.state.held(move.input)
        spec = layout_of(move.layout)
        require_layout(spec, held.meta)
        self._plans.require(spec.mesh)
        self._placing.move(
            session, held, move.input, move.output, spec.normal(held.meta.shape), "redistribute", move.site
        )
        self.state.place(move.output, TensorRecord.of(held.meta, spec.normal(held.meta.shape), pinned=True))

    def _free(self, session: SessionRecord, free: FreeTensors, _: Buffer | None) -> None:
        for mesh, idents in self.state.remove_all(free.ids).items():
            self._post.command(mesh.workers, FreeTensors(tuple(idents)))

    def _fetch(self, session: SessionRecord, fetch: FetchTensor, _: Buffer | None) -> None:
        """A tensor that is whole somewhere is read there; another one is gathered on one worker first."""
        if fetch.version != CURRENT:
            self._fetch_version(session, fetch)
            return
        held = self.state.held(fetch.id)
        spec, ident, gathered = held.spec, fetch.id, False
        if not spec.is_whole:
            copy = next((copy for copy in self.state.copies.get(ident, ()) if copy.is_whole), None)
            gathered = copy is None
            spec = copy or whole(self.state.workers[spec.mesh.workers[0]].solo_mesh, len(held.meta.shape))
            ident = self._placing.available(session, ident, spec, "fetch", fetch.site)
        is_resizing = fetch.id in self.state.resizing
        self._read(session, fetch, ident, spec, -1 if is_resizing else held.meta.nbytes)
        if gathered:
            self._placing.drop_copy(fetch.id, spec)

    def _fetch_version(self, session: SessionRecord, fetch: FetchTensor) -> None:
        """A value before the present one, gathered where it is cut."""
        source = self.state.source(fetch.id)
        if source is None:
            self.state.held(fetch.id)  # raises
            return
        ident, held, _ = source
        if held.spec.is_whole:
            self._read(session, fetch, ident, held.spec, held.meta.nbytes)
            return
        revived, gathered = self.state.new_id(session), self.state.new_id(session)
        self._post.command(held.spec.mesh.workers, WorkerReviveTensor(ident, revived, fetch.version))
        spec = whole(self.state.workers[held.spec.mesh.workers[0]].solo_mesh, len(held.meta.shape))
        self._placing.move(session, held, revived, gathered, spec, "fetch", fetch.site)
        self._read(session, fetch, gathered, spec, held.meta.nbytes)
        self._placing.free([(revived, held.spec.mesh), (gathered, spec.mesh)])

    def _read_versions(self, session: SessionRecord, read: ReadVersions, _: Buffer | None) -> None:
        sources = [source[0] for ident in read.ids if (source := self.state.source(ident)) is not None]
        workers = tuple(self.state.workers)
        if not workers:
            raise NoWorkers
        self._requests.wait_for_versions(read.request, workers, read.ids)
        self._post.command(workers, ReadVersions(read.request, tuple(sources)))

    def _begin_step(self, session: SessionRecord, begin: BeginStep, _: Buffer | None) -> None:
        """Gradients are brought to where their parameters are, so that no exchange can fail in the middle of the step.
        Where one is lost, the step writes to nothing that was there before."""
        state, gradients, cause = self.state, list(begin.gradients), None
        places: set[ShardingSpec | DeviceMesh] = set()
        for gradient, parameter in zip(begin.gradients, begin.parameters, strict=False):
            absent = state.lost.get(gradient) or state.lost.get(parameter)
            if absent is not None:
                cause = absent.cause
                continue
            held, target = state.held(gradient), state.held(parameter)
            places.add(target.spec.mesh if target.spec.is_whole else target.spec)
            if held.meta.shape == target.meta.shape and not target.spec.partial:
                gradients.append(self._placing.available(session, gradient, target.spec, "optimizer", begin.site))
        state.halt(session, None if cause is None else Halt(begin.step, cause))
        self._tell_of_step(
            session,
            begin,
            tuple(dict.fromkeys(gradients)),
            agree=cause is None and _are_apart(places, session.workers & state.workers.keys()),
        )

    def _tell_of_step(
        self, session: SessionRecord, begin: BeginStep, gradients: tuple[int, ...], *, agree: bool
    ) -> None:
        """Workers that hold other parameters than their peers `agree` with them on whether the step is done."""
        workers = self.state.workers
        ready = [ident for ident in sorted(session.workers) if ident in workers and workers[ident].ready]
        if not agree or len(ready) < 2:
            self._post.command(tuple(self.state.workers), WorkerBeginStep(begin.step, gradients))
            return
        token, tokens = self.state.new_id(session), self.state.new_id(session)
        self._post.command(tuple(self.state.workers), WorkerBeginStep(begin.step, gradients, token))
        self._placing.add_up(session, ready, token, tokens, begin.site)
        self._post.command(tuple(ready), WorkerAgreeOnStep(begin.step, tokens))
        self._post.command(tuple(self.state.workers), FreeTensors((token,)))

    def _end_step(self, session: SessionRecord, end: EndStep, _: Buffer | None) -> None:
        self._post.command(tuple(self.state.workers), WorkerEndStep(end.step, session.halt is None))
        self.state.halt(session, None)

    def _read(self, session: SessionRecord, fetch: FetchTensor, ident: int, spec: ShardingSpec, nbytes: int) -> None:
        """The first worker that holds a tensor whole sends it; `nbytes` is its size, -1 where that is not known yet."""
        worker = spec.mesh.workers[0]
        shared = session.host == self.state.workers[worker].info.host
        self._requests.wait(fetch.request, (worker,), Fetched, Failed, nbytes=nbytes)
        self._post.command((worker,), WorkerFetchTensor(fetch.request, ident, shared, fetch.version))

    def _locate(self, session: SessionRecord, locate: LocateTensor, _: Buffer | None) -> None:
        if locate.request in self.state.pending:
            raise IdInUse("request", locate.request)
        self._post.answer(session.ident, Located(locate.request, self.state.held(locate.id).spec.record()))

    def _synchronize(self, session: SessionRecord, synchronize: Synchronize, _: Buffer | None) -> None:
        self._ask_all(synchronize.request, Synchronize(synchronize.request), Synchronized)

    def _read_traffic(self, session: SessionRecord, read: ReadTraffic, _: Buffer | None) -> None:
        self.state.watch(session, read.watch)
        self._ask_all(read.request, WorkerReadTraffic(read.request), Traffic)

    def _read_stats(self, session: SessionRecord, read: ReadStats, _: Buffer | None) -> None:
        self._ask_all(read.request, ReadStats(read.request), Stats)

    def _read_timeline(self, session: SessionRecord, read: ReadTimeline, _: Buffer | None) -> None:
        self._ask_all(read.request, ReadTimeline(read.request, read.limit), TimelineReport)

    def _ask_all(self, request: int, command: Command, answer: type[Reply]) -> None:
        workers = tuple(self.state.workers)
        if not workers:
            raise NoWorkers
        self._requests.wait(request, workers, answer)
        self._post.command(workers, command)

    def _define_op(self, session: SessionRecord, define: DefineOp, _: Buffer | None) -> None:
        if define.op_id in session.ops:
            raise InvalidInstruction(
                f"op {define.op_id} is defined already; the workers that know it would run what it was"
            )
        self.state.define_op(session, OpRecord.of(define.op_id, define.signature))

    def _forget_ops(self, session: SessionRecord, forget: ForgetOps, _: Buffer | None) -> None:
        """The plans of these ops go with them, on the workers too, and so do all moves."""
        self._plans.forget(session, self.state.forget_ops(session, forget.op_ids))
        for number, worker in self.state.workers.items():
            known = tuple(worker.known.intersection(forget.op_ids))
            if known:
                self.state.note_unknown(number, known)
                self._post.command((number,), ForgetOps(known))

    def _define_site(self, session: SessionRecord, define: DefineSite, _: Buffer | None) -> None:
        self.state.define_site(session, define.site_id, define.file, define.line)

    def _define_scope(self, session: SessionRecord, define: DefineScope, _: Buffer | None) -> None:
        try:
            policy = Policy(define.policy) if define.policy is not None else None
        except ValueError as error:
            raise InvalidInstruction(str(error)) from None
        self.state.define_scope(session, define.scope_id, ScopeRecord(define.name, policy, define.compile))
        command = WorkerDefineScope(session.ident, define.scope_id, define.name, define.compile)
        self._post.command(tuple(self.state.workers), command)

    def _goodbye(self, session: SessionRecord, goodbye: Goodbye, _: Buffer | None) -> None:
        self._end(session.ident)

    # Reports

    def report(
        self, worker: int, report: Report, buffer: Buffer | None, progress: Sequence[int] = (0, 0)
    ) -> list[Outgoing]:
        """`progress` is the code and the site of the worker's last op. A report that does not fit raises
        ProtocolError and changes nothing."""
        if self._post.observer is not None:
            self._post.note("WORKER_RECV", f"worker {worker}", report)
        if isinstance(report, Goodbye):
            return self.lose_worker(worker, f"left: {report.reason}", self.describe_op(*progress))
        if isinstance(report, Progress):
            self._turns.finish(worker, report.mark, report.nanoseconds)
            return self._take_turns()
        if isinstance(report, OpFailed):
            self._require_own_failure(worker, report)
        elif isinstance(report, Failed):
            self._requests.require_asked(worker, report)
        if isinstance(report, OpFailed | Failed) and self._doubts.hold(worker, report):
            return []
        with self._transaction():
            if isinstance(report, OpFailed | Failed):
                self._judge([(worker, report)])
            elif isinstance(report, StoreReady):
                self._announce_store(worker, report)
            else:
                self._requests.settle(worker, report, buffer)
        return self._post.take()

    def note_checks(self) -> list[Outgoing]:
        """It was looked once more which workers are there."""
        with self._transaction():
            self._judge(self._doubts.take_old())
        return self._post.take()

    def _judge(self, reports: Sequence[tuple[int, OpFailed | Failed]]) -> None:
        """Pass on failures. The session was told already of a worker whose loss is the reason of one."""
        for worker, report in reports:
            if isinstance(report, Failed):
                if self._requests.is_waiting_for(worker, report.request):
                    self._requests.settle(worker, report, None)
            elif self.state.lost_peer(report.failure) is None:
                self._pass_on(report)

    def _require_own_failure(self, worker: int, failed: OpFailed) -> None:
        """A session is told of the failures of its own ops, by the workers that run them."""
        if self.state.is_over(failed.session):
            return
        origin, workers = failed.failure.origin, self.state.sessions[failed.session].workers
        if worker not in workers or (origin and session_of(origin) != failed.session):
            raise ProtocolError(f"worker {worker} was given nothing of session {failed.session} that could have failed")

    def _pass_on(self, failed: OpFailed) -> None:
        if not self.state.is_over(failed.session):
            self._post.answer(failed.session, failed)

    def _announce_store(self, worker: int, ready: StoreReady) -> None:
        """Process groups meet at the store that one worker hosts. It may have been asked twice for that."""
        if worker != self.state.store_host or not 0 < ready.port < 1 << 16:
            raise ProtocolError(f"worker {worker} was not asked for a store, or has none at port {ready.port}")
        if self.state.store is not None:
            return
        store = WorkerJoinStore("127.0.0.1", ready.port, worker)
        self.state.set_store(self.state.store_host, store)
        self._post.command(tuple(self.state.workers), store)
        self._make_ready(self.state.workers)

    def waits(self) -> dict[int, set[int]]:
        """For whom each session waits."""
        waits = self._requests.waits()
        for session, workers in self._turns.waits().items():
            waits.setdefault(session, set()).update(workers)
        return waits

    def describe_op(self, code: int, site: int) -> str:
        """What a worker is at, from the code and the site of its last command; empty where it has run none."""
        session = self.state.sessions.get(session_of(code))
        if not code:
            return ""
        if session is None:
            return "an op of a session that has ended"
        place = f" ({session.site(site)})" if site in session.sites else ""  # moves for a replaced copy have no line
        return f"{session.op_name(code)}{place}"


def _are_apart(places: Collection[ShardingSpec | DeviceMesh], workers: Collection[int]) -> bool:
    """Whether some of the workers of a session do not hold all parameters of a step, which are on meshes that hold them
    whole, or cut by a spec."""
    return len(places) > 1 or any(isinstance(place, ShardingSpec) or {*workers} - {*place.workers} for place in places)
