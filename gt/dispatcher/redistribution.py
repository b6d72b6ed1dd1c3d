"""Moves, copies and renames tensors on the workers, so that ops find them in the layouts that they need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from gt.core.messages import STEP_TOKEN, Collective, FreeTensors, RunOp, WorkerDefineProgram
from gt.core.meta import TensorMeta
from gt.dispatcher.message_queue import MessageQueue
from gt.dispatcher.op_definitions import MOVE, CachedPlan, MoveKey
from gt.dispatcher.plan_records import PlanObserver, record_moves
from gt.dispatcher.planner import Plan, TensorMove, plan_moves
from gt.dispatcher.session_limits import copies_over_limit
from gt.dispatcher.state import State
from gt.dispatcher.state_records import SessionRecord, WorkerRecord
from gt.dispatcher.tensor_records import TensorRecord
from gt.dispatcher.tensor_tables import TensorTables
from gt.sharding.spec import DeviceMesh, ShardingSpec, whole
from gt.sharding.spec_text import parse_spec

SHARE_OF_COPIES = 0.5  # share of a worker's memory for copies, if the user sets no limit


def default_limit(workers: Iterable[WorkerRecord]) -> int | None:
    """Half of the memory of the worker that has the least; workers of one device share its memory. None if the memory
    of no worker is known."""
    sharing: dict[tuple[str, str], list[int]] = {}
    for worker in workers:
        if worker.memory:
            sharing.setdefault((worker.info.host, worker.info.device), []).append(worker.memory)
    return min((int(SHARE_OF_COPIES * min(sizes) / len(sizes)) for sizes in sharing.values()), default=None)


def copies_to_drop(
    tables: TensorTables, limit: int, tensor: TensorRecord, spec: ShardingSpec, in_use: Collection[int]
) -> list[int]:
    """The least recently used copies to drop, so that no worker holds more than `limit` bytes of copies when it gets a
    new copy of `tensor` in the layout `spec`. Copies that are `in_use` stay, even if the limit is exceeded."""
    nbytes = TensorRecord.of(tensor.meta, spec).nbytes
    if sum(tables.copy_bytes.values()) + nbytes <= limit:
        return []
    excess = {
        worker: sum(held for mesh, held in tables.copy_bytes.items() if worker in mesh) + nbytes - limit
        for worker in spec.mesh.workers
    }
    dropped: list[int] = []
    for copy, (ident, layout) in tables.copy_order.items():
        if max(excess.values()) <= 0:
            break
        held = [worker for worker in layout.mesh.workers if excess.get(worker, 0) > 0]
        if held and copy not in in_use:
            dropped.append(copy)
            freed = TensorRecord.of(tables.tensors[ident].meta, layout).nbytes
            excess.update({worker: excess[worker] - freed for worker in layout.mesh.workers if worker in excess})
    return dropped


_NO_BYTES = TensorMeta((0,), (1,), 0, "float32")


class Redistributor:
    """Gives tensors other layouts, by commands to the workers that hold them. The `observer`, if there is one, sees
    each new plan of moves."""

    def __init__(self, state: State, outgoing: MessageQueue, observer: PlanObserver | None = None) -> None:
        self._state = state
        self._outgoing = outgoing
        self._observer = observer

    def define_plan(
        self,
        session: SessionRecord,
        plan: Plan,
        op_id: int,
        op: str,
        input_count: int,
        placed: bool | None = None,
        created: bool = False,
    ) -> CachedPlan:
        """Define the program of a plan on its workers, with an id of the dispatcher's own; a plan without a program
        keeps `op_id`. `placed` and `created`: see TensorRecord."""
        self._state.count_plan(session)
        results = tuple(TensorRecord.of(meta, spec, placed)._replace(created=created) for meta, spec in plan.results)
        moves_inputs = plan.sources != tuple((position, None) for position in range(input_count))
        needs_preparation = moves_inputs or plan.linear or plan.reduces or bool(plan.gathered)
        if plan.program is None:
            return CachedPlan(plan, op_id, results, moves_inputs, False, needs_preparation)
        program_id = self._state.define_program(session, op)
        self._state.note_use(session.ident, plan.workers)
        self._outgoing.command(plan.workers, WorkerDefineProgram(program_id, op, plan.program))
        return CachedPlan(plan, program_id, results, moves_inputs, bool(plan.collectives), needs_preparation)

    def inputs_of(
        self, session: SessionRecord, plan: Plan, inputs: tuple[int, ...], op: str, site: int, places: bool
    ) -> tuple[int, ...]:
        """The ids of a plan's inputs in the layouts that it needs, after the necessary moves."""
        as_they_are = [inputs[position] for position, spec in plan.sources if spec is None]
        moved: list[int] = []
        for position, spec in plan.sources:
            ident = inputs[position]
            if spec is not None:
                keep = ident in as_they_are
                ident = self.in_layout(session, ident, spec, op, site, keep=keep, places=places, in_use=moved)
            moved.append(ident)
        return tuple(moved)

    def in_layout(
        self,
        session: SessionRecord,
        ident: int,
        spec: ShardingSpec,
        op: str,
        site: int,
        *,
        keep: bool = False,
        places: bool = False,
        in_use: Collection[int] = (),
        recurs: bool = True,
    ) -> int:
        """The id of a tensor in the layout that an op needs. A new copy stays until the tensor is freed or written, or
        until it is dropped to make room for another one. Copies that are `in_use`, by the same op, are not dropped.

        The moved tensor replaces the original if the original is partial, or is not placed and the scope `places` it
        (`TensorRecord.may_move_to`); but not if the op needs the original too (`keep`) or only a part of it. Unless the
        need `recurs`, the module that runs does not gather the tensor ahead of its next run.
        """
        tensor = self._state.tensor(ident)
        if tensor.spec is spec:
            return ident
        found = self._state.use_copy(ident, spec)
        if found is not None:
            return found
        may_replace = not spec.partial and not keep and spec.is_partition(tensor.meta.shape)
        is_reduced = may_replace and bool(tensor.spec.partial) and tensor.spec.mesh is spec.mesh
        is_replaced = may_replace and places and tensor.may_move_to(spec)
        if not is_reduced and not is_replaced:
            self.make_room(session, tensor, spec, in_use)
        elif self._state.limits is not None:
            self.require_room(session, [TensorRecord.of(tensor.meta, spec)], in_use=in_use)
        copy = ident if is_reduced else self._state.new_id(session)
        self.move(session, tensor, ident, copy, spec, op, site)
        if is_reduced:
            self._state.set_layout(ident, spec)
        elif is_replaced:
            self._replace_with_copy(session, ident, copy, spec, site)
            return ident
        else:
            self._state.add_copy(ident, spec, copy)
            if recurs:
                self._state.note_need(session, ident, TensorMove(tensor.meta, tensor.spec, spec))
        return copy

    def make_room(
        self, session: SessionRecord, tensor: TensorRecord, spec: ShardingSpec, in_use: Collection[int]
    ) -> None:
        """Drop copies so that a new one does not exceed the limit on copies, or that of the session. Raises
        LimitExceeded where the session may not hold the copy even so."""
        limit = self._state.copy_limit
        for copy in () if limit is None else copies_to_drop(self._state, limit, tensor, spec, in_use):
            self.drop_copy(*self._state.copy_order[copy])
        if self._state.limits is not None:
            self.require_room(session, [TensorRecord.of(tensor.meta, spec)], in_use=in_use)

    def require_room(
        self, session: SessionRecord, new: Sequence[TensorRecord], tensors: int = 0, in_use: Collection[int] = ()
    ) -> None:
        """Drop copies of a session so that it may hold the memory of `new`, which counts as `tensors` tensors.
        Raises LimitExceeded if it may not."""
        for copy in copies_over_limit(self._state, session.ident, new, tensors, in_use):
            self.drop_copy(*self._state.copy_order[copy])

    def require_room_for_results(self, session: SessionRecord, mesh: DeviceMesh, in_use: Collection[int]) -> None:
        """Drop copies of a session that is over its limits. Raises LimitExceeded if it is over them even so: it may not
        make results of unknown sizes on a mesh then."""
        self.require_room(session, [TensorRecord.of(_NO_BYTES, whole(mesh, 1))], in_use=in_use)

    def _replace_with_copy(self, session: SessionRecord, ident: int, copy: int, spec: ShardingSpec, site: int) -> None:
        """Free a tensor in its old layout and give its id to the copy."""
        before = self._state.tensor(ident).spec.mesh
        self._state.set_layout(ident, spec)
        apart = tuple(worker for worker in before.workers if worker not in spec.mesh)
        if apart:
            self._outgoing.command(apart, FreeTensors((ident,)))
        self.rename(session, self._state.tensors[ident], copy, ident, site)

    def move(
        self,
        session: SessionRecord,
        tensor: TensorRecord,
        source: int,
        target: int,
        spec: ShardingSpec,
        op: str,
        site: int,
    ) -> None:
        """Make a tensor with the value of the id `source` and the layout `spec` under the id `target`."""
        self.move_together(session, [(source, target, TensorMove(tensor.meta, tensor.spec, spec))], op, site)

    def move_together(
        self, session: SessionRecord, moves: Sequence[tuple[int, int, TensorMove]], op: str, site: int
    ) -> None:
        """Move tensors in one exchange: for each the id it has, the id that the moved tensor gets, and the move."""
        cached = self._plan_of_moves(session, tuple([move for _, _, move in moves]), op, site)
        self.note_collectives(session, cached.plan.collectives, site, op)
        sources, targets = tuple([source for source, _, _ in moves]), tuple([target for _, target, _ in moves])
        self._run(cached, sources, targets, site)

    def sum_tokens(self, session: SessionRecord, workers: Sequence[int], token: int, tokens: int, site: int) -> None:
        """Sum the step tokens of some workers; each of them gets the sum."""
        mesh = DeviceMesh([len(workers)], ["w"], workers)
        move = TensorMove(STEP_TOKEN, parse_spec("- + w", mesh), whole(mesh, 1))
        cached = self._plan_of_moves(session, (move,), "the step's end", site)
        self._run(cached, (token,), (tokens,), site)

    def _run(self, cached: CachedPlan, sources: tuple[int, ...], targets: tuple[int, ...], site: int) -> None:
        command = RunOp(cached.op_id, sources, targets, (), 0, site)
        self._outgoing.command(cached.plan.workers, command, None, cached.exchanges)

    def _plan_of_moves(self, session: SessionRecord, moves: MoveKey, op: str, site: int) -> CachedPlan:
        cached = session.move_plans.get(moves)
        if cached is None:
            cached = self.define_plan(session, plan_moves(moves), 0, MOVE, len(moves))
            self._state.add_moves(session, moves, cached)
            if self._observer is not None and cached.plan.collectives:
                self._observer(record_moves(moves, cached.plan, op, session.site(site)))
        return cached

    def rename(self, session: SessionRecord, tensor: TensorRecord, old: int, new: int, site: int) -> None:
        """Give a tensor on workers another id."""
        cached = self._plan_of_moves(session, (TensorMove(tensor.meta, tensor.spec, tensor.spec),), "", site)
        workers = tensor.spec.mesh.workers
        self._outgoing.command(workers, RunOp(cached.op_id, (old,), (new,), (), 0, site))
        self._outgoing.command(workers, FreeTensors((old,)))

    def gather_for_good(self, session: SessionRecord, ident: int, mesh: DeviceMesh, site: int) -> None:
        """Make a tensor whole on a mesh and drop it in all other layouts."""
        target = whole(mesh, len(self._state.tensor(ident).meta.shape))
        if self._state.tensor(ident).spec is not target:
            self._move_for_good(session, ident, target, "", site)

    def place(self, session: SessionRecord, ident: int, target: ShardingSpec, site: int) -> None:
        """Give a tensor another layout, for good. Copies in other layouts are dropped, unless it moves within its mesh
        and needs no copy itself."""
        tensor = self._state.tensor(ident)
        if tensor.spec is target:
            return
        if tensor.spec.mesh is target.mesh and target not in self._state.copies.get(ident, {}):
            self.move(session, tensor, ident, ident, target, "place", site)
            self._state.set_layout(ident, target)
        else:
            self._move_for_good(session, ident, target, "place", site)

    def relocate(self, session: SessionRecord, ident: int, target: ShardingSpec) -> None:
        """Give a tensor a layout on other workers, as if it had been there from the start: its old workers leave."""
        tensor = self._state.tensor(ident)
        self._outgoing.free(self._state.drop_copies((ident,)))
        moved = self._state.new_id(session)
        self.move(session, tensor, ident, moved, target, "leave", 0)
        self._replace_with_copy(session, ident, moved, target, 0)
        self._state.restore_placing(ident, tensor)

    def _move_for_good(self, session: SessionRecord, ident: int, target: ShardingSpec, op: str, site: int) -> None:
        """Move a tensor and drop it in all other layouts."""
        moved = self.in_layout(session, ident, target, op, site)
        if moved == ident:
            return
        for spec, copy in list(self._state.copies.get(ident, {}).items()):
            self._state.drop_copy(ident, spec)
            self._outgoing.free([(copy, spec.mesh)] if copy != moved else [])
        self._replace_with_copy(session, ident, moved, target, site)

    def drop_copy(self, ident: int, spec: ShardingSpec) -> None:
        copy = self._state.drop_copy(ident, spec)
        if copy is not None:
            self._outgoing.command(spec.mesh.workers, FreeTensors((copy,)))

    def note_collectives(
        self, session: SessionRecord, collectives: Sequence[Collective], site: int, op: str = ""
    ) -> None:
        """Note communication for a client that watches its traffic."""
        if session.watches:
            noted = [msgspec.structs.replace(moved, site=site, op=op or moved.op) for moved in collectives]
            self._state.add_collectives(session, noted)
