"""The plans of ops: looked up or made, and defined on the workers."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.messages import DefineOp, ForgetOps, Gathered, RunOp
from gt.dispatcher.instruction_errors import InvalidInstruction, NoValue
from gt.dispatcher.message_queue import MessageQueue
from gt.dispatcher.op_definitions import CachedPlan, InputLayout, OpRecord, plan_key
from gt.dispatcher.plan_records import PlanObserver, record_plan
from gt.dispatcher.planner import plan_op
from gt.dispatcher.redistribution import Redistributor
from gt.dispatcher.state import State
from gt.dispatcher.state_records import SessionRecord
from gt.dispatcher.tensor_records import TensorRecord
from gt.sharding.considered_strategies import NotedCall
from gt.sharding.op_programs import mesh_with_most_bytes
from gt.sharding.program_builder import Register
from gt.sharding.spec import DeviceMesh, ShardingSpec, whole
from gt.signals.policy import Policy


class PlanCache:
    """Finds the plan of an op, or makes it. Plans are part of the state: `OpRecord.plans`. The `observer`, if there is
    one, sees each new plan."""

    def __init__(
        self,
        state: State,
        outgoing: MessageQueue,
        redistributor: Redistributor,
        observer: PlanObserver | None = None,
    ) -> None:
        self._state = state
        self._outgoing = outgoing
        self._redistributor = redistributor
        self._observer = observer

    def find_or_plan(
        self, session: SessionRecord, op: OpRecord, call: RunOp, policy: Policy | None, *, reduces_first: bool = False
    ) -> CachedPlan:
        """The plan of a call, defined on the workers if it is new. `reduces_first`: the op is not linear for the
        scalars of this call (infinity, a divisor of 0)."""
        aliased_inputs = op.require_fit(call.inputs, call.outputs)
        tensors = self._inputs_on_one_mesh(session, op, call, policy)
        for mesh in [op.mesh] if op.mesh is not None else [policy.mesh] if policy is not None else []:
            self.require_workers(mesh)
        fallback = tensors[0].spec.mesh if tensors else self._state.least_loaded_mesh()
        specs = [tensor.spec for tensor in tensors]
        layouts = self.with_copies(specs, call.inputs)
        key = plan_key(policy, layouts, aliased_inputs, reduces_first) or (op.layout or whole(fallback, 0),)
        found = op.plans.get(key)
        if found is None:
            metas = [tensor.meta for tensor in tensors]
            copies = [layout[1:] if isinstance(layout, tuple) else () for layout in layouts]
            noted: list[NotedCall] | None = [] if self._observer is not None else None
            plan = plan_op(op.signature, metas, specs, fallback, aliased_inputs, policy, copies, reduces_first, noted)
            if self._observer is not None and noted is not None:
                scope, line = session.scope_name(call.scope), session.site(call.site)
                self._observer(record_plan(op.signature, metas, specs, copies, plan, noted, scope, line))
            placed = policy.places if policy is not None else True if op.layout is not None else None
            created = bool(placed) and op.layout is None and not call.inputs
            found = self._redistributor.define_plan(
                session, plan, op.op_id, op.signature.op, op.input_count, placed and not created, created
            )
            self._state.add_plan(op, key, found)
        if found.plan.program is None:
            self.define_on(session, found.plan.workers, op.op_id)
        return found

    def with_copies(self, specs: Sequence[ShardingSpec], inputs: Sequence[int]) -> tuple[InputLayout, ...]:
        """The layouts of inputs, with those of their copies."""
        copies = self._state.copies
        # hot path: a list is faster than a generator
        return tuple([(spec, *copies[i]) if i in copies else spec for spec, i in zip(specs, inputs, strict=True)])

    def tell_of_gathering(self, session: SessionRecord, op: str, site: int, *, is_query: bool = False) -> None:
        """Tell a client, once for each op and site, that the op's inputs are gathered."""
        if self._state.note_gathering(session, op, session.site(site)):
            self._outgoing.answer(session.ident, Gathered(op, site, is_query))

    def _inputs_on_one_mesh(
        self, session: SessionRecord, op: OpRecord, call: RunOp, policy: Policy | None
    ) -> list[TensorRecord]:
        """The inputs of an op, after those that it writes were moved to one mesh: that of the first written input or,
        if the op also has new outputs, the mesh on which it would run without writing."""
        tensors = [self._state.tensor(ident) for ident in call.inputs]
        writes = op.signature.writes
        if not writes:
            return tensors
        mesh = tensors[writes[0]].spec.mesh
        if op.signature.outputs:
            mesh = self.mesh_of(tensors, policy)
        apart = [position for position in writes if tensors[position].spec.mesh is not mesh]
        for position in apart:
            self._redistributor.gather_for_good(session, call.inputs[position], mesh, call.site)
        return [self._state.tensor(ident) for ident in call.inputs] if apart else tensors

    def mesh_of(self, tensors: Sequence[TensorRecord], policy: Policy | None) -> DeviceMesh:
        """The mesh of an op that writes nothing: that of its scope, else the one with most bytes of its inputs."""
        if policy is not None:
            self.require_workers(policy.mesh)
            return policy.mesh
        registers = [Register(tensor.meta, tensor.spec) for tensor in tensors]
        return mesh_with_most_bytes(registers) or self._state.least_loaded_mesh()

    def mesh_of_query(self, op: OpRecord, tensors: Sequence[TensorRecord], policy: Policy | None) -> DeviceMesh:
        """The mesh of the written inputs if they are at least half of all input bytes, else as for any op."""
        written = [tensors[position] for position in op.signature.writes]
        total = sum(tensor.meta.nbytes for tensor in tensors)
        if written and 2 * sum(tensor.meta.nbytes for tensor in written) >= total:
            return written[0].spec.mesh
        return self.mesh_of(tensors, policy)

    def require_workers(self, mesh: DeviceMesh) -> None:
        """Raises NoValue or InvalidInstruction if a mesh of a client names a lost or unknown worker."""
        for worker in mesh.workers:
            if self._state.was_lost(worker):
                raise NoValue(worker, "a worker of the mesh")
            if worker not in self._state.workers:
                raise InvalidInstruction(f"the mesh {mesh} names worker {worker}, which is not there")

    def define_on(self, session: SessionRecord, workers: Sequence[int], op_id: int) -> None:
        """Define an op on the workers that do not know it yet."""
        new = [worker for worker in workers if op_id not in self._state.workers[worker].known_ops]
        if new:
            for worker in new:
                self._state.note_op_defined(worker, op_id)
            self._outgoing.command(tuple(new), DefineOp(op_id, session.ops[op_id].signature))

    def forget(self, session: SessionRecord, plans: Sequence[CachedPlan]) -> None:
        """Remove the programs of plans from the workers."""
        for cached in plans:
            workers = tuple(worker for worker in cached.plan.workers if worker in self._state.workers)
            if self._state.forget_program(session, cached) and workers:
                self._outgoing.command(workers, ForgetOps((cached.op_id,)))
