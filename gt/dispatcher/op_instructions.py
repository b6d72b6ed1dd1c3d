"""Ops and queries of clients, planned one by one: each changes the state and queues commands for the workers."""

from __future__ import annotations

from dataclasses import dataclass

from gt.core.messages import QueryOp, RunOp
from gt.dispatcher.gradient_buckets import GradientBuckets
from gt.dispatcher.instruction_errors import NoValue
from gt.dispatcher.message_queue import MessageQueue, ToWorkers
from gt.dispatcher.op_definitions import CachedPlan, OpRecord, plan_key
from gt.dispatcher.plan_cache import PlanCache
from gt.dispatcher.publications import Publications
from gt.dispatcher.redistribution import Redistributor
from gt.dispatcher.requests import Requests
from gt.dispatcher.state import State
from gt.dispatcher.state_records import SessionRecord
from gt.dispatcher.tensor_records import TensorRecord
from gt.sharding.foreach_subsets import first_list_inputs, is_foreach, subset_of
from gt.sharding.rules import is_linear_with
from gt.sharding.spec import DeviceMesh, ShardingSpec, whole
from gt.signals.policy import Policy
from gt.wire.codec import Buffer


@dataclass(eq=False)
class OpInstructions:
    """Carries out a RunOp or a QueryOp. The caller commits it, or rolls it back if it raises."""

    _state: State
    _outgoing: MessageQueue
    _redistributor: Redistributor
    _requests: Requests
    _plan_cache: PlanCache
    _buckets: GradientBuckets
    _publications: Publications

    def run_op(self, session: SessionRecord, op: RunOp, _: Buffer | None) -> None:  # noqa: PLR0912  (hot path)
        """Hot path: an op with a cached plan takes about 1.5 us, so calls are avoided and cases are written out."""
        state = self._state
        record = session.ops.get(op.op_id) or session.op(op.op_id)
        inputs, outputs = op.inputs, op.outputs
        tensors = state.tensors
        policy = state.policy(session, op.scope) if op.scope else None
        writes = record.signature.writes
        if writes and len(inputs) != record.input_count:  # an op that writes nothing is checked when it is planned
            record.require_fit(inputs, outputs)
        if writes and session.halted is not None:
            _require_no_old_write(session, [inputs[position] for position in writes])
        if writes and state.shared:
            self._publications.unshare(session, [inputs[position] for position in writes], op.site)
        if state.missing and len(record.signature.fully_written) == 1:
            self._place_target(session, record, op)
        if len(writes) == 1 and state.gradients and inputs[writes[0]] in state.gradients:
            self._buckets.before_write(session, inputs, inputs[writes[0]], op.site)
        try:
            if len(inputs) == 2:  # a comprehension takes longer
                specs: tuple[ShardingSpec, ...] = (tensors[inputs[0]].spec, tensors[inputs[1]].spec)
            else:
                specs = tuple([tensors[ident].spec for ident in inputs])
            layouts = self._plan_cache.with_copies(specs, inputs) if state.copies else specs
            cached = record.plans[plan_key(policy, layouts)]
        except KeyError:
            cached = None
            if is_foreach(record.signature) and self._run_by_mesh(session, record, op):
                return
        if len(outputs) != 1 or outputs[0] in tensors or state.missing or state.may_resize:
            state.require_new(outputs)
        if cached is None or len(outputs) != record.output_count or (writes and record.aliased_inputs(inputs)):
            cached = self._plan_cache.find_or_plan(session, record, op, policy)
        if cached.needs_preparation:
            cached, inputs = self._prepare(session, record, op, policy, cached)
        if policy is not None and policy.places:
            state.mark_placed([op.inputs[position] for position, spec in cached.plan.sources if spec is None])
        if session.watches:
            self._redistributor.note_collectives(session, cached.plan.collectives, op.site)
        if state.limits is not None:
            new = cached.results[: len(cached.results) - len(writes)]
            self._redistributor.require_room(session, new, len(new), inputs)
        copies = state.apply_results(writes, op.inputs, outputs, cached.results)
        op_id = cached.op_id
        is_unchanged = op_id == op.op_id and inputs is op.inputs
        command = op if is_unchanged else RunOp(op_id, inputs, outputs, op.scalars, op.scope, op.site)
        self._outgoing.queued.append(ToWorkers(cached.plan.workers, command, None, cached.exchanges))
        if copies:
            self._outgoing.free(copies)

    def _run_by_mesh(self, session: SessionRecord, record: OpRecord, op: RunOp) -> bool:
        """Run a foreach op as one op for each mesh that its tensors are on. Returns False, and runs nothing, if they
        are all on one mesh."""
        record.require_fit(op.inputs, op.outputs)
        by_mesh: dict[DeviceMesh, list[int]] = {}
        for position, first_input in enumerate(first_list_inputs(record.signature)):
            by_mesh.setdefault(self._state.tensor(op.inputs[first_input]).spec.mesh, []).append(position)
        if len(by_mesh) < 2:
            return False
        for positions in by_mesh.values():
            chosen = tuple(positions)
            found = record.subsets.get(chosen)
            if found is None:
                found = self._state.define_subset(session, record, chosen, subset_of(record.signature, chosen))
            inputs = tuple([op.inputs[position] for position in found.subset.inputs])
            outputs = tuple([op.outputs[position] for position in found.subset.outputs])
            scalars = tuple([op.scalars[position] for position in found.subset.scalars])
            self.run_op(session, RunOp(found.op_id, inputs, outputs, scalars, op.scope, op.site), None)
        return True

    def _place_target(self, session: SessionRecord, record: OpRecord, op: RunOp) -> None:
        """Give a target without a value a layout again, if the op writes all of it without reading it: that of its
        previous value, or one worker. The workers give it memory when the op runs."""
        record.require_fit(op.inputs, op.outputs)
        state, writes = self._state, record.signature.writes
        ident = op.inputs[writes[0]]
        others = [other for position, other in enumerate(op.inputs) if position != writes[0]]
        if ident not in state.missing or any(other in state.missing for other in others):
            return
        previous = state.previous_values.get(ident)
        if previous is not None and not previous.tensor.spec.partial:
            spec = previous.tensor.spec
        else:
            spec = whole(state.least_loaded_mesh(), len(state.meta(ident).shape))
        self._outgoing.free(state.renew(ident, spec))
        state.note_use(session.ident, spec.mesh.workers)

    def _prepare(
        self, session: SessionRecord, record: OpRecord, op: RunOp, policy: Policy | None, cached: CachedPlan
    ) -> tuple[CachedPlan, tuple[int, ...]]:
        """The plan for the scalars of a call, and its inputs in the layouts that the plan needs. If it needs the value
        of a waiting gradient, the gradient is reduced first and the op planned anew."""
        needs_value = cached.plan.reduces and bool(self._state.gradients)
        if needs_value and self._buckets.reduce(session, op.inputs, record.signature.op, op.site):
            cached = self._plan_cache.find_or_plan(session, record, op, policy)
        if cached.plan.linear and not is_linear_with(record.signature.op, op.scalars):
            cached = self._plan_cache.find_or_plan(session, record, op, policy, reduces_first=True)
        if cached.plan.gathered:
            self._plan_cache.tell_of_gathering(session, cached.plan.gathered, op.site)
        if not cached.moves_inputs:
            return cached, op.inputs
        places = policy is not None and policy.places
        return cached, self._redistributor.inputs_of(
            session, cached.plan, op.inputs, record.signature.op, op.site, places
        )

    def query(self, session: SessionRecord, query: QueryOp, _: Buffer | None) -> None:
        """A query runs on whole tensors, since the shapes of its results are not known before."""
        record = session.op(query.op_id)
        record.require_fit_of_query(query.inputs, query.written)
        self._state.require_new(query.written)
        self._state.reserve_results(session, query.first)
        self._buckets.reduce(session, query.inputs, record.signature.op, query.site)
        policy = self._state.policy(session, query.scope)
        mesh = self._plan_cache.mesh_of_query(record, [self._state.tensor(ident) for ident in query.inputs], policy)
        if self._state.limits is not None:
            self._redistributor.require_room_for_results(session, mesh, query.inputs)
        if any(self._must_gather(ident, mesh) for ident in query.inputs):
            self._plan_cache.tell_of_gathering(session, record.signature.op, query.site, is_query=True)
        written = [query.inputs[position] for position in record.signature.writes]
        self._publications.unshare(session, written, query.site)
        for ident in written:
            self._redistributor.gather_for_good(session, ident, mesh, query.site)
        places = policy is not None and policy.places
        inputs: tuple[int, ...] = ()
        for ident in query.inputs:
            inputs = (*inputs, self._whole_input(session, query, record, ident, mesh, places, inputs))
        self._plan_cache.define_on(session, mesh.workers, query.op_id)
        renewed = [(new, self._state.tensor(old).meta) for old, new in zip(written, query.written, strict=True)]
        copies = [copy for ident in written for copy in self._state.remove(ident)[1:]]
        for ident, meta in renewed:
            self._state.add_tensor(ident, TensorRecord.of(meta, whole(mesh, len(meta.shape))))
        self._requests.wait_for_query(query.request, mesh, query.first, renewed)
        command = QueryOp(
            query.request, query.op_id, inputs, query.written, query.first, query.scalars, query.scope, query.site
        )
        self._outgoing.command(mesh.workers, command)
        self._outgoing.free(copies)

    def _whole_input(
        self,
        session: SessionRecord,
        query: QueryOp,
        record: OpRecord,
        ident: int,
        mesh: DeviceMesh,
        places: bool,
        in_use: tuple[int, ...],
    ) -> int:
        """The whole tensor. Most queries are asked once, to learn the shapes of an op that is cut in later calls."""
        target = whole(mesh, len(self._state.tensor(ident).meta.shape))
        return self._redistributor.in_layout(
            session, ident, target, record.signature.op, query.site, places=places, in_use=in_use, recurs=False
        )

    def _must_gather(self, ident: int, mesh: DeviceMesh) -> bool:
        """Whether a sharded tensor has no whole copy on a mesh."""
        spec = self._state.tensor(ident).spec
        target = whole(mesh, len(spec.dims))
        return spec.mesh.size > 1 and any(spec.dims) and target not in self._state.copies.get(ident, {})


def _require_no_old_write(session: SessionRecord, written: list[int]) -> None:
    """A halted step must not write to tensors that are older than itself."""
    if session.halted is not None and min(written) < session.halted.step:
        raise NoValue(session.halted.cause, "a gradient of the step")
