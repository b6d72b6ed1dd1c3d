"""The invariants of the dispatcher's state, checked by tests after every message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gt.core.ids import session_of
from gt.dispatcher.state import State
from gt.dispatcher.tensor_records import TensorRecord
from gt.sharding.spec import DeviceMesh


def check_invariants(state: State) -> None:
    assert not state.undo.inverses, "a change was neither committed nor undone"
    _check_tensors(state)
    _check_gradients(state)
    _check_byte_counts(state)
    _check_owners(state)
    _check_shared(state)
    _check_requests(state)
    _check_plans(state)


def _check_tensors(state: State) -> None:
    """No id is used twice: not by a tensor with and one without a value, a copy or a previous value."""
    assert not state.tensors.keys() & state.missing.keys()
    assert state.copies.keys() <= state.tensors.keys() and all(state.copies.values())
    assert state.previous_values.keys() <= state.missing.keys()
    in_order = {copy: (ident, spec) for ident, copies in state.copies.items() for spec, copy in copies.items()}
    assert state.copy_order == in_order
    ids = [copy for copies in state.copies.values() for copy in copies.values()]
    ids += [previous.ident for previous in state.previous_values.values()]
    assert len(set(ids)) == len(ids) and not (state.tensors.keys() | state.missing.keys()) & set(ids)


def _check_gradients(state: State) -> None:
    """Gradients are partial tensors that can be reduced where they are, or were."""
    for ident, gradient in state.gradients.items():
        move, tensor = gradient.move, state.tensors[ident]
        assert move.meta == tensor.meta and tensor.spec in (move.source, move.target), (ident, move, tensor)
        assert move.source.partial and not move.target.partial and move.source.mesh is move.target.mesh, (ident, move)


def _check_byte_counts(state: State) -> None:
    """`bytes_on` is the sum over tensors, copies and previous values, which are on living workers."""
    counted: dict[DeviceMesh, int] = {}
    uses: dict[int, dict[DeviceMesh, int]] = {session: {} for session in state.uses}
    of_copies = dict.fromkeys(state.copy_bytes, 0)
    previous = {previous.ident: previous.tensor for previous in state.previous_values.values()}
    for ident, tensor in (state.tensors | previous).items():
        assert tensor.spec.is_partition(tensor.meta.shape), (ident, tensor.spec)
        for spec in (tensor.spec, *state.copies.get(ident, {})):
            is_shared = spec is tensor.spec and ident in state.shared and state.shared[ident][0] != ident
            assert set(spec.mesh.workers) <= state.workers.keys(), (ident, spec)
            assert len(spec.dims) == len(tensor.meta.shape), (ident, spec)
            nbytes = 0 if is_shared else TensorRecord.of(tensor.meta, spec).nbytes
            assert spec is not tensor.spec or tensor.nbytes == nbytes, (ident, tensor)
            counted[spec.mesh] = counted.get(spec.mesh, 0) + nbytes
            own = uses.get(session_of(ident), {})
            own[spec.mesh] = own.get(spec.mesh, 0) + nbytes
        for spec in state.copies.get(ident, {}):
            of_copies[spec.mesh] += TensorRecord.of(tensor.meta, spec).nbytes
    assert of_copies == state.copy_bytes
    assert counted == {mesh: nbytes for mesh, nbytes in state.bytes_on.items() if nbytes or mesh in counted}
    assert state.uses.keys() == (state.sessions.keys() if state.limits is not None else set())
    for session, use in state.uses.items():
        own = uses[session]
        assert own == {mesh: nbytes for mesh, nbytes in use.bytes_on.items() if nbytes or mesh in own}
        assert use.tensors == len([ident for ident in state.tensors if session_of(ident) == session])


def _check_owners(state: State) -> None:
    """Nothing is left of sessions that have ended."""
    owned: Mapping[str, Iterable[int]] = {
        "tensor": (*state.tensors, *state.missing),
        "request": state.pending,
        "op": [op_id for worker in state.workers.values() for op_id in worker.known_ops],
    }
    for what, idents in owned.items():
        assert all(session_of(ident) in state.sessions for ident in idents), what


def _check_shared(state: State) -> None:
    """Tensors that share memory agree on who they are, and published ones belong to living sessions."""
    for ident, members in state.shared.items():
        assert len(members) > 1 and ident in members and members[0] in state.tensors, (ident, members)
        assert all(state.shared[member] == members for member in members), (ident, members)
    for published in state.published.values():
        assert published.session in state.sessions
        assert published.ident in state.tensors or published.ident in state.missing, published


def _check_requests(state: State) -> None:
    """No request waits for a lost worker, and a worker reads one part of a tensor."""
    assert not state.workers.keys() & state.dead_workers.keys()
    for request, pending in state.pending.items():
        assert pending.waiting_for and pending.waiting_for <= state.workers.keys(), (request, pending)
        asked = [read.worker for read in pending.reads]
        assert len(set(asked)) == len(asked) and (not asked or pending.waiting_for <= {*asked}), (request, pending)
    assert state.may_resize == {ident for pending in state.pending.values() for ident, _ in pending.written}


def _check_plans(state: State) -> None:
    """Plans are for living workers, and each program belongs to one plan."""
    for session in state.sessions.values():
        plans = [*session.move_plans.values(), *[plan for op in session.ops.values() for plan in op.plans.values()]]
        assert session.plans_kept == len(plans)
        for cached in plans:
            assert set(cached.plan.workers) <= state.workers.keys(), cached
            assert cached.plan.program is None or cached.op_id in session.program_names, cached
        parts = [p for segment in session.programs.values() for split in segment.splits.values() for p in split.parts]
        assert {part.part_id: part for part in parts} == session.program_parts
        assert all(set(part.workers) <= state.workers.keys() for part in parts)
        assert len(session.program_names) == len([cached for cached in plans if cached.plan.program is not None])
