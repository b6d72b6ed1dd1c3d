"""The dispatcher's state: workers, sessions, tensors and pending requests.

Every change is a method of `State`. Changes are recorded in an undo log until `commit`, so that an instruction is
carried out whole or not at all. `apply_results` and `free` are the last change of an instruction and not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from gt.core.errors import ProtocolError
from gt.core.ids import FIRST_DISPATCHER_ID, MAX_RESULTS, SESSION_SHIFT, session_of, short_id
from gt.core.messages import Collective, Failure, WorkerInfo, WorkerJoinStore, can_overlap
from gt.core.signatures import Signature
from gt.dispatcher.instruction_errors import IdInUse, InvalidInstruction, NoWorkers, UnknownId
from gt.dispatcher.op_definitions import CachedPlan, MoveKey, OpFacts, OpRecord, PlanKey, SubsetOp
from gt.dispatcher.planner import TensorMove
from gt.dispatcher.program_parts import Layouts, ProgramRecord, ProgramSplit
from gt.dispatcher.state_records import (
    LOOPBACK,
    LOST_LONG_AGO,
    DeadWorker,
    HaltedStep,
    ModuleNeeds,
    PendingRequest,
    RunningModule,
    ScopeRecord,
    SessionRecord,
    WorkerRecord,
)
from gt.dispatcher.tensor_losses import TensorLosses
from gt.dispatcher.tensor_records import PublishedTensor, SessionUse
from gt.sharding.foreach_subsets import ForeachSubset
from gt.sharding.spec import DeviceMesh
from gt.signals.policy import Policy

MAX_DEFINED = 1 << 27  # bytes of the definitions of a session, as they were sent
MAX_DEFINED_OF_KEY = 1 << 28  # bytes of the definitions of all sessions of a key
RECORD_BYTES = 128  # size of a definition besides its text
MAX_COLLECTIVES = 1 << 20  # collectives kept for a session that watches its traffic
MAX_GATHERINGS = 1 << 16  # lines whose gathered inputs are reported to a client
FACTS_KEPT = 1024  # facts kept of removed ops and programs of a session
MAX_PLANS = 1 << 15  # plans of a session; one with more loses all of them, and plans anew
NEW_BYTES = 1 << 20  # a tensor without a layout goes to a new worker if the others hold this much more
DEAD_KEPT = 4096  # lost workers whose reasons are kept
MODULES_KEPT = 1 << 14  # modules of a session whose needed layouts are remembered
_encoder = msgspec.msgpack.Encoder()


@dataclass
class State(TensorLosses):
    """The workers, sessions and tensors. `pending` are unanswered requests by id, `dead_workers` the last that were
    lost. `copy_limit` is the most bytes of copies on a worker (None: no limit). `published` are tensors that sessions
    have published, by name. `store` is the key-value store for process groups, on worker `store_host`."""

    copy_limit: int | None = None
    workers: dict[int, WorkerRecord] = field(default_factory=dict)
    sessions: dict[int, SessionRecord] = field(default_factory=dict)
    pending: dict[int, PendingRequest] = field(default_factory=dict)
    dead_workers: dict[int, DeadWorker] = field(default_factory=dict)
    published: dict[str, PublishedTensor] = field(default_factory=dict)
    store: WorkerJoinStore | None = None
    store_host: int = -1
    workers_joined: int = 0
    sessions_opened: int = 0
    defined_by_key: dict[str, int] = field(default_factory=dict)  # bytes of definitions, by the names of keys

    def commit(self) -> None:
        """Keep the changes since the last commit."""
        self.undo.commit()

    def roll_back(self) -> None:
        """Undo the changes since the last commit."""
        self.undo.roll_back()

    # Workers

    def add_worker(
        self,
        device: str,
        host: str,
        pid: int,
        memory: int = 0,
        *,
        overlaps: bool = False,
        hostname: str = "",
        address: str = LOOPBACK,
    ) -> WorkerRecord:
        """A new worker gets an id that no other worker had."""
        ident = self.workers_joined
        self.undo.assign(self, "workers_joined", ident + 1)
        worker = WorkerRecord(
            WorkerInfo(ident, device, host, pid, overlaps, hostname),
            DeviceMesh([1], ["w"], [ident]),
            ready=False,
            memory=memory,
            address=address,
            is_new=any(session.workers for session in self.sessions.values()),
        )
        self.undo.put(self.workers, ident, worker)
        return worker

    def remove_worker(self, ident: int, dead: DeadWorker) -> None:
        """The worker gets no more commands. Its tensors are lost separately, by `lose_parts`."""
        self.undo.drop(self.workers, ident)
        self.undo.put(self.dead_workers, ident, dead)
        if len(self.dead_workers) > DEAD_KEPT:
            self.undo.drop(self.dead_workers, next(iter(self.dead_workers)))

    def was_lost(self, ident: int) -> bool:
        """Whether a worker was there once and takes no more work."""
        return 0 <= ident < self.workers_joined and (ident not in self.workers or self.workers[ident].is_closed)

    def dead_worker(self, ident: int) -> DeadWorker:
        """How a worker was lost, or will be."""
        leaving = self.workers[ident].leaving if ident in self.workers else None
        return leaving or self.dead_workers.get(ident, LOST_LONG_AGO)

    def set_leaving(self, ident: int, dead: DeadWorker) -> None:
        self.undo.assign(self.workers[ident], "leaving", dead)

    def close_worker(self, ident: int) -> None:
        self.undo.assign(self.workers[ident], "is_closed", True)

    def staying(self) -> list[int]:
        """The workers that take tensors: those that are ready and do not leave."""
        return [ident for ident, worker in self.workers.items() if worker.ready and worker.leaving is None]

    def set_ready(self, workers: Iterable[int], ready: bool = True) -> None:
        for ident in workers:
            self.undo.assign(self.workers[ident], "ready", ready)

    def set_copy_limit(self, limit: int | None) -> None:
        self.undo.assign(self, "copy_limit", limit)

    def set_store(self, host: int, store: WorkerJoinStore | None) -> None:
        self.undo.assign(self, "store_host", host)
        self.undo.assign(self, "store", store)

    def note_store_host(self, ident: int) -> None:
        """A worker is asked to host the store."""
        self.undo.assign(self.workers[ident], "hosts_store", True)

    def least_loaded_mesh(self) -> DeviceMesh:
        """The ready worker that holds the fewest bytes; of equals, the one with the lowest id. One that is new, and so
        empty, does not get all that follows: it may end as soon as it has come, so that others hold more before."""
        if len(self.workers) == 1:
            return next(iter(self.workers.values())).solo_mesh
        ready = self.staying() or [ident for ident, worker in self.workers.items() if worker.ready]
        if not ready:
            raise NoWorkers
        loads = self.bytes_by_worker()
        for ident in ready:
            loads[ident] += NEW_BYTES * self.workers[ident].is_new
        return self.workers[min(ready, key=lambda ident: (loads[ident], ident))].solo_mesh

    def bytes_by_worker(self) -> dict[int, int]:
        """The bytes of tensors that each worker holds, copies included."""
        loads = dict.fromkeys(self.workers, 0)
        for mesh, nbytes in self.bytes_on.items():
            for worker in mesh.workers if nbytes else ():
                if worker in loads:
                    loads[worker] += nbytes
        return loads

    def overlaps(self, mesh: DeviceMesh) -> bool:
        """Whether the workers of a mesh compute while their exchanges go on."""
        return can_overlap([self.workers[worker].info for worker in mesh.workers])

    def lost_peer(self, failure: Failure) -> int | None:
        """The lost worker that explains a failed exchange, if there is one."""
        return next((worker for worker in failure.peers if self.was_lost(worker)), None)

    def note_op_defined(self, worker: int, op_id: int) -> None:
        self.undo.add(self.workers[worker].known_ops, (op_id,))
        self.note_use(session_of(op_id), (worker,))

    def note_ops_forgotten(self, worker: int, op_ids: Iterable[int]) -> None:
        self.undo.discard(self.workers[worker].known_ops, op_ids)

    # Sessions

    def add_session(self, host: str, pid: int, key: str = "") -> SessionRecord:
        ident = self.sessions_opened + 1
        self.undo.assign(self, "sessions_opened", ident)
        session = SessionRecord(ident, host, pid, key)
        self.undo.put(self.sessions, ident, session)
        if self.limits is not None:
            self.undo.put(self.uses, ident, SessionUse())
        return session

    def remove_session(self, ident: int) -> None:
        """Remove a session with its requests, tensors and ops."""
        session = self.undo.drop(self.sessions, ident)
        for request in [request for request in self.pending if session_of(request) == ident]:
            self.drop_request(request)
        for name in [name for name, published in self.published.items() if published.session == ident]:
            self.undo.drop(self.published, name)
        for tensor in self.tensors_of(ident):
            self.remove(tensor)
        self.undo.discard(self.unused_copies, [copy for copy in self.unused_copies if session_of(copy) == ident])
        for worker in self.workers.values():
            self.undo.discard(worker.known_ops, [op_id for op_id in worker.known_ops if session_of(op_id) == ident])
        if self.limits is not None:
            self.undo.drop(self.uses, ident)
        self._count_definition(session, -session.defined_bytes)
        if not self.defined_by_key[session.key]:
            self.undo.drop(self.defined_by_key, session.key)

    def publish(self, name: str, published: PublishedTensor) -> None:
        self._count_definition(self.sessions[published.session], _size_of_publication(name, published))
        self.undo.put(self.published, name, published)

    def unpublish(self, name: str) -> list[tuple[int, DeviceMesh]]:
        """Returns the published version, to be freed: subscribers have their own ids."""
        published = self.undo.drop(self.published, name)
        self._count_definition(self.sessions[published.session], -_size_of_publication(name, published))
        return self.remove(published.ident)

    def has_ended(self, session: int) -> bool:
        """Whether a session has ended; workers may still report to it. Raises ProtocolError for a session that never
        existed."""
        if not 0 < session <= self.sessions_opened:
            raise ProtocolError(f"there was never a session {session}")
        return session not in self.sessions

    def note_use(self, session: int, workers: Iterable[int]) -> None:
        """From now on these workers may hold tensors of a session and report failures to it."""
        if session in self.sessions and not self.sessions[session].workers.issuperset(workers):
            self.undo.add(self.sessions[session].workers, workers)
            for worker in self.workers.keys() & set(workers):
                self.undo.assign(self.workers[worker], "is_new", False)

    def set_halted(self, session: SessionRecord, halted: HaltedStep | None) -> None:
        self.undo.assign(session, "halted", halted)

    def set_running_module(self, session: SessionRecord, module: int, parameters: Sequence[int]) -> None:
        """From now on, copies that ops make of these parameters are noted as needed by the module."""
        self.undo.assign(session, "running_module", RunningModule(module, tuple(parameters)))

    def note_need(self, session: SessionRecord, ident: int, move: TensorMove) -> None:
        """Note that an op has made a copy of a tensor by a move. If the tensor is a parameter of the running module,
        the module needs the copy each time it runs."""
        running = session.running_module
        if running is None or ident not in running.parameters:
            return
        if running.module not in session.modules and len(session.modules) >= MODULES_KEPT:
            forgotten = self.undo.drop(session.modules, next(iter(session.modules)))
            self.undo.discard(self.unused_copies, forgotten.copies.values())
        known = session.modules.get(running.module, ModuleNeeds({}, {}))
        moves = {**known.moves, running.parameters.index(ident): move}
        self.undo.put(session.modules, running.module, known._replace(moves=moves))

    def forget_unused(self, session: SessionRecord, module: int) -> None:
        """Forget the moves of a module whose copies no op has used since the module began the last time."""
        known = session.modules.get(module)
        if known is None:
            return
        unused = {position for position, copy in known.copies.items() if copy in self.unused_copies}
        moves = {position: move for position, move in known.moves.items() if position not in unused}
        self.undo.discard(self.unused_copies, known.copies.values())
        self.undo.put(session.modules, module, ModuleNeeds(moves, {}))

    def expect_uses(self, session: SessionRecord, module: int, copies: Mapping[int, int]) -> None:
        """The module begins, and its ops are expected to use these copies of its parameters."""
        if copies:
            self.undo.put(session.modules, module, session.modules[module]._replace(copies=copies))
            self.undo.add(self.unused_copies, copies.values())

    def note_accumulation(self, session: SessionRecord) -> None:
        """The session adds up gradients of several backwards."""
        if not session.accumulates:
            self.undo.assign(session, "accumulates", True)

    def set_watches(self, session: SessionRecord, watches: bool) -> None:
        self.undo.assign(session, "watches", watches)

    def add_collectives(self, session: SessionRecord, collectives: Sequence[Collective]) -> None:
        if len(session.collectives) < MAX_COLLECTIVES:
            self.undo.extend(session.collectives, collectives)

    def take_collectives(self, session: SessionRecord) -> tuple[Collective, ...]:
        collectives = tuple(session.collectives)
        self.undo.assign(session, "collectives", [])
        return collectives

    def note_gathering(self, session: SessionRecord, op: str, site: str) -> bool:
        """Remember that the inputs of an op at a site are gathered; returns whether that is new."""
        if (op, site) in session.gatherings or len(session.gatherings) >= MAX_GATHERINGS:
            return False
        self.undo.add(session.gatherings, [(op, site)])
        return True

    # Definitions and plans

    def new_id(self, session: SessionRecord) -> int:
        """An id of the dispatcher's own, for a copy or a program."""
        self.undo.assign(session, "ids_given", session.ids_given + 1)
        return (session.ident << SESSION_SHIFT) + FIRST_DISPATCHER_ID + session.ids_given

    def define_op(self, session: SessionRecord, op: OpRecord) -> None:
        self._count_definition(session, _size(op.signature))
        self.undo.put(session.ops, op.op_id, op)

    def _count_definition(self, session: SessionRecord, nbytes: int) -> None:
        """Raises InvalidInstruction if a session, or all those of its key, make the dispatcher remember too much."""
        of_key = self.defined_by_key.get(session.key, 0) + nbytes
        if nbytes > 0 and (session.defined_bytes + nbytes > MAX_DEFINED or of_key > MAX_DEFINED_OF_KEY):
            raise InvalidInstruction(
                f"the ops, lines, scopes and published names of a session may take {MAX_DEFINED} bytes, and those of "
                f"all sessions of a key {MAX_DEFINED_OF_KEY}; this session has {session.defined_bytes}, and its key "
                f"{of_key - nbytes}. Forget some, or end sessions",
                "limit",
            )
        self.undo.assign(session, "defined_bytes", session.defined_bytes + nbytes)
        self.undo.put(self.defined_by_key, session.key, of_key)

    def define_subset(
        self, session: SessionRecord, op: OpRecord, chosen: tuple[int, ...], subset: ForeachSubset
    ) -> SubsetOp:
        """Define a foreach op on the `chosen` positions of its lists as an op with an id of the dispatcher's own."""
        added = SubsetOp(self.new_id(session), subset)
        self.undo.put(op.subsets, chosen, added)
        self.define_op(session, OpRecord.of(added.op_id, subset.signature))
        return added

    def count_plan(self, session: SessionRecord) -> None:
        """Count a plan that was made. Not undone: it was made, even if its instruction fails."""
        session.plans_made += 1

    def define_site(self, session: SessionRecord, site_id: int, file: str, line: int) -> None:
        self._count_definition(session, RECORD_BYTES + len(file))
        self.undo.put(session.sites, site_id, (file, line))

    def define_scope(self, session: SessionRecord, scope_id: int, scope: ScopeRecord) -> None:
        self._count_definition(session, RECORD_BYTES + len(scope.name) + 8 * _mesh_size(scope.policy))
        self.undo.put(session.scopes, scope_id, scope)

    def define_program(self, session: SessionRecord, op: str) -> int:
        """The id of a new program for an op."""
        op_id = self.new_id(session)
        self.undo.put(session.program_names, op_id, op)
        return op_id

    def policy(self, session: SessionRecord, scope_id: int) -> Policy | None:
        """The policy of a scope; None outside any scope. A default scope with a worker that is lost or leaves has no
        policy either."""
        if not scope_id:
            return None
        scope = session.scopes.get(scope_id)
        if scope is None:
            raise UnknownId("scope", scope_id)
        policy = scope.policy
        if policy is None or policy.places:
            return policy
        is_complete = not self.dead_workers and not any(worker.leaving for worker in self.workers.values())
        return policy if is_complete or {*policy.mesh.workers} <= {*self.staying()} else None

    def add_plan(self, op: OpRecord, key: PlanKey, plan: CachedPlan) -> None:
        self.undo.put(op.plans, key, plan)
        self._count_plans(self.sessions[session_of(op.op_id)], 1)
        self.note_use(session_of(op.op_id), plan.plan.workers)

    def add_moves(self, session: SessionRecord, key: MoveKey, plan: CachedPlan) -> None:
        self.undo.put(session.move_plans, key, plan)
        self._count_plans(session, 1)
        self.note_use(session.ident, plan.plan.workers)

    def forget_moves(self, session: SessionRecord, keys: Iterable[MoveKey]) -> list[CachedPlan]:
        """Remove plans of moves; returns them."""
        plans = [self.undo.drop(session.move_plans, key) for key in keys]
        self._count_plans(session, -len(plans))
        return plans

    def _count_plans(self, session: SessionRecord, count: int) -> None:
        self.undo.assign(session, "plans_kept", session.plans_kept + count)

    def forget_ops(self, session: SessionRecord, op_ids: Iterable[int]) -> list[CachedPlan]:
        """Remove ops with their plans, and the plans of all moves; returns the plans."""
        ops = [self.undo.drop(session.ops, op_id) for op_id in dict.fromkeys(op_ids) if op_id in session.ops]
        for op in ops:
            self._count_definition(session, -_size(op.signature))
            self._keep_facts(session, op.op_id, OpFacts(op.signature.op, op.signature.writes))
        plans = [plan for op in ops for plan in op.plans.values()]
        self._count_plans(session, -len(plans))
        return [*plans, *self.forget_moves(session, list(session.move_plans))]

    def forget_plans(self, session: SessionRecord) -> list[CachedPlan]:
        """Remove all plans of a session; returns them."""
        return self._forget_plans_if(session, lambda cached: True)

    def forget_plans_on(self, session: SessionRecord, worker: int) -> list[CachedPlan]:
        """Remove the plans that a lost worker takes part in; returns them."""
        return self._forget_plans_if(session, lambda cached: worker in cached.plan.workers)

    def _forget_plans_if(self, session: SessionRecord, is_forgotten: Callable[[CachedPlan], bool]) -> list[CachedPlan]:
        tables = [*[op.plans for op in session.ops.values()], session.move_plans]
        plans: list[CachedPlan] = [
            self.undo.drop(table, key)  # type: ignore[arg-type]
            for table in tables
            for key, cached in list(table.items())  # type: ignore[attr-defined]
            if is_forgotten(cached)
        ]
        self._count_plans(session, -len(plans))
        return plans

    def forget_program(self, session: SessionRecord, cached: CachedPlan) -> bool:
        """Returns whether the plan had a program."""
        if cached.op_id not in session.program_names:
            return False
        name = self.undo.drop(session.program_names, cached.op_id)
        self._keep_facts(session, cached.op_id, OpFacts.of_program(name, cached.plan))
        return True

    def _keep_facts(self, session: SessionRecord, op_id: int, facts: OpFacts) -> None:
        self.undo.put(session.forgotten, op_id, facts)
        if len(session.forgotten) > FACTS_KEPT:
            self.undo.drop(session.forgotten, next(iter(session.forgotten)))

    # Programs

    def add_program(self, session: SessionRecord, record: ProgramRecord) -> None:
        self.undo.put(session.programs, record.program_id, record)

    def add_split(self, session: SessionRecord, record: ProgramRecord, layouts: Layouts, split: ProgramSplit) -> None:
        self.undo.put(record.splits, layouts, split)
        for part in split.parts:
            self.undo.put(session.program_parts, part.part_id, part)

    def forget_splits(self, session: SessionRecord, program_ids: Iterable[int]) -> list[int]:
        """Forget how programs are split; returns the ids of their parts."""
        records = [session.programs[ident] for ident in program_ids]
        splits = [self.undo.drop(record.splits, key) for record in records for key in list(record.splits)]
        parts = [part.part_id for split in splits for part in split.parts]
        for part_id in parts:
            self.undo.drop(session.program_parts, part_id)
        return parts

    def forget_programs(self, session: SessionRecord, program_ids: Iterable[int]) -> list[int]:
        """Returns the ids of the parts of these programs."""
        known = [ident for ident in dict.fromkeys(program_ids) if ident in session.programs]
        parts = self.forget_splits(session, known)
        for ident in known:
            self.undo.drop(session.programs, ident)
        return parts

    # Requests

    def require_new_request(self, request: int) -> None:
        """Raises IdInUse for the id of a request that was not answered yet."""
        if request in self.pending:
            raise IdInUse("request", request)

    def add_request(self, request: int, pending: PendingRequest) -> None:
        self.require_new_request(request)
        self.undo.put(self.pending, request, pending)
        if pending.written:
            self.undo.add(self.may_resize, [ident for ident, _ in pending.written])

    def set_request(self, request: int, pending: PendingRequest) -> None:
        self.undo.put(self.pending, request, pending)

    def drop_request(self, request: int) -> PendingRequest:
        pending = self.undo.drop(self.pending, request)
        if pending.written:
            self.undo.discard(self.may_resize, [ident for ident, _ in pending.written])
        return pending

    def reserve_results(self, session: SessionRecord, first: int) -> None:
        """Reserve the ids of a query's results, after those that were reserved for earlier queries."""
        if first < session.next_result:
            raise InvalidInstruction(
                f"results of a query cannot take ids from {short_id(first)} on, which another query may use"
            )
        self.undo.assign(session, "next_result", first + MAX_RESULTS)


def _size_of_publication(name: str, published: PublishedTensor) -> int:
    return RECORD_BYTES * (1 + len(published.to)) + len(name) + sum(map(len, published.to))


def _size(signature: Signature) -> int:
    return RECORD_BYTES + len(_encoder.encode(signature))


def _mesh_size(policy: Policy | None) -> int:
    return 0 if policy is None else policy.mesh.size
