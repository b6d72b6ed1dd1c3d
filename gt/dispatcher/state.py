"""What the dispatcher knows: workers, sessions, where every tensor is, and what clients wait for.

Every change of it is a method of `State`. A change is recorded until `commit` and can be taken back until then, so that
an instruction is carried out whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from gt.core.errors import LayoutError, ProtocolError
from gt.core.ids import FIRST_OWN, MAX_RESULTS, SESSION_SHIFT, session_of, short_id
from gt.core.messages import (
    Collective,
    Failed,
    Failure,
    Fetched,
    Queried,
    Span,
    Stats,
    Synchronized,
    TimelineReport,
    Traffic,
    Versions,
    WorkerInfo,
    WorkerJoinStore,
)
from gt.core.meta import ITEM_BYTES, TensorMeta
from gt.core.signatures import Signature, SpecRecord
from gt.dispatcher.planner import Plan
from gt.dispatcher.undo_log import UndoLog
from gt.sharding.cost import memory_bytes
from gt.sharding.placements import require_fit
from gt.sharding.spec import DeviceMesh, ShardingSpec, spec_of, whole
from gt.signals.policy import Policy


@dataclass
class WorkerRecord:
    """`known` are the op codes it was told; one that is not `ready` cannot exchange tensors with others yet and gets no
    work. `solo_mesh` is the mesh of this worker only."""

    info: WorkerInfo
    solo_mesh: DeviceMesh
    ready: bool = True
    known: set[int] = field(default_factory=set)


class DeadWorker(NamedTuple):
    """A worker that is no longer there."""

    pid: int
    reason: str
    last_op: str


Reply: TypeAlias = Fetched | Queried | Failed | Synchronized | Versions | Traffic | Stats | TimelineReport


class PendingRequest(NamedTuple):
    """A request that workers have not answered yet: the workers that are waited for, the kinds of answers that they may
    give, and those that they have given. A read brings `nbytes`, where that is known (otherwise -1). One that
    `is_answered` already, since a worker was lost, waits only for replies that are still on their way. `asked`: the
    tensors whose versions are read. Of a query: the workers that run it, the first id of its results, and its new
    versions with what they were taken for."""

    waiting_for: frozenset[int]
    expects: tuple[type[Reply], ...]
    replies: tuple[tuple[int, Reply], ...] = ()
    nbytes: int = -1
    is_answered: bool = False
    mesh: DeviceMesh | None = None
    first: int = 0
    written: tuple[tuple[int, TensorMeta], ...] = ()
    asked: tuple[int, ...] = ()


class InvalidInstruction(Exception):
    """An instruction that makes no sense: a mistake of the client."""


class UnknownId(InvalidInstruction):
    """An instruction names something that is not there."""

    def __init__(self, what: str, ident: int) -> None:
        super().__init__(f"there is no {what} {short_id(ident)}")


class IdInUse(InvalidInstruction):
    """An instruction gives an id to something new that something else has."""

    def __init__(self, what: str, ident: int) -> None:
        super().__init__(f"{what} {short_id(ident)} is there already; each one needs an id of its own")


def layout_of(record: SpecRecord) -> ShardingSpec:
    """The layout that a client names."""
    try:
        return spec_of(record)
    except ValueError as error:
        raise InvalidInstruction(str(error)) from None


def require_layout(layout: ShardingSpec, meta: TensorMeta) -> None:
    """A client's layout must be one of the tensor that it is for."""
    try:
        require_fit(layout, meta)
    except LayoutError as error:
        raise InvalidInstruction(str(error)) from None


Cause: TypeAlias = int | Failure
"""Why a tensor has no value: a worker that is gone, or what failed."""


class NoValue(Exception):
    """Something that is needed has no value."""

    def __init__(self, cause: Cause, what: str) -> None:
        super().__init__(f"{what} has no value because of {cause}")
        self.cause = cause


class NoWorkers(Exception):
    """Every worker is gone."""


class MissingValue(NamedTuple):
    """A tensor without a value: what it would be, and why it is not."""

    meta: TensorMeta
    cause: Cause


class CachedPlan(NamedTuple):
    """A plan that the workers have been told of, by `code`. `results` are ready to be placed; `moves` says that some
    input is taken in another layout than the one it has, `meets` that the workers exchange tensors."""

    plan: Plan
    code: int
    results: tuple[TensorRecord, ...]
    moves: bool
    meets: bool


Laid: TypeAlias = ShardingSpec | tuple[ShardingSpec, ...]
"""How a tensor lies: its layout, and those of its copies."""

PlanKey: TypeAlias = tuple[Policy | Laid | tuple[int, int] | str, ...]
MoveKey: TypeAlias = tuple[TensorMeta, ShardingSpec, ShardingSpec]
REDUCES_FIRST = "reduces first"  # in the key of a plan for numbers with which its op is not linear


class OpRecord(NamedTuple):
    """A signature and what was decided about it, by the scope's policy and the layouts of its inputs. `gives` counts
    new tensors and new versions; `layout` is that of the outputs, where the user has said so, and `nbytes` their
    bytes."""

    code: int
    signature: Signature
    takes: int
    gives: int
    layout: ShardingSpec | None
    plans: dict[PlanKey, CachedPlan]
    nbytes: int

    def aliased_inputs(self, inputs: tuple[int, ...]) -> dict[int, int]:
        """The places of other views of a tensor that the op writes, and where it writes it. Raises Misfit for a tensor
        that it writes at two places: it would have two new versions."""
        if not self.signature.writes or len(set(inputs)) == len(inputs):
            return {}
        written = {inputs[place]: place for place in self.signature.writes}
        if len(written) < len(self.signature.writes):
            raise InvalidInstruction(
                f"{self.signature.op} writes {self.signature.writes} of {inputs}: one tensor at two places"
            )
        return {place: at for place, ident in enumerate(inputs) if (at := written.get(ident, place)) != place}

    def require_fit(self, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> dict[int, int]:
        """A call must have the tensors that the signature says. Gives what `aliased_inputs` does."""
        if len(inputs) != self.takes or len(outputs) != self.gives:
            raise InvalidInstruction(f"{self.signature.op} takes {self.takes} tensors and gives {self.gives}")
        return self.aliased_inputs(inputs)

    def require_fit_of_query(self, inputs: tuple[int, ...], written: tuple[int, ...]) -> None:
        writes = len(self.signature.writes)
        if len(inputs) != self.takes or len(written) != writes:
            raise InvalidInstruction(f"{self.signature.op} takes {self.takes} tensors and writes {writes}")
        self.aliased_inputs(inputs)

    @classmethod
    def of(cls, code: int, signature: Signature) -> OpRecord:
        takes, writes, outputs = len(signature.paths), signature.writes, signature.outputs
        if len(set(writes)) < len(writes) or not all(0 <= place < takes for place in writes):
            raise InvalidInstruction(f"{signature.op} of {takes} tensors cannot write {writes}")
        layout = layout_of(signature.layout) if signature.layout is not None else None
        if layout is not None:
            for meta in outputs:
                require_layout(layout, meta)
        nbytes = sum([meta.nbytes for meta in outputs])
        return cls(code, signature, takes, len(outputs) + len(writes), layout, {}, nbytes)


@dataclass
class SessionRecord:
    """`ops`, `sites` and `scopes` are what the client defined, by its codes; `programs` are the names of ops by the
    codes that the dispatcher gave. `collectives` collects what moved while the client `watches`. `gatherings` are the
    ops, with their lines, of which the client was told that they gather their inputs. `given` counts the ids that the
    dispatcher gave; results of queries take ids from `next_run` on. `halt` is there while a step must not write.
    `workers` have run something for it."""

    ident: int
    host: str
    pid: int
    ops: dict[int, OpRecord] = field(default_factory=dict)
    sites: dict[int, tuple[str, int]] = field(default_factory=dict)
    scopes: dict[int, ScopeRecord] = field(default_factory=dict)
    programs: dict[int, str] = field(default_factory=dict)
    moves: dict[MoveKey, CachedPlan] = field(default_factory=dict)
    watches: bool = False
    collectives: list[Collective] = field(default_factory=list)
    gatherings: set[tuple[str, str]] = field(default_factory=set)
    given: int = 0
    next_run: int = 0
    halt: Halt | None = None
    workers: set[int] = field(default_factory=set)

    def op(self, code: int) -> OpRecord:
        found = self.ops.get(code)
        if found is None:
            raise UnknownId("op", code)
        return found

    def site(self, code: int) -> str:
        file, line = self.sites.get(code, ("?", 0))
        return f"{file}:{line}"

    def op_name(self, code: int) -> str:
        return self.ops[code].signature.op if code in self.ops else self.programs.get(code, "")


class TensorRecord(NamedTuple):
    """A tensor that workers hold. Many tensors share one record, so it says nothing of an id. `nbytes` is the most that
    one worker holds of it. One that is not `pinned` is where it is because it had to be somewhere: it goes where a
    scope first needs it, for good."""

    meta: TensorMeta
    spec: ShardingSpec
    nbytes: int
    pinned: bool

    @classmethod
    def of(cls, meta: TensorMeta, spec: ShardingSpec, pinned: bool | None = None) -> TensorRecord:
        """Where nobody has said whether it is settled, one that several workers hold is."""
        nbytes = memory_bytes(spec, meta.shape, ITEM_BYTES[meta.dtype])
        return cls(meta, spec, nbytes, spec.mesh.size > 1 if pinned is None else pinned)


class FormerValue(NamedTuple):
    """The value that a tensor had before a write that could not be done, with the id that workers know it by, and the
    id that the first such write should have given it."""

    ident: int
    held: TensorRecord
    until: int


class Halt(NamedTuple):
    """A step of an optimizer that must not write to what was there before it, as some gradient has no value."""

    step: int
    cause: Cause


class ScopeRecord(NamedTuple):
    """A signal scope of a client. One without a policy changes nothing about where ops run."""

    name: str
    policy: Policy | None
    compile: bool


class Losses(NamedTuple):
    """What is to be done when a worker is gone. `useless`: parts that other workers still hold, by ids and where.
    `promoted`: tensors that are now where a copy was, with the ids that the copies had."""

    useless: list[tuple[int, DeviceMesh]]
    promoted: list[tuple[int, int]]


def without(mesh: DeviceMesh, worker: int) -> DeviceMesh | None:
    """The other workers of a mesh, if there are any, in a row."""
    rest = [member for member in mesh.workers if member != worker]
    return DeviceMesh([len(rest)], ["w"], rest) if rest else None


def common_span(parts: Sequence[Span], until: int) -> Span:
    """When all parts of a tensor had the values that can still be had of them."""
    if not parts:
        return Span(0, 0)
    ends = [end for end in (*[part.until for part in parts], until) if end]
    since = max([part.since for part in parts]) if all(part.since for part in parts) else 0
    kept = [(part.kept_since, part.kept_until) for part in parts]
    if not all(first for first, _ in kept):
        return Span(since, min(ends, default=0))
    return Span(since, min(ends, default=0), max([first for first, _ in kept]), min([last for _, last in kept]))


@dataclass
class State:
    """`copies`: other layouts in which a tensor is there too, made for use, with the ids they have on the workers.
    `loads`: bytes on each worker of a mesh. `lost`: tensors without a value. `before`: for those of them that should
    have been written, what workers still hold of the value before the write. `pending`: requests by their ids.
    `resizing`: tensors that a query may turn into others, once it is answered. `gone`: workers that were there.
    `store`: where process groups meet, on the worker `store_host`."""

    workers: dict[int, WorkerRecord] = field(default_factory=dict)
    sessions: dict[int, SessionRecord] = field(default_factory=dict)
    tensors: dict[int, TensorRecord] = field(default_factory=dict)
    copies: dict[int, dict[ShardingSpec, int]] = field(default_factory=dict)
    loads: dict[DeviceMesh, int] = field(default_factory=dict)
    lost: dict[int, MissingValue] = field(default_factory=dict)
    before: dict[int, FormerValue] = field(default_factory=dict)
    pending: dict[int, PendingRequest] = field(default_factory=dict)
    resizing: set[int] = field(default_factory=set)
    gone: dict[int, DeadWorker] = field(default_factory=dict)
    store: WorkerJoinStore | None = None
    store_host: int = -1
    workers_joined: int = 0
    sessions_opened: int = 0
    undo: UndoLog = field(default_factory=UndoLog, compare=False, repr=False)

    def commit(self) -> None:
        """Keep the changes since the last time."""
        self.undo.commit()

    def roll_back(self) -> None:
        """Take back the changes since the last commit."""
        self.undo.roll_back()

    # Workers and sessions

    def add_worker(self, device: str, host: str, pid: int) -> WorkerRecord:
        """A worker that joins gets an id of its own that no other worker had."""
        ident = self.workers_joined
        self.undo.assign(self, "workers_joined", ident + 1)
        worker = WorkerRecord(WorkerInfo(ident, device, host, pid), DeviceMesh([1], ["w"], [ident]), ready=False)
        self.undo.put(self.workers, ident, worker)
        return worker

    def remove_worker(self, ident: int, gone: DeadWorker) -> None:
        """The worker gets no more work. What it held is still to be lost."""
        self.undo.drop(self.workers, ident)
        self.undo.put(self.gone, ident, gone)

    def make_ready(self, workers: Iterable[int], ready: bool = True) -> None:
        for ident in workers:
            self.undo.assign(self.workers[ident], "ready", ready)

    def set_store(self, host: int, store: WorkerJoinStore | None) -> None:
        self.undo.assign(self, "store_host", host)
        self.undo.assign(self, "store", store)

    def add_session(self, host: str, pid: int) -> SessionRecord:
        ident = self.sessions_opened + 1
        self.undo.assign(self, "sessions_opened", ident)
        session = SessionRecord(ident, host, pid)
        self.undo.put(self.sessions, ident, session)
        return session

    def remove_session(self, ident: int) -> None:
        """Forget a session and everything that was its own."""
        self.undo.drop(self.sessions, ident)
        for request in [request for request in self.pending if session_of(request) == ident]:
            self.drop_request(request)
        for tensor in self.held_by(ident):
            self.remove(tensor)
        for worker in self.workers.values():
            self.undo.discard(worker.known, [code for code in worker.known if session_of(code) == ident])

    def policy(self, session: SessionRecord, code: int) -> Policy | None:
        """What a scope asks of its ops; None outside any. A scope that the user has not placed asks for nothing when a
        worker of it is gone."""
        if not code:
            return None
        scope = session.scopes.get(code)
        if scope is None:
            raise UnknownId("scope", code)
        policy = scope.policy
        if policy is None or policy.pins or not self.gone:
            return policy
        return policy if all(worker in self.workers for worker in policy.mesh.workers) else None

    # What a session has defined, and what was decided for it

    def new_id(self, session: SessionRecord) -> int:
        """An id of the dispatcher's own, for a copy or a program."""
        self.undo.assign(session, "given", session.given + 1)
        return (session.ident << SESSION_SHIFT) + FIRST_OWN + session.given

    def define_op(self, session: SessionRecord, op: OpRecord) -> None:
        self.undo.put(session.ops, op.code, op)

    def define_site(self, session: SessionRecord, code: int, file: str, line: int) -> None:
        self.undo.put(session.sites, code, (file, line))

    def define_scope(self, session: SessionRecord, code: int, scope: ScopeRecord) -> None:
        self.undo.put(session.scopes, code, scope)

    def name_program(self, session: SessionRecord, op: str) -> int:
        """The code of a new program for an op."""
        code = self.new_id(session)
        self.undo.put(session.programs, code, op)
        return code

    def add_plan(self, op: OpRecord, key: PlanKey, plan: CachedPlan) -> None:
        self.undo.put(op.plans, key, plan)
        self.note_use(session_of(op.code), plan.plan.workers)

    def note_use(self, session: int, workers: Iterable[int]) -> None:
        """Workers may hold something of a session from now on, and tell it of failures."""
        if session in self.sessions and not self.sessions[session].workers.issuperset(workers):
            self.undo.add(self.sessions[session].workers, workers)

    def note_gathering(self, session: SessionRecord, op: str, site: str) -> bool:
        """Remember that an op at a line gathers its inputs; gives whether that is new."""
        if (op, site) in session.gatherings:
            return False
        self.undo.add(session.gatherings, [(op, site)])
        return True

    def add_move(self, session: SessionRecord, key: MoveKey, plan: CachedPlan) -> None:
        self.undo.put(session.moves, key, plan)
        self.note_use(session.ident, plan.plan.workers)

    def forget_ops(self, session: SessionRecord, codes: Iterable[int]) -> list[CachedPlan]:
        """Forget ops, their plans and all moves; gives what was decided for them."""
        ops = [self.undo.drop(session.ops, code) for code in dict.fromkeys(codes) if code in session.ops]
        moves = [self.undo.drop(session.moves, key) for key in list(session.moves)]
        return [*[plan for op in ops for plan in op.plans.values()], *moves]

    def forget_plans_on(self, session: SessionRecord, worker: int) -> list[CachedPlan]:
        """Forget what was decided for a worker that is gone."""
        tables = [*[op.plans for op in session.ops.values()], session.moves]
        return [
            self.undo.drop(table, key)  # type: ignore[arg-type]
            for table in tables
            for key, prepared in list(table.items())  # type: ignore[attr-defined]
            if worker in prepared.plan.workers
        ]

    def forget_program(self, session: SessionRecord, code: int) -> bool:
        """Gives whether there was one."""
        if code not in session.programs:
            return False
        self.undo.drop(session.programs, code)
        return True

    def note_known(self, worker: int, code: int) -> None:
        """A worker was told of an op."""
        self.undo.add(self.workers[worker].known, (code,))
        self.note_use(session_of(code), (worker,))

    def is_over(self, session: int) -> bool:
        """Whether a session has ended, so that workers may still report to it. Raises ProtocolError for a session that
        there never was."""
        if not 0 < session <= self.sessions_opened:
            raise ProtocolError(f"there was never a session {session}")
        return session not in self.sessions

    def note_unknown(self, worker: int, codes: Iterable[int]) -> None:
        self.undo.discard(self.workers[worker].known, codes)

    def halt(self, session: SessionRecord, halt: Halt | None) -> None:
        self.undo.assign(session, "halt", halt)

    def watch(self, session: SessionRecord, watches: bool) -> None:
        self.undo.assign(session, "watches", watches)

    def collect(self, session: SessionRecord, collectives: Sequence[Collective]) -> None:
        self.undo.extend(session.collectives, collectives)

    def take_collectives(self, session: SessionRecord) -> tuple[Collective, ...]:
        collectives = tuple(session.collectives)
        self.undo.assign(session, "collectives", [])
        return collectives

    # Requests

    def add_request(self, request: int, pending: PendingRequest) -> None:
        if request in self.pending:
            raise IdInUse("request", request)
        self.undo.put(self.pending, request, pending)
        if pending.written:
            self.undo.add(self.resizing, [ident for ident, _ in pending.written])

    def set_request(self, request: int, pending: PendingRequest) -> None:
        self.undo.put(self.pending, request, pending)

    def drop_request(self, request: int) -> PendingRequest:
        pending = self.undo.drop(self.pending, request)
        if pending.written:
            self.undo.discard(self.resizing, [ident for ident, _ in pending.written])
        return pending

    def begin_run(self, session: SessionRecord, first: int) -> None:
        """The results of a query take ids that no query before it could give to its own."""
        if first < session.next_run:
            raise InvalidInstruction(
                f"results of a query cannot take ids from {short_id(first)} on, which another query may use"
            )
        self.undo.assign(session, "next_run", first + MAX_RESULTS)

    # Tensors

    def require_new(self, idents: Sequence[int]) -> None:
        """What an instruction makes needs ids of its own."""
        if len(set(idents)) < len(idents):
            raise InvalidInstruction(f"one id is given to several new tensors: {', '.join(map(short_id, idents))}")
        for ident in idents:
            if ident in self.tensors or ident in self.lost or ident in self.resizing:
                raise IdInUse("tensor", ident)
        if self.before and not {former.ident for former in self.before.values()}.isdisjoint(idents):
            raise InvalidInstruction("an id is used again that a written tensor had")

    def place(self, ident: int, held: TensorRecord) -> None:
        assert ident not in self.tensors and ident not in self.lost, f"tensor {short_id(ident)} is there already"
        self.undo.put(self.tensors, ident, held)
        self._load(held.spec.mesh, held.nbytes)

    def replace(
        self, writes: Sequence[int], inputs: Sequence[int], outputs: Sequence[int], results: Sequence[TensorRecord]
    ) -> Sequence[tuple[int, DeviceMesh]]:
        """The last change of an op that runs: written tensors go on under new ids and their old ids are gone. Gives the
        copies of what they were. Not recorded, as nothing that follows can fail: it is what most instructions do."""
        tensors, loads = self.tensors, self.loads
        copies: Sequence[tuple[int, DeviceMesh]] = ()
        if writes:
            results = self._as_settled(writes, inputs, results)
            copies = [copy for place in writes for copy in self._consume(inputs[place])]
        for place, held in enumerate(results):  # by place: a zip takes longer
            tensors[outputs[place]] = held
            mesh = held.spec.mesh
            loads[mesh] = loads.get(mesh, 0) + held.nbytes
        return copies

    def _consume(self, ident: int) -> list[tuple[int, DeviceMesh]]:
        if ident in self.copies:
            return self.remove(ident)[1:]
        held = self.tensors.pop(ident)
        self.loads[held.spec.mesh] -= held.nbytes
        return []

    def _as_settled(
        self, writes: Sequence[int], inputs: Sequence[int], results: Sequence[TensorRecord]
    ) -> tuple[TensorRecord, ...]:
        """The results of an op, with new versions as settled as what they are versions of."""
        news = len(results) - len(writes)
        before = [self.tensors[inputs[place]].pinned for place in writes]
        versions = [
            held if held.pinned == pinned else held._replace(pinned=pinned)
            for held, pinned in zip(results[news:], before, strict=True)
        ]
        return (*results[:news], *versions)

    def lay_out(self, ident: int, spec: ShardingSpec) -> None:
        """A tensor with the same value lies otherwise now; its copies stay."""
        self._exchange(ident, TensorRecord.of(self.tensors[ident].meta, spec, pinned=True))

    def resize(self, ident: int, meta: TensorMeta) -> list[tuple[int, DeviceMesh]]:
        """A tensor that is whole where it lies has become another one; gives its copies, which are of no use now."""
        mesh = self.tensors[ident].spec.mesh
        copies = self.remove(ident)[1:]
        self.place(ident, TensorRecord.of(meta, whole(mesh, len(meta.shape))))
        return copies

    def settle(self, idents: Sequence[int]) -> None:
        """Tensors that a scope uses as they lie stay so."""
        for ident in idents:
            held = self.tensors[ident]
            if not held.pinned:
                self.undo.put(self.tensors, ident, held._replace(pinned=True))

    def add_copy(self, ident: int, spec: ShardingSpec, alias: int) -> None:
        self.undo.put(self.copies, ident, {**self.copies.get(ident, {}), spec: alias})
        self._load(spec.mesh, TensorRecord.of(self.tensors[ident].meta, spec).nbytes)

    def drop_copy(self, ident: int, spec: ShardingSpec) -> int | None:
        """Forget one copy; gives the id it had."""
        rest = dict(self.copies.get(ident, {}))
        alias = rest.pop(spec, None)
        if alias is None:
            return None
        self._load(spec.mesh, -TensorRecord.of(self.tensors[ident].meta, spec).nbytes)
        if rest:
            self.undo.put(self.copies, ident, rest)
        else:
            self.undo.drop(self.copies, ident)
        return alias

    def remove(self, ident: int) -> list[tuple[int, DeviceMesh]]:
        """Forget a tensor and its copies; gives the ids they had, and where."""
        if ident in self.lost:
            self.undo.drop(self.lost, ident)
            return self._remove_former(ident)
        if ident not in self.tensors:
            return []
        held = self.undo.drop(self.tensors, ident)
        self._load(held.spec.mesh, -held.nbytes)
        freed = [(ident, held.spec.mesh)]
        if ident in self.copies:
            for spec, alias in self.undo.drop(self.copies, ident).items():
                self._load(spec.mesh, -TensorRecord.of(held.meta, spec).nbytes)
                freed.append((alias, spec.mesh))
        return freed

    def _remove_former(self, ident: int) -> list[tuple[int, DeviceMesh]]:
        if ident not in self.before:
            return []
        former = self.undo.drop(self.before, ident)
        self._load(former.held.spec.mesh, -former.held.nbytes)
        return [(former.ident, former.held.spec.mesh)]

    def remove_all(self, idents: Sequence[int]) -> dict[DeviceMesh, list[int]]:
        """Forget tensors and their copies; gives the ids they had, by where. Like `replace` the last change of an
        instruction, and not recorded."""
        tensors, copies, loads = self.tensors, self.copies, self.loads
        freed: dict[DeviceMesh, list[int]] = {}
        for ident in idents:
            held = tensors.get(ident)
            if held is None or ident in copies:
                for alias, mesh in self.remove(ident):
                    freed.setdefault(mesh, []).append(alias)
                continue
            del tensors[ident]
            mesh = held.spec.mesh
            loads[mesh] -= held.nbytes
            if mesh in freed:
                freed[mesh].append(ident)
            else:
                freed[mesh] = [ident]
        return freed

    def _exchange(self, ident: int, held: TensorRecord) -> None:
        """Another record for a tensor that is there."""
        before = self.tensors[ident]
        self._load(before.spec.mesh, -before.nbytes)
        self.undo.put(self.tensors, ident, held)
        self._load(held.spec.mesh, held.nbytes)

    def _load(self, mesh: DeviceMesh, nbytes: int) -> None:
        self.undo.put(self.loads, mesh, self.loads.get(mesh, 0) + nbytes)

    def held(self, ident: int) -> TensorRecord:
        found = self.tensors.get(ident)
        if found is None:
            if ident in self.lost:
                raise NoValue(self.lost[ident].cause, f"tensor {short_id(ident)}")
            raise UnknownId("tensor", ident)
        return found

    def meta(self, ident: int) -> TensorMeta:
        """What a tensor is, even if it has no value."""
        return self.lost[ident].meta if ident in self.lost else self.held(ident).meta

    def held_by(self, session: int) -> list[int]:
        """The tensors of a session, lost ones included."""
        return [ident for ident in (*self.tensors, *self.lost) if session_of(ident) == session]

    def least_loaded(self) -> DeviceMesh:
        """The worker that holds the fewest bytes, the lowest id among equals."""
        if len(self.workers) == 1:
            return next(iter(self.workers.values())).solo_mesh
        ready = [ident for ident, worker in self.workers.items() if worker.ready]
        if not ready:
            raise NoWorkers
        bytes_on = dict.fromkeys(self.workers, 0)
        for mesh, load in self.loads.items():
            for worker in mesh.workers if load else ():
                if worker in bytes_on:
                    bytes_on[worker] += load
        return self.workers[min(ready, key=lambda ident: (bytes_on[ident], ident))].solo_mesh

    def source(self, ident: int) -> tuple[int, TensorRecord, int] | None:
        """What workers hold of the last value of a tensor: its id there, how it lies, and the id of the write that
        could not be planned (0: none). None where nothing is left."""
        if ident in self.before:
            return self.before[ident]
        return (ident, self.tensors[ident], 0) if ident in self.tensors else None

    def span(self, ident: int, spans: Mapping[int, Mapping[int, Span]]) -> Span:
        """Since when and until when a tensor had the value that can be read of it, from what each worker says of its
        part. One that several workers hold whole is read on the first of them."""
        source = self.source(ident)
        if source is None:
            return Span(0, 0)
        there, held, until = source
        workers = held.spec.mesh.workers[:1] if held.spec.is_whole else held.spec.mesh.workers
        return common_span([spans[worker][there] for worker in workers if there in spans.get(worker, ())], until)

    # Losses

    def lost_peer(self, failure: Failure) -> int | None:
        """The worker whose loss made an exchange fail, if that is why it failed."""
        return next((worker for worker in failure.peers if worker in self.gone), None)

    def lose(self, ident: int, meta: TensorMeta, cause: Cause) -> None:
        """A tensor that never got a value."""
        self.undo.put(self.lost, ident, MissingValue(meta, cause))

    def lose_write(self, old: int, new: int, cause: Cause) -> list[tuple[int, DeviceMesh]]:
        """A tensor that should have been written goes on under its new id without a value. The value that it had before
        is kept, and freed with it. Gives its copies, which are of no use now."""
        self.lose(new, self.meta(old), cause)
        if old in self.lost:
            self.undo.drop(self.lost, old)
            if old in self.before:
                self.undo.put(self.before, new, self.undo.drop(self.before, old))
            return []
        held = self.tensors[old]
        freed = self.remove(old)[1:]
        self.undo.put(self.before, new, FormerValue(old, held, new))
        self._load(held.spec.mesh, held.nbytes)
        return freed

    def held_on(self, worker: int) -> dict[int, list[int]]:
        """By session, the tensors that a worker holds something of, or of whose copies or former values."""
        found: dict[int, list[int]] = {}
        for ident in sorted((*self.tensors, *self.before)):
            held = self.tensors[ident] if ident in self.tensors else self.before[ident].held
            if any(worker in spec.mesh for spec in (held.spec, *self.copies.get(ident, ()))):
                found.setdefault(session_of(ident), []).append(ident)
        return found

    def lose_parts(self, idents: Sequence[int], worker: int) -> Losses:
        """Of tensors that a lost worker has held something of: those that others hold whole, or in a copy, live on; the
        others are lost."""
        losses = Losses([], [])
        for ident in idents:
            if ident in self.before:
                self._lose_part_of_former(losses, ident, worker)
                continue
            held = self.tensors[ident]
            for spec in [spec for spec in self.copies.get(ident, {}) if worker in spec.mesh]:
                self._note_rest(losses, self.drop_copy(ident, spec), spec.mesh, worker)
            if worker in held.spec.mesh:
                self._lose_part(losses, ident, held, worker)
        return losses

    def _lose_part_of_former(self, losses: Losses, ident: int, worker: int) -> None:
        old, held, until = self.before[ident]
        self._remove_former(ident)
        rest = without(held.spec.mesh, worker)
        if rest is not None and held.spec.is_whole:
            former = FormerValue(old, TensorRecord.of(held.meta, whole(rest, len(held.meta.shape)), held.pinned), until)
            self.undo.put(self.before, ident, former)
            self._load(rest, former.held.nbytes)
        else:
            self._note_rest(losses, old, held.spec.mesh, worker)

    def _lose_part(self, losses: Losses, ident: int, held: TensorRecord, worker: int) -> None:
        rest = without(held.spec.mesh, worker)
        if rest is not None and held.spec.is_whole:
            self.lay_out(ident, whole(rest, len(held.meta.shape)))
            return
        self._note_rest(losses, ident, held.spec.mesh, worker)
        copies = self.copies.get(ident, {})
        spec = next((spec for spec in copies if spec.is_partition(held.meta.shape)), None)
        if spec is not None:
            losses.promoted.append((ident, copies[spec]))
            self.drop_copy(ident, spec)
            self.lay_out(ident, spec)
        else:
            losses.useless.extend([(alias, spec.mesh) for spec, alias in copies.items()])
            self.remove(ident)
            self.lose(ident, held.meta, worker)

    def _note_rest(self, losses: Losses, ident: int | None, mesh: DeviceMesh, worker: int) -> None:
        rest = without(mesh, worker)
        if ident is not None and rest is not None:
            losses.useless.append((ident, rest))

    def forget_loads(self, worker: int) -> None:
        """Nobody holds anything on a mesh with a worker that is gone."""
        for mesh in [mesh for mesh in self.loads if worker in mesh]:
            self.undo.drop(self.loads, mesh)

    # Invariants

    def validate(self) -> None:
        """The invariants, checked by tests after every message."""
        assert not self.undo.inverses, "a change was neither committed nor taken back"
        assert not self.tensors.keys() & self.lost.keys()
        assert self.copies.keys() <= self.tensors.keys() and all(self.copies.values())
        assert self.before.keys() <= self.lost.keys()
        names = [alias for copies in self.copies.values() for alias in copies.values()]
        names += [former.ident for former in self.before.values()]
        assert len(set(names)) == len(names) and not (self.tensors.keys() | self.lost.keys()) & set(names)
        self._validate_loads()
        self._validate_owners()

    def _validate_loads(self) -> None:
        loads: dict[DeviceMesh, int] = {}
        former = {former.ident: former.held for former in self.before.values()}
        for ident, held in (self.tensors | former).items():
            assert held.spec.is_partition(held.meta.shape), (ident, held.spec)
            for spec in (held.spec, *self.copies.get(ident, {})):
                assert set(spec.mesh.workers) <= self.workers.keys(), (ident, spec)
                assert len(spec.dims) == len(held.meta.shape), (ident, spec)
                loads[spec.mesh] = loads.get(spec.mesh, 0) + TensorRecord.of(held.meta, spec).nbytes
        assert loads == {mesh: load for mesh, load in self.loads.items() if load or mesh in loads}

    def _validate_owners(self) -> None:
        """Nothing is kept of sessions that have ended, and nobody waits for a worker that is gone."""
        owned: Mapping[str, Iterable[int]] = {
            "tensor": (*self.tensors, *self.lost),
            "request": self.pending,
            "op": [code for worker in self.workers.values() for code in worker.known],
        }
        for what, idents in owned.items():
            assert all(session_of(ident) in self.sessions for ident in idents), what
        for request, pending in self.pending.items():
            assert pending.waiting_for and pending.waiting_for <= self.workers.keys(), (request, pending)
        assert not self.workers.keys() & self.gone.keys()
        assert self.resizing == {ident for pending in self.pending.values() for ident, _ in pending.written}
        for session in self.sessions.values():
            prepared = [*session.moves.values(), *[plan for op in session.ops.values() for plan in op.plans.values()]]
            for plan in prepared:
                assert set(plan.plan.workers) <= self.workers.keys(), plan
                assert plan.plan.program is None or plan.code in session.programs, plan
            assert len(session.programs) == len([plan for plan in prepared if plan.plan.program is not None])
