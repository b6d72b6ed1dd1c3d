"""Finds the signal scope of each op, and its policy for the workers of the session."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from gt.client.scope_stack import ScopeFrame, frame_of_node, in_use, note_nodes, top
from gt.client.storage import Storage, TensorRef, note_derived
from gt.client.torch_patches.autograd_nodes import FIRST_ACCUMULATING, current_node, sequence_number
from gt.core.messages import DefineScope, WorkerInfo, hosts_of
from gt.core.signatures import PolicyRecord, as_name
from gt.sharding.host_order import default_mesh
from gt.sharding.spec import ShardingSpec
from gt.signals.config import SignalConfig, at
from gt.signals.policy import Policy
from gt.signals.registry import registry
from gt.signals.resolution import ROW, resolve_policy

if TYPE_CHECKING:
    from gt.client.session import Session

log = logging.getLogger("gt.signals")


class ScopeResolver:
    """Resolves the scope of each op of a session to a policy for the connected workers. `auto`: whether tensors that
    are created outside any scope are cut along their first dim (None: only 2-D tensors whose first dim divides by the
    number of workers). `scope_ids` are the scopes that the dispatcher knows."""

    def __init__(self, session: Session, auto: bool | None) -> None:
        self._session = session
        self._auto = auto
        self._next_id = itertools.count(1)
        self.scope_ids: dict[tuple[str, PolicyRecord | None, bool], int] = {}
        self._policies: dict[int, Policy] = {}  # policies by scope id
        self._unknown: set[str] = set()
        self._of_created: tuple[Sequence[WorkerInfo], PolicyRecord] | None = None  # the workers, and their policy

    def scope_id(self, refs: Sequence[TensorRef], *results: Storage) -> int:
        """The id of an op's scope, 0 for none; `results` are its new tensors. Hot path."""
        if refs and not in_use():  # without scopes, only tensors that are created have a layout
            return 0
        is_neutral = bool(refs) and all(map(_is_neutral, refs))
        if is_neutral:
            note_derived(refs, results)
        frame, is_gradient = top(), False
        autograd_node = current_node()
        if autograd_node is not None and (frame is None or frame.autograd_node is not autograd_node):
            number = sequence_number(autograd_node)
            if number >= FIRST_ACCUMULATING:
                return 0  # accumulation runs where the gradient is
            is_gradient = True
            forward = frame_of_node(number)
            frame = forward.backward_frame() if forward is not None else frame
        note_nodes(frame)
        scope_id = self._id_of_frame(frame, is_neutral, is_gradient) if frame is not None else 0
        return scope_id if scope_id or refs or len(results) != 1 else self._id_of_created(results[0].geometry.shape)

    def _id_of_frame(self, frame: ScopeFrame, is_neutral: bool, is_gradient: bool) -> int:
        resolved, workers = frame.resolved, self._session.workers
        if resolved is None or resolved[0] is not self or resolved[1] != registry.version or resolved[2] is not workers:
            resolved = frame.resolved = (self, registry.version, workers, *self._resolve(frame))
        if is_neutral:
            return resolved[4]
        return resolved[5] if is_gradient else resolved[3]

    def _connected(self) -> dict[int, str]:
        return hosts_of(self._session.workers)

    def _resolve(self, frame: ScopeFrame) -> tuple[int, int, int]:
        """The ids of a scope as it is configured now: for ops in general, for ops on parameters alone, which introduce
        no sharding, and for gradients, whose partial results stay partial. 0 if none of the frames is configured."""
        found = self._configured(frame)
        if not found:
            return 0, 0, 0
        name, config = found[0]
        placed = next(((n, c) for n, c in found if c.shard is not None), None)
        policy = self._policy(*placed) if placed is not None else None
        scope_id = self._define(name, policy, config.compile)
        if policy is None:
            return scope_id, scope_id, scope_id
        on_parameters = msgspec.structs.replace(policy, constrains=False)
        of_gradients = msgspec.structs.replace(policy, keeps_partial=True)
        neutral_id = self._define(name, on_parameters, config.compile)
        return scope_id, neutral_id, self._define(name, of_gradients, config.compile)

    def _configured(self, frame: ScopeFrame | None) -> list[tuple[str, SignalConfig]]:
        """The configured signals of a stack, the innermost first."""
        found = []
        while frame is not None:
            config = registry.get(frame.name)
            if config is not None:
                found.append((frame.name, config))
            elif frame.name not in self._unknown:
                self._unknown.add(frame.name)
                log.info("signal %r has no configuration and changes nothing", frame.name)
            frame = frame.outer
        return found

    def _policy(self, name: str, config: SignalConfig) -> PolicyRecord | None:
        """None if the only worker is in this process: layouts are ignored there."""
        if self._session.embedded or config.shard is None:
            return None
        return resolve_policy(config.shard, self._connected(), f"{at(config.source)}signal {name!r}")

    def layout(self, name: str, shape: Sequence[int]) -> ShardingSpec | None:
        """The layout of a tensor created in a scope; None if the signal names none."""
        found = self._configured(ScopeFrame(name, None, None))
        policy = self._policy(*found[0]) if found else None
        return Policy(policy).layout(tuple(shape)) if policy is not None else None

    def layout_of_upload(self, shape: Sequence[int]) -> ShardingSpec | None:
        """The layout of a tensor of host data that is created now; None if the scope names none."""
        policy = self._policies.get(self.scope_id(()))
        return policy.layout(tuple(shape)) if policy is not None else None

    def _id_of_created(self, shape: Sequence[int]) -> int:
        """The id of the automatic scope, which cuts a created tensor over all workers; 0 if it stays whole."""
        count = len(self._session.workers)
        if count < 2 or self._auto is False or not shape or shape[0] < 2:
            return 0
        if self._auto is None and (len(shape) != 2 or shape[0] % count):
            return 0
        return self._define("auto", self._policy_of_created(), False)

    def _policy_of_created(self) -> PolicyRecord:
        workers = self._session.workers
        if self._of_created is None or self._of_created[0] is not workers:
            mesh = default_mesh([len(workers)], [ROW], self._connected())
            self._of_created = workers, PolicyRecord(mesh.record(), lead=((ROW,),), places=False)
        return self._of_created[1]

    def _define(self, name: str, policy: PolicyRecord | None, compile_: bool) -> int:
        key = (name, policy, compile_)
        scope_id = self.scope_ids.get(key)
        if scope_id is None:
            scope_id = self.scope_ids[key] = next(self._next_id)
            if policy is not None:
                self._policies[scope_id] = Policy(policy)
            self._session.outbox.emit(DefineScope(scope_id, as_name(name), policy, compile_))
        return scope_id


def _is_neutral(ref: TensorRef) -> bool:
    """Whether a tensor is a parameter, was computed of parameters alone, or has no dims."""
    storage = ref.storage
    return storage.is_parameter or storage.derived is not None or not ref.geometry.shape
