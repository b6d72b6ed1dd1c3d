"""Workers that leave on request: their tensors move to the others before they end.

A worker that is asked to end says so. Then it gets no new tensors, and those that it holds are moved: whole ones
to the worker with the fewest bytes, cut ones to a mesh with a spare worker in its place or, without one, to a smaller
mesh of the same axes. When the workers have done that, and half a second later, it is closed: instructions that name it
fail as if it were lost; what messages on their way have put there is moved too, and then it is shut down.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from gt.core.errors import ProtocolError
from gt.core.ids import ALL_SESSIONS, SESSION_SHIFT
from gt.core.messages import Left, Synchronize, WorkerShutdown
from gt.dispatcher.gradient_buckets import GradientBuckets
from gt.dispatcher.message_queue import MessageQueue
from gt.dispatcher.programs import Programs
from gt.dispatcher.redistribution import Redistributor
from gt.dispatcher.state import State
from gt.dispatcher.state_records import DeadWorker, SessionRecord
from gt.dispatcher.tensor_records import TensorRecord, spec_on
from gt.dispatcher.transactions import Transactions
from gt.sharding.spec import DeviceMesh

CHECKS = 2  # checks of processes before a worker whose tensors were moved is closed: about half a second
log = logging.getLogger("gt.dispatcher")


@dataclass
class _Drain:
    """A worker that leaves. `meshes` are those that take the place of the meshes with it, and `request` is the last one
    that workers answer when they have done the moves; those in `waiting_for` have not. `checks` are those of processes
    since all of them had, while messages on their way could still name the worker."""

    meshes: dict[DeviceMesh, DeviceMesh] = field(default_factory=dict)
    request: int = -1
    waiting_for: set[int] = field(default_factory=set)
    checks: int = 0
    is_done: bool = False


class WorkerDrains:
    """Moves the tensors of workers that leave."""

    def __init__(
        self,
        state: State,
        outgoing: MessageQueue,
        transactions: Transactions,
        redistributor: Redistributor,
        programs: Programs,
        buckets: GradientBuckets,
    ) -> None:
        self._state = state
        self._outgoing = outgoing
        self._transactions = transactions
        self._redistributor = redistributor
        self._programs = programs
        self._buckets = buckets
        self._drains: dict[int, _Drain] = {}
        self._requests = 0

    def is_done(self, worker: int) -> bool:
        """Whether a worker was shut down after all its tensors were moved."""
        return worker in self._drains and self._drains[worker].is_done

    def begin(self, worker: int, dead: DeadWorker) -> None:
        """A worker leaves. Without another one that takes its tensors it ends immediately."""
        if worker in self._drains:
            return
        drain = self._drains[worker] = _Drain()
        with self._transactions.begin():
            self._state.set_leaving(worker, dead)
            for session in self._state.sessions if self._state.staying() else ():
                self._outgoing.answer(session, Left(worker, dead.pid, dead.reason))
        self._move_all(worker, drain)

    def note_done(self, worker: int, request: int) -> None:
        """A worker has done the moves before a request, whose worker may be lost by now. Raises ProtocolError for one
        that was not asked."""
        found = next((each for each, drain in self._drains.items() if drain.request == request), None)
        if request > self._requests or (found is not None and worker not in self._drains[found].waiting_for):
            raise ProtocolError(f"worker {worker} was not asked whether it has moved tensors")
        if found is not None:
            self._note_done(found, worker)

    def lose_worker(self, ident: int) -> None:
        """A lost worker moves nothing more."""
        self._drains.pop(ident, None)
        for worker, drain in self._drains.items():
            if ident in drain.waiting_for:
                self._note_done(worker, ident)

    def _note_done(self, worker: int, mover: int) -> None:
        drain = self._drains[worker]
        drain.waiting_for.discard(mover)
        if drain.waiting_for:
            return
        if self._state.workers[worker].is_closed:
            drain.is_done = not self._state.tensors_on(worker)
            self._outgoing.command((worker,), WorkerShutdown())

    def note_process_check(self) -> None:
        """The processes of workers were checked once more: close those that have moved their tensors long enough
        ago."""
        for worker, drain in self._drains.items():
            if drain.request < 0 or drain.waiting_for or self._state.workers[worker].is_closed:
                continue
            drain.checks += 1
            if drain.checks == CHECKS:
                with self._transactions.begin():
                    self._state.close_worker(worker)
                self._move_all(worker, drain)

    def _move_all(self, worker: int, drain: _Drain) -> None:
        """Move the tensors of all sessions, and ask the workers that take part to answer when they have done it."""
        if not self._state.staying():
            self._outgoing.command((worker,), WorkerShutdown())
            return
        movers = {worker}
        tensors = self._state.tensors_on(worker)
        for session in self._state.sessions.values():
            try:
                with self._transactions.begin():
                    movers |= self._move_tensors_of(session, tensors.get(session.ident, []), worker, drain)
            except Exception:  # an internal error: these tensors are lost with the worker
                log.exception("the tensors of client %d on worker %d could not be moved", session.ident, worker)
        self._requests += 1
        drain.request = (ALL_SESSIONS << SESSION_SHIFT) + self._requests
        drain.waiting_for = movers & self._state.workers.keys()
        self._outgoing.command(tuple(sorted(drain.waiting_for)), Synchronize(drain.request))

    def _move_tensors_of(self, session: SessionRecord, idents: Sequence[int], worker: int, drain: _Drain) -> set[int]:
        """Returns the workers that take part. A tensor that an unanswered query may resize moves after the answer."""
        state, movers = self._state, set[int]()
        tensors = [ident for ident in idents if ident in state.tensors and ident not in state.may_resize]
        self._programs.forget_parts(session)
        self._buckets.reduce(session, tensors, "leave", 0)
        for ident in tensors:
            tensor = state.tensors[ident]
            if worker in tensor.spec.mesh:
                target = spec_on(self._mesh_without(worker, tensor, drain), tensor)
                movers.update(tensor.spec.mesh.workers, target.mesh.workers)
                self._redistributor.relocate(session, ident, target)
        self._outgoing.free(state.lose_parts(tensors, worker).useless)
        return movers

    def _mesh_without(self, worker: int, tensor: TensorRecord, drain: _Drain) -> DeviceMesh:
        """The mesh for a tensor of a worker that leaves: the same for all tensors that are on several workers."""
        mesh = tensor.spec.mesh
        if mesh is self._state.workers[worker].solo_mesh:
            return self._state.least_loaded_mesh()
        found = drain.meshes.get(mesh)
        if found is None or not {*found.workers} <= {*self._state.staying()}:
            found = drain.meshes[mesh] = self._find_mesh(mesh, worker)
        return found

    def _find_mesh(self, mesh: DeviceMesh, worker: int) -> DeviceMesh:
        """A mesh with a spare worker in the place of one or, without a spare one, without the coordinate of that worker
        along the longest axis."""
        loads = self._state.bytes_by_worker()
        spare = min([other for other in self._state.staying() if other not in mesh], key=loads.__getitem__, default=-1)
        if spare >= 0:
            shape, members = mesh.shape, [spare if member == worker else member for member in mesh.workers]
        else:
            axis = mesh.shape.index(max(mesh.shape))
            left = mesh.coordinate(worker)[axis]
            members = [member for member in mesh.workers if mesh.coordinate(member)[axis] != left]
            shape = tuple([size - (place == axis) for place, size in enumerate(mesh.shape)])
        hosts = [self._state.workers[member].info.host for member in members]
        return DeviceMesh(shape, mesh.axis_names, members, mesh.name, hosts)
