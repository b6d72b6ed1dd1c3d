"""What the dispatcher knows: workers, sessions, and where every tensor is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from gt.core.errors import LayoutError
from gt.core.ids import FIRST_OWN, SESSION_SHIFT, session_of
from gt.core.messages import Collective, WorkerInfo
from gt.core.meta import ITEM_BYTES, TensorMeta
from gt.core.signatures import Signature
from gt.dispatcher.planner import Plan
from gt.sharding.cost import memory_bytes
from gt.sharding.placements import require_fit
from gt.sharding.spec import DeviceMesh, ShardingSpec, spec_of, whole
from gt.signals.policy import Policy


@dataclass
class Worker:
    """`known` are the op codes it was told; one that is not `ready` cannot exchange tensors with others yet and gets no
    work. `alone` is the mesh of this worker only."""

    info: WorkerInfo
    alone: DeviceMesh
    ready: bool = True
    known: set[int] = field(default_factory=set)


class Misfit(Exception):
    """A signature that makes no sense, or an instruction that does not fit its signature."""


def require_layout(layout: ShardingSpec, meta: TensorMeta) -> None:
    """A client's layout must be one of the tensor that it is for."""
    try:
        require_fit(layout, meta)
    except LayoutError as error:
        raise Misfit(str(error)) from None


class LostWorker(Exception):
    """Something that is needed went with a worker that is gone."""

    def __init__(self, worker: int, what: str = "a place of the mesh") -> None:
        super().__init__(f"{what} was lost with worker {worker}")
        self.worker = worker


class LostInput(LostWorker):
    def __init__(self, ident: int, worker: int) -> None:
        super().__init__(worker, f"tensor {ident}")
        self.ident = ident


class NoWorkers(Exception):
    """Every worker is gone."""


class Prepared(NamedTuple):
    """A plan that the workers have been told of, by `code`. `results` are ready to be placed; `moves` says that some
    input is taken in another layout than the one it has, `meets` that the workers exchange tensors."""

    plan: Plan
    code: int
    results: tuple[Held, ...]
    moves: bool
    meets: bool


Laid: TypeAlias = ShardingSpec | tuple[ShardingSpec, ...]
"""How a tensor lies: its layout, and those of its copies."""

PlanKey: TypeAlias = tuple[Policy | Laid | tuple[int, int] | str, ...]
REDUCES_FIRST = "reduces first"  # in the key of a plan for numbers with which its op is not linear


class Op(NamedTuple):
    """A signature and what was decided about it, by the scope's policy and the layouts of its inputs. `gives` counts
    new tensors and new versions; `layout` is that of the outputs, where the user has said so."""

    code: int
    signature: Signature
    takes: int
    gives: int
    layout: ShardingSpec | None
    plans: dict[PlanKey, Prepared]

    def again(self, inputs: tuple[int, ...]) -> dict[int, int]:
        """The places of other views of a tensor that the op writes, and where it writes it. Raises Misfit for a tensor
        that it writes at two places: it would have two new versions."""
        if not self.signature.writes or len(set(inputs)) == len(inputs):
            return {}
        written = {inputs[place]: place for place in self.signature.writes}
        if len(written) < len(self.signature.writes):
            raise Misfit(f"{self.signature.op} writes {self.signature.writes} of {inputs}: one tensor at two places")
        return {place: at for place, ident in enumerate(inputs) if (at := written.get(ident, place)) != place}

    @classmethod
    def of(cls, code: int, signature: Signature) -> Op:
        takes, writes, outputs = len(signature.paths), signature.writes, signature.outputs
        if len(set(writes)) < len(writes) or not all(0 <= place < takes for place in writes):
            raise Misfit(f"{signature.op} of {takes} tensors cannot write {writes}")
        layout = spec_of(signature.layout) if signature.layout is not None else None
        if layout is not None:
            for meta in outputs:
                require_layout(layout, meta)
        return cls(code, signature, takes, len(outputs) + len(writes), layout, {})


@dataclass
class Session:
    """`ops`, `sites` and `scopes` are what the client defined, by its codes; `programs` are the names of ops by the
    codes that the dispatcher gave. `collectives` collects what moved while the client `watches`. `gatherings` are the
    ops, with their lines, of which the client was told that they gather their inputs."""

    ident: int
    host: str
    pid: int
    ops: dict[int, Op] = field(default_factory=dict)
    sites: dict[int, tuple[str, int]] = field(default_factory=dict)
    scopes: dict[int, Scope] = field(default_factory=dict)
    programs: dict[int, str] = field(default_factory=dict)
    moves: dict[tuple[TensorMeta, ShardingSpec, ShardingSpec], Prepared] = field(default_factory=dict)
    watches: bool = False
    collectives: list[Collective] = field(default_factory=list)
    gatherings: set[tuple[str, str]] = field(default_factory=set)
    given: int = 0

    def site(self, code: int) -> str:
        file, line = self.sites.get(code, ("?", 0))
        return f"{file}:{line}"

    def policy(self, scope: int) -> Policy | None:
        """What a scope asks of its ops; None outside any."""
        return self.scopes[scope].policy if scope else None

    def op_name(self, code: int) -> str:
        return self.ops[code].signature.op if code in self.ops else self.programs.get(code, "")

    def new_id(self) -> int:
        """An id of the dispatcher's own, for a copy or a program."""
        self.given += 1
        return (self.ident << SESSION_SHIFT) + FIRST_OWN + self.given


class Held(NamedTuple):
    """A tensor that workers hold. Many tensors share one record, so it says nothing of an id. `nbytes` is the most that
    one worker holds of it. One that is not `settled` is where it is because it had to be somewhere: it goes where a
    scope first needs it, for good."""

    meta: TensorMeta
    spec: ShardingSpec
    nbytes: int
    settled: bool

    @classmethod
    def of(cls, meta: TensorMeta, spec: ShardingSpec, settled: bool | None = None) -> Held:
        """Where nobody has said whether it is settled, one that several workers hold is."""
        nbytes = memory_bytes(spec, meta.shape, ITEM_BYTES[meta.dtype])
        return cls(meta, spec, nbytes, spec.mesh.size > 1 if settled is None else settled)


class Scope(NamedTuple):
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


@dataclass
class State:
    """`copies`: other layouts in which a tensor is there too, made for use, with the ids they have on the workers.
    `loads`: bytes on each worker of a mesh. `lost`: tensors that went with a worker: what they were, and with which."""

    workers: dict[int, Worker] = field(default_factory=dict)
    sessions: dict[int, Session] = field(default_factory=dict)
    tensors: dict[int, Held] = field(default_factory=dict)
    copies: dict[int, dict[ShardingSpec, int]] = field(default_factory=dict)
    loads: dict[DeviceMesh, int] = field(default_factory=dict)
    lost: dict[int, tuple[TensorMeta, int]] = field(default_factory=dict)

    def place(self, ident: int, held: Held) -> None:
        self.tensors[ident] = held
        mesh = held.spec.mesh
        self.loads[mesh] = self.loads.get(mesh, 0) + held.nbytes

    def lay_out(self, ident: int, spec: ShardingSpec) -> None:
        """A tensor with the same value lies otherwise now; its copies stay."""
        held = self.tensors[ident]
        self._load(held, -1)
        self.place(ident, Held.of(held.meta, spec, settled=True))

    def settle(self, idents: Sequence[int]) -> None:
        """Tensors that a scope uses as they lie stay so."""
        for ident in idents:
            held = self.tensors[ident]
            if not held.settled:
                self.tensors[ident] = held._replace(settled=True)

    def add_copy(self, ident: int, spec: ShardingSpec, alias: int) -> None:
        self.copies.setdefault(ident, {})[spec] = alias
        self._load(Held.of(self.tensors[ident].meta, spec), 1)

    def drop_copy(self, ident: int, spec: ShardingSpec) -> int | None:
        """Forget one copy; gives the id it had."""
        copies = self.copies.get(ident, {})
        alias = copies.pop(spec, None)
        if alias is not None:
            self._load(Held.of(self.tensors[ident].meta, spec), -1)
        if ident in self.copies and not copies:
            del self.copies[ident]
        return alias

    def remove(self, ident: int) -> list[tuple[int, DeviceMesh]]:
        """Forget a tensor and its copies; gives the ids they had, and where."""
        self.lost.pop(ident, None)
        held = self.tensors.pop(ident, None)
        if held is None:
            return []
        self._load(held, -1)
        freed = [(ident, held.spec.mesh)]
        if ident in self.copies:
            for spec, alias in self.copies.pop(ident).items():
                self._load(Held.of(held.meta, spec), -1)
                freed.append((alias, spec.mesh))
        return freed

    def remove_all(self, idents: Sequence[int]) -> dict[DeviceMesh, list[int]]:
        """Forget tensors and their copies; gives the ids they had, by where."""
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

    def _load(self, held: Held, sign: int) -> None:
        mesh = held.spec.mesh
        self.loads[mesh] = self.loads.get(mesh, 0) + sign * held.nbytes

    def held(self, ident: int) -> Held:
        """Where a tensor is. Raises LostInput for a lost one and KeyError for an unknown one."""
        found = self.tensors.get(ident)
        if found is None:
            if ident in self.lost:
                raise LostInput(ident, self.lost[ident][1])
            raise KeyError(ident)
        return found

    def meta(self, ident: int) -> TensorMeta:
        """What a tensor is, even if it is lost."""
        return self.lost[ident][0] if ident in self.lost else self.tensors[ident].meta

    def held_by(self, session: int) -> list[int]:
        """The tensors of a session, lost ones included."""
        return [ident for ident in (*self.tensors, *self.lost) if session_of(ident) == session]

    def least_loaded(self) -> DeviceMesh:
        """The worker that holds the fewest bytes, the lowest id among equals."""
        if len(self.workers) == 1:
            return next(iter(self.workers.values())).alone
        ready = [ident for ident, worker in self.workers.items() if worker.ready]
        if not ready:
            raise NoWorkers
        bytes_on = dict.fromkeys(self.workers, 0)
        for mesh, load in self.loads.items():
            for worker in mesh.workers if load else ():
                if worker in bytes_on:
                    bytes_on[worker] += load
        return self.workers[min(ready, key=lambda ident: (bytes_on[ident], ident))].alone

    def lose(self, ident: int, meta: TensorMeta, worker: int) -> None:
        """A tensor that never got a value, because of a worker that is gone."""
        self.lost[ident] = (meta, worker)

    def lose_worker(self, worker: int) -> Losses:
        """A worker is gone: what others hold whole, or in a copy, lives on; what it held a part of is lost."""
        del self.workers[worker]
        losses = Losses([], [])
        for ident, held in list(self.tensors.items()):
            copies = self.copies.get(ident, {})
            for spec in [spec for spec in copies if worker in spec.mesh]:
                self._note_rest(losses, self.drop_copy(ident, spec), spec.mesh, worker)
            if worker in held.spec.mesh:
                self._lose_part(losses, ident, held, worker)
        for mesh in [mesh for mesh in self.loads if worker in mesh]:
            del self.loads[mesh]
        return losses

    def _lose_part(self, losses: Losses, ident: int, held: Held, worker: int) -> None:
        rest = without(held.spec.mesh, worker)
        if rest is not None and held.spec.is_whole:
            self.lay_out(ident, whole(rest, len(held.meta.shape)))
            return
        self._note_rest(losses, ident, held.spec.mesh, worker)
        copies = self.copies.get(ident, {})
        spec = next((spec for spec in copies if spec.tiles(held.meta.shape)), None)
        if spec is not None:
            alias = copies[spec]
            losses.promoted.append((ident, alias))
            self.drop_copy(ident, spec)
            self.lay_out(ident, spec)
        else:
            losses.useless.extend([(alias, spec.mesh) for spec, alias in copies.items()])
            for spec in list(copies):
                self.drop_copy(ident, spec)
            self._load(held, -1)
            del self.tensors[ident]
            self.lost[ident] = (held.meta, worker)

    def _note_rest(self, losses: Losses, ident: int | None, mesh: DeviceMesh, worker: int) -> None:
        rest = without(mesh, worker)
        if ident is not None and rest is not None:
            losses.useless.append((ident, rest))

    def validate(self) -> None:
        """The invariants, checked by tests after every message."""
        assert not self.tensors.keys() & self.lost.keys()
        assert self.copies.keys() <= self.tensors.keys() and all(self.copies.values())
        loads: dict[DeviceMesh, int] = {}
        for ident, held in self.tensors.items():
            assert held.spec.tiles(held.meta.shape), (ident, held.spec)
            for spec in (held.spec, *self.copies.get(ident, {})):
                assert set(spec.mesh.workers) <= self.workers.keys(), (ident, spec)
                assert len(spec.dims) == len(held.meta.shape), (ident, spec)
                loads[spec.mesh] = loads.get(spec.mesh, 0) + Held.of(held.meta, spec).nbytes
        assert loads == {mesh: load for mesh, load in self.loads.items() if load or mesh in loads}
