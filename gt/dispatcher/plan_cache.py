"""What was decided about ops: found again or made, and told to the workers."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.messages import DefineOp, ForgetOps, Gathered, RunOp
from gt.dispatcher.outgoing import MessageQueue
from gt.dispatcher.planner import meeting_place, plan_op
from gt.dispatcher.replicas import Replicas
from gt.dispatcher.state import (
    REDUCES_FIRST,
    CachedPlan,
    InvalidInstruction,
    Laid,
    NoValue,
    OpRecord,
    PlanKey,
    SessionRecord,
    State,
    TensorRecord,
)
from gt.sharding.program_builder import Register
from gt.sharding.spec import DeviceMesh, ShardingSpec, whole
from gt.signals.policy import Policy


class PlanCache:
    """What was decided is a part of the state."""

    def __init__(self, state: State, post: MessageQueue, placing: Replicas) -> None:
        self._state = state
        self._post = post
        self._placing = placing

    def prepare(
        self, session: SessionRecord, op: OpRecord, call: RunOp, policy: Policy | None, *, reduces_first: bool = False
    ) -> CachedPlan:
        """The plan for an op with these inputs, of which the workers are told when it is new. `reduces_first`: as for
        numbers with which the op is not linear."""
        inputs = call.inputs
        again = op.require_fit(inputs, call.outputs)
        held = self._with_targets_together(session, op, call, policy)
        for mesh in [op.layout.mesh] if op.layout is not None else [policy.mesh] if policy is not None else []:
            self.require(mesh)
        solo_mesh = held[0].spec.mesh if held else self._state.least_loaded()
        specs = [tensor.spec for tensor in held]
        laid = self.with_copies(specs, inputs)
        key: PlanKey = (*laid, *again.items()) if policy is None else (policy, *laid, *again.items())
        if reduces_first:
            key = (REDUCES_FIRST, *key)
        found = op.plans.get(key or (op.layout or whole(solo_mesh, 0),))
        if found is None:
            metas = [tensor.meta for tensor in held]
            copies = [there[1:] if isinstance(there, tuple) else () for there in laid]
            plan = plan_op(op.signature, metas, specs, solo_mesh, again, policy, copies, reduces_first)
            pinned = policy.pins if policy is not None else True if op.layout is not None else None
            found = self._placing.announce(session, plan, op.code, op.signature.op, op.takes, pinned)
            self._state.add_plan(op, key or (op.layout or whole(solo_mesh, 0),), found)
        if found.plan.program is None:
            self.tell(session, found.plan.workers, op.code)
        return found

    def with_copies(self, specs: Sequence[ShardingSpec], inputs: Sequence[int]) -> tuple[Laid, ...]:
        """How inputs lie, with the layouts of copies that were made of them."""
        copies = self._state.copies
        return tuple([(spec, *copies[i]) if i in copies else spec for spec, i in zip(specs, inputs, strict=True)])

    def tell_of_gathering(self, session: SessionRecord, op: str, site: int, *, is_query: bool = False) -> None:
        """Tell a client, once for each op and line of its program, that the op's inputs are gathered."""
        if self._state.note_gathering(session, op, session.site(site)):
            self._post.answer(session.ident, Gathered(op, site, is_query))

    def _with_targets_together(
        self, session: SessionRecord, op: OpRecord, call: RunOp, policy: Policy | None
    ) -> list[TensorRecord]:
        """The inputs of an op, after all that it writes to was brought to one mesh: that of the first of it, or, where
        the op gives new tensors too, the one that it would run on without writing."""
        held = [self._state.held(ident) for ident in call.inputs]
        writes = op.signature.writes
        if not writes:
            return held
        mesh = held[writes[0]].spec.mesh
        if op.signature.outputs:
            mesh = self.mesh_of(held, policy)
        apart = [place for place in writes if held[place].spec.mesh is not mesh]
        for place in apart:
            self._placing.gather_for_good(session, call.inputs[place], mesh, call.site)
        return [self._state.held(ident) for ident in call.inputs] if apart else held

    def mesh_of(self, held: Sequence[TensorRecord], policy: Policy | None) -> DeviceMesh:
        """Where an op runs that writes to nothing: where its scope says, or else where most bytes are."""
        if policy is not None:
            self.require(policy.mesh)
            return policy.mesh
        return meeting_place([Register(tensor.meta, tensor.spec) for tensor in held]) or self._state.least_loaded()

    def mesh_of_query(self, op: OpRecord, held: Sequence[TensorRecord], policy: Policy | None) -> DeviceMesh:
        """Where what it writes to is, if that is most of its inputs; it may give new tensors too."""
        written = [held[place] for place in op.signature.writes]
        if written and 2 * sum(tensor.meta.nbytes for tensor in written) >= sum(tensor.meta.nbytes for tensor in held):
            return written[0].spec.mesh
        return self.mesh_of(held, policy)

    def require(self, mesh: DeviceMesh) -> None:
        """The workers of a mesh that a client names must be there."""
        for worker in mesh.workers:
            if worker in self._state.gone:
                raise NoValue(worker, "a place of the mesh")
            if worker not in self._state.workers:
                raise InvalidInstruction(f"the mesh {mesh} names worker {worker}, which is not there")

    def tell(self, session: SessionRecord, workers: Sequence[int], code: int) -> None:
        """Define an op where it is about to run for the first time."""
        new = [worker for worker in workers if code not in self._state.workers[worker].known]
        if new:
            for worker in new:
                self._state.note_known(worker, code)
            self._post.command(tuple(new), DefineOp(code, session.ops[code].signature))

    def forget(self, session: SessionRecord, plans: Sequence[CachedPlan]) -> None:
        for prepared in plans:
            workers = tuple([worker for worker in prepared.plan.workers if worker in self._state.workers])
            if self._state.forget_program(session, prepared.code) and workers:
                self._post.command(workers, ForgetOps((prepared.code,)))
