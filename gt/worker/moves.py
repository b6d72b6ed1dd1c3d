"""Moves of tensors from one layout to another, as one worker takes part in them, with the exchanges they need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from gt.core.meta import ITEM_BYTES, TensorMeta
from gt.sharding.boxes import box_shape
from gt.sharding.hop_traffic import StepKind
from gt.sharding.reshard import plan_reshard
from gt.sharding.spec import ShardingSpec, local_box
from gt.worker.engines.engine import Engine, Value
from gt.worker.exchange.interface import EarlyTasks, Exchanging, MoveResult, MoveTask, Work, attempt
from gt.worker.exchange.local_steps import LocalStep
from gt.worker.failed_value import Fail, FailedValue


class Mover:
    """Moves a tensor of a given meta from one spec to another. `steps` are this worker's local steps, None for a step
    that it takes no part in. A worker that is in only one of the meshes only sends or only receives. An error on one
    worker is sent as a failure in place of the tensor, so that all workers do the same exchanges. `nbytes` is the size
    of the part that this worker gets."""

    def __init__(
        self, engine: Engine, worker: int, meta: TensorMeta, source: ShardingSpec, target: ShardingSpec
    ) -> None:
        self.engine = engine
        plan = plan_reshard(meta.shape, ITEM_BYTES[meta.dtype], source, target)
        self._is_target = worker in target.mesh
        part = meta.part(box_shape(local_box(target, meta.shape, worker))) if self._is_target else None
        self._stride = part.stride if part is not None else ()
        self.nbytes = part.nbytes if part is not None else 0
        self.steps = [
            LocalStep(worker, meta, step, nbytes) if worker in step.source.mesh or worker in step.target.mesh else None
            for step, nbytes in zip(plan.steps, plan.step_bytes, strict=True)
        ]

    @property
    def kind(self) -> StepKind | None:
        """The kind of the collective that the move is; None if it is not one collective."""
        return self.steps[0].kind if len(self.steps) == 1 and self.steps[0] is not None else None

    def finish(self, value: MoveResult, fail: Fail) -> MoveResult:
        """The part that this worker keeps, after the last step."""
        if not self.steps:
            return self._copy(value, fail) if self._is_target else None
        if value is None or isinstance(value, FailedValue):
            return value.for_dependents() if value is not None else None
        return attempt(lambda: self.engine.with_strides(value, self._stride), fail)

    def _copy(self, value: MoveResult, fail: Fail) -> MoveResult:
        return value if isinstance(value, FailedValue) else attempt(lambda: self.engine.copy(value), fail)

    def run_alone(self, step: LocalStep, value: MoveResult, fail: Fail) -> MoveResult:
        """A step in which nothing is exchanged."""
        if step.after is None or isinstance(value, FailedValue):
            return value if step.after is not None else None
        held: Value = value
        boxes = {box.peer: held[box.source] for addend in step.addends for box in addend}
        return attempt(lambda: step.combine(self.engine, boxes, owned=False), fail)


def run_moves(movers: Sequence[Mover], values: Sequence[MoveResult], fail: Fail) -> Exchanging:
    """Run independent moves side by side; steps with the same members are one exchange. Returns this worker's parts."""
    held = list(values)
    for number in range(max(len(mover.steps) for mover in movers)):
        batches: _Batches = {}
        for position, mover in enumerate(movers):
            step = mover.steps[number] if number < len(mover.steps) else None
            if step is not None and step.members:
                batches.setdefault(step.members, []).append((position, step))
            elif step is not None:
                held[position] = mover.run_alone(step, held[position], fail)
        for batch in batches.values():
            results = yield [MoveTask(movers[position].engine, step, held[position], fail) for position, step in batch]
            assert isinstance(results, Sequence), "these tasks are not early ones"
            for (position, _), result in zip(batch, results, strict=True):
                held[position] = result
    return [mover.finish(value, fail) for mover, value in zip(movers, held, strict=True)]


class BegunMoves:
    """Independent moves of one step each whose exchanges have begun."""

    def __init__(self, movers: Sequence[Mover], values: Sequence[MoveResult], fail: Fail) -> None:
        self._movers = movers
        self._held = list(values)
        self._fail = fail
        self._begun: list[tuple[list[int], Sequence[MoveResult] | Work]] = []

    def begin(self) -> Exchanging:
        """Yield the tasks of all exchanges."""
        batches: _Batches = {}
        for position, mover in enumerate(self._movers):
            step = mover.steps[0] if mover.steps else None
            if step is not None and step.members:
                batches.setdefault(step.members, []).append((position, step))
            elif step is not None:
                self._held[position] = mover.run_alone(step, self._held[position], self._fail)
        for batch in batches.values():
            tasks = [
                MoveTask(self._movers[position].engine, step, self._held[position], self._fail)
                for position, step in batch
            ]
            self._begun.append(([position for position, _ in batch], (yield EarlyTasks(tasks))))

    def finish(self) -> list[MoveResult]:
        """Wait for this worker's parts."""
        for positions, begun in self._begun:
            results = begun if isinstance(begun, Sequence) else begun.finish()
            for position, result in zip(positions, results, strict=True):
                self._held[position] = result
        return [mover.finish(value, self._fail) for mover, value in zip(self._movers, self._held, strict=True)]


_Batches: TypeAlias = dict[tuple[int, ...], list[tuple[int, LocalStep]]]
"""Positions of moves, and local steps of them, by the members of their exchange."""
