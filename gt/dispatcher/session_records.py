"""Records of sessions: the definitions and the progress of each client. `State` owns and changes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gt.core.messages import Collective
from gt.dispatcher.errors import Cause, UnknownId
from gt.dispatcher.op_definitions import CachedPlan, MoveKey, OpFacts, OpRecord
from gt.dispatcher.planner import TensorMove
from gt.dispatcher.segment_records import SegmentPart, SegmentRecord
from gt.signals.policy import Policy


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
    """The module of a client that began last, and the ids of its own parameters."""

    module: int
    parameters: tuple[int, ...]


class ModuleNeeds(NamedTuple):
    """What a module needs when it begins, by the position of the parameter: `moves` by which its ops copied parameters,
    and the `copies` that were there when it began the last time."""

    moves: Mapping[int, TensorMove]
    copies: Mapping[int, int]


@dataclass
class SessionRecord:
    """A client's session. `key` is the name of the key by which it was let in ("": that of the server's own program).

    `ops`, `sites` and `scopes` are the client's definitions by id; `program_names` are the names of ops by the ids that
    the dispatcher gave to their programs, and `move_plans` the cached plans of moves. `forgotten` are facts about the
    last ops and programs that were removed, which a worker may still run, and which stories tell of. `collectives` is
    filled while the client `watches` its traffic. `gatherings` are the (op, site) pairs whose gathering the client was
    told of. `ids_given` counts the ids that the dispatcher gave; results of queries take ids from `next_result` on.
    `halted` is set while a step must not write. `workers` have run something for the session. `modules` are the
    needs of modules, by their numbers.
    `segments` are by id, and so are the `segment_parts` that workers know. A session `accumulates` if it adds up the
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
    segments: dict[int, SegmentRecord] = field(default_factory=dict)
    segment_parts: dict[int, SegmentPart] = field(default_factory=dict)
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
