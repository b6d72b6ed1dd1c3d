"""Records of what `State` owns and changes, besides tensors: workers, sessions and requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from gt.core.messages import (
    ByteRange,
    Collective,
    Failed,
    Fetched,
    MemoryReport,
    NonFiniteReport,
    Queried,
    Stats,
    Synchronized,
    TimelineReport,
    Traffic,
    Uploaded,
    Versions,
    WorkerInfo,
)
from gt.core.meta import TensorMeta
from gt.dispatcher.instruction_errors import Cause, UnknownId
from gt.dispatcher.op_definitions import CachedPlan, MoveKey, OpFacts, OpRecord
from gt.dispatcher.planner import TensorMove
from gt.dispatcher.program_parts import ProgramPart, ProgramRecord
from gt.sharding.spec import DeviceMesh, ShardingSpec
from gt.signals.policy import Policy
from gt.wire.codec import Buffer

LOOPBACK = "127.0.0.1"


@dataclass
class WorkerRecord:
    """A worker that has joined. `known_ops` are the ids of the ops that were defined on the worker. A worker that is
    not `ready` cannot exchange tensors with others yet and gets no work. `solo_mesh` is the mesh of this worker only.
    `memory` are the bytes of its device (0: not known). `address` is the one at which other workers reach it: a
    loopback address if only those of its machine do. One with `hosts_store` was asked to host the store of process
    groups. One that `is_new` has joined while others worked, and has done no work yet. One that is `leaving` is asked
    to end, as the record says: it gets no new tensors, and once it `is_closed`, instructions that name it fail as if it
    were lost."""

    info: WorkerInfo
    solo_mesh: DeviceMesh
    ready: bool = True
    known_ops: set[int] = field(default_factory=set)
    memory: int = 0
    address: str = LOOPBACK
    hosts_store: bool = False
    is_new: bool = False
    leaving: DeadWorker | None = None
    is_closed: bool = False

    @property
    def is_reached_from_outside(self) -> bool:
        """Whether workers of other machines reach this one."""
        return not self.address.startswith("127.")


class DeadWorker(NamedTuple):
    """The process of a worker that was lost, the reason of the loss, and the op that it ran last. `op_key` is the name
    of the key of that op's session (None: not known). One that `is_drained` has given its tensors to others."""

    pid: int
    reason: str
    last_op: str
    op_key: str | None = None
    is_drained: bool = False


LOST_LONG_AGO = DeadWorker(0, "was lost long ago", "")


Reply: TypeAlias = (
    Fetched
    | Uploaded
    | Queried
    | Failed
    | Synchronized
    | Versions
    | Traffic
    | Stats
    | MemoryReport
    | NonFiniteReport
    | TimelineReport
)
"""A report by which a worker answers a request."""


class ReadPart(NamedTuple):
    """A part of a tensor that a worker was asked for: its size, -1 if unknown, and the client's memory for it, if
    any."""

    worker: int
    nbytes: int
    place: ByteRange | None = None


class PendingRequest(NamedTuple):
    """A request that workers have not answered yet.

    `waiting_for` are the workers whose reply is missing, `expects` the kinds of replies they may send, `replies` those
    that have arrived, with the bytes beside them. With `is_answered` the client already knows of a lost worker, and
    the replies still on their way are dropped. `version_ids` are the tensors of a ReadVersions. Of a read: its parts,
    and the layout that they are of, None for a whole tensor. Of a query: the `mesh` that runs it, the `first` id of its
    results, and the new ids and previous metas of the tensors it writes.
    """

    waiting_for: frozenset[int]
    expects: tuple[type[Reply], ...]
    replies: tuple[tuple[int, Reply], ...] = ()
    buffers: tuple[tuple[int, Buffer], ...] = ()
    reads: tuple[ReadPart, ...] = ()
    layout: ShardingSpec | None = None
    is_answered: bool = False
    mesh: DeviceMesh | None = None
    first: int = 0
    written: tuple[tuple[int, TensorMeta], ...] = ()
    version_ids: tuple[int, ...] = ()


class ScopeRecord(NamedTuple):
    """A signal scope of a client. Without a policy it does not change where ops run."""

    name: str
    policy: Policy | None
    compile: bool


class HaltedStep(NamedTuple):
    """A step of an optimizer that must not write to older tensors, because a gradient has no value."""

    step: int
    cause: Cause


class RunningModule(NamedTuple):
    """The last module that a client began, and the ids of its own parameters."""

    module: int
    parameters: tuple[int, ...]


class ModuleNeeds(NamedTuple):
    """What a module needs when it begins, by the position of the parameter: `moves` by which its ops copied parameters,
    and the `copies` that were there when it began the last time."""

    moves: Mapping[int, TensorMove]
    copies: Mapping[int, int]


@dataclass
class SessionRecord:
    """A client's session. `key` is the name of the key by which it was admitted ("": that of the server's own program).

    `ops`, `sites` and `scopes` are the client's definitions by id; `program_names` are the names of ops by the ids that
    the dispatcher gave to their programs, and `move_plans` the cached plans of moves. `forgotten` are facts about the
    last ops and programs that were removed, which a worker may still run, and which stories tell of. `collectives` is
    filled while the client `watches` its traffic. `gatherings` are the (op, site) pairs whose gathering was reported
    to it. `ids_given` counts the ids that the dispatcher gave; results of queries take ids from `next_result` on.
    `halted` is set while a step must not write. `workers` have run something for the session. `modules` are the
    needs of modules, by their numbers.
    `programs` are by id, and so are the `program_parts` that workers know. A session `accumulates` if it adds up the
    gradients of several backwards. `plans_made` counts the plans made for ops and moves, and `plans_kept` those
    that are cached. `defined_bytes` is the size of its definitions.
    """

    ident: int
    host: str
    pid: int
    key: str = ""
    ops: dict[int, OpRecord] = field(default_factory=dict)
    sites: dict[int, tuple[str, int]] = field(default_factory=dict)
    scopes: dict[int, ScopeRecord] = field(default_factory=dict)
    program_names: dict[int, str] = field(default_factory=dict)
    forgotten: dict[int, OpFacts] = field(default_factory=dict)
    move_plans: dict[MoveKey, CachedPlan] = field(default_factory=dict)
    watches: bool = False
    collectives: list[Collective] = field(default_factory=list)
    gatherings: set[tuple[str, str]] = field(default_factory=set)
    ids_given: int = 0
    next_result: int = 0
    halted: HaltedStep | None = None
    workers: set[int] = field(default_factory=set)
    running_module: RunningModule | None = None
    modules: dict[int, ModuleNeeds] = field(default_factory=dict)
    programs: dict[int, ProgramRecord] = field(default_factory=dict)
    program_parts: dict[int, ProgramPart] = field(default_factory=dict)
    accumulates: bool = False
    plans_made: int = field(default=0, compare=False)
    plans_kept: int = 0
    defined_bytes: int = 0

    def op(self, op_id: int) -> OpRecord:
        found = self.ops.get(op_id)
        if found is None:
            raise UnknownId("op", op_id)
        return found

    def site(self, site_id: int) -> str:
        file, line = self.sites.get(site_id, ("?", 0))
        return f"{file}:{line}"

    def scope_name(self, scope_id: int) -> str:
        scope = self.scopes.get(scope_id)
        return scope.name if scope is not None else ""

    def op_name(self, op_id: int) -> str:
        if op_id in self.ops:
            return self.ops[op_id].signature.op
        if op_id in self.forgotten:
            return self.forgotten[op_id].name
        return self.program_names.get(op_id, "")
