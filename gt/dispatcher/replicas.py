"""Tensors in the layouts that ops need: moved, copied, renamed and freed on the workers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gt.core.messages import STEP_TOKEN, Collective, FreeTensors, RunOp, WorkerDefineProgram
from gt.core.meta import TensorMeta
from gt.dispatcher.outgoing import MessageQueue
from gt.dispatcher.planner import Plan, plan_move
from gt.dispatcher.state import CachedPlan, SessionRecord, State, TensorRecord
from gt.sharding.spec import DeviceMesh, ShardingSpec, whole
from gt.sharding.spec_text import parse_spec


class Replicas:
    def __init__(self, state: State, post: MessageQueue) -> None:
        self._state = state
        self._post = post

    def announce(
        self, session: SessionRecord, plan: Plan, code: int, op: str, takes: int, pinned: bool | None = None
    ) -> CachedPlan:
        """Tell the workers of a plan's program, if it has one, by a code of our own; otherwise it goes by `code`.
        `pinned`: somebody has said where the results are to be."""
        results = tuple([TensorRecord.of(meta, spec, pinned) for meta, spec in plan.results])
        moves = plan.takes != tuple([(place, None) for place in range(takes)])
        if plan.program is None:
            return CachedPlan(plan, code, results, moves, False)
        code = self._state.name_program(session, op)
        self._state.note_use(session.ident, plan.workers)
        self._post.command(plan.workers, WorkerDefineProgram(code, op, plan.program))
        return CachedPlan(plan, code, results, moves, bool(plan.collectives))

    def taken(
        self, session: SessionRecord, plan: Plan, inputs: tuple[int, ...], op: str, site: int, settles: bool
    ) -> tuple[int, ...]:
        """The ids of what a plan takes, after moving what is not there yet."""
        as_they_are = [inputs[place] for place, spec in plan.takes if spec is None]
        return tuple(
            [
                inputs[place]
                if spec is None
                else self.available(
                    session, inputs[place], spec, op, site, inputs[place] in as_they_are, settles=settles
                )
                for place, spec in plan.takes
            ]
        )

    def available(
        self,
        session: SessionRecord,
        ident: int,
        spec: ShardingSpec,
        op: str,
        site: int,
        keeps: bool = False,
        *,
        settles: bool = False,
    ) -> int:
        """The id of a tensor in the layout that an op needs. Copies are kept until the tensor is freed or changed. A
        partial tensor that is reduced is not kept as it was, nor is one that nobody has placed when a scope needs it
        elsewhere (`settles`), unless the op `keeps` it for another of its inputs or needs only some of it."""
        held = self._state.held(ident)
        if held.spec is spec:
            return ident
        copies = self._state.copies.get(ident, {})
        if spec in copies:
            return copies[spec]
        stays = not spec.partial and not keeps and spec.is_partition(held.meta.shape)
        instead = stays and bool(held.spec.partial) and held.spec.mesh is spec.mesh
        alias = ident if instead else self._state.new_id(session)
        self.move(session, held, ident, alias, spec, op, site)
        if instead:
            self._state.lay_out(ident, spec)
        elif stays and settles and not held.pinned:
            self._settle(session, ident, alias, spec, site)
            return ident
        else:
            self._state.add_copy(ident, spec, alias)
        return alias

    def _settle(self, session: SessionRecord, ident: int, alias: int, spec: ShardingSpec, site: int) -> None:
        """What was moved is the tensor from now on."""
        before = self._state.held(ident).spec.mesh
        self._state.lay_out(ident, spec)
        apart = tuple([worker for worker in before.workers if worker not in spec.mesh])
        if apart:
            self._post.command(apart, FreeTensors((ident,)))
        self.rename(session, self._state.tensors[ident], alias, ident, site)

    def move(
        self, session: SessionRecord, held: TensorRecord, ident: int, alias: int, spec: ShardingSpec, op: str, site: int
    ) -> None:
        """Make what workers hold by one id there in another layout, by another id."""
        prepared = self._prepared(session, held.meta, held.spec, spec)
        self.collect(session, prepared.plan.collectives, site, op)
        command = RunOp(prepared.code, (ident,), (alias,), (), 0, site)
        self._post.command(prepared.plan.workers, command, None, prepared.meets)

    def add_up(self, session: SessionRecord, workers: Sequence[int], ident: int, alias: int, site: int) -> None:
        """Add up the tokens of a step that some workers hold; all of them get the sum."""
        mesh = DeviceMesh([len(workers)], ["w"], workers)
        prepared = self._prepared(session, STEP_TOKEN, parse_spec("- + w", mesh), whole(mesh, 1))
        command = RunOp(prepared.code, (ident,), (alias,), (), 0, site)
        self._post.command(prepared.plan.workers, command, None, prepared.meets)

    def _prepared(
        self, session: SessionRecord, meta: TensorMeta, source: ShardingSpec, target: ShardingSpec
    ) -> CachedPlan:
        prepared = session.moves.get((meta, source, target))
        if prepared is None:
            plan = plan_move(meta, source, target)
            prepared = self.announce(session, plan, 0, "redistribute", 1)
            self._state.add_move(session, (meta, source, target), prepared)
        return prepared

    def rename(self, session: SessionRecord, held: TensorRecord, alias: int, ident: int, site: int) -> None:
        """Give what workers know by one id another one."""
        prepared = self._prepared(session, held.meta, held.spec, held.spec)
        self._post.command(held.spec.mesh.workers, RunOp(prepared.code, (alias,), (ident,), (), 0, site))
        self._post.command(held.spec.mesh.workers, FreeTensors((alias,)))

    def gather_for_good(self, session: SessionRecord, ident: int, mesh: DeviceMesh, site: int) -> None:
        """Make a tensor whole on a mesh, and nothing else."""
        held = self._state.held(ident)
        target = whole(mesh, len(held.meta.shape))
        if held.spec is target:
            return
        alias = self.available(session, ident, target, "", site)
        if alias == ident:
            return
        for spec, copy in list(self._state.copies.get(ident, {}).items()):
            self._state.drop_copy(ident, spec)
            self.free([(copy, spec.mesh)] if copy != alias else [])
        self._settle(session, ident, alias, target, site)

    def free(self, freed: Sequence[tuple[int, DeviceMesh]]) -> None:
        """Free ids where they are."""
        by_mesh: dict[DeviceMesh, list[int]] = {}
        for ident, mesh in freed:
            by_mesh.setdefault(mesh, []).append(ident)
        for mesh, ids in by_mesh.items():
            self._post.command(mesh.workers, FreeTensors(tuple(ids)))

    def drop_copy(self, ident: int, spec: ShardingSpec) -> None:
        """A gathered copy that was made for a reader only."""
        alias = self._state.drop_copy(ident, spec)
        if alias is not None:
            self._post.command(spec.mesh.workers, FreeTensors((alias,)))

    def collect(self, session: SessionRecord, collectives: Sequence[Collective], site: int, op: str = "") -> None:
        """Note what moves, for a client that watches."""
        if session.watches:
            noted = [msgspec.structs.replace(moved, site=site, op=op or moved.op) for moved in collectives]
            self._state.collect(session, noted)
