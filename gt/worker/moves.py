"""Moves of tensors from one layout to another: the part of one worker, with the exchanges it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from gt.core.meta import ITEM_BYTES, TensorMeta
from gt.sharding.boxes import box_shape
from gt.sharding.reshard import plan_reshard
from gt.sharding.spec import ShardingSpec, local_box
from gt.worker.engines.engine import Engine, Value
from gt.worker.exchange.interface import Exchanging, MoveResult, MoveTask, attempt
from gt.worker.exchange.step_parts import StepPart
from gt.worker.failed_value import Fail, FailedValue


class Mover:
    """Moves a tensor of a given meta from one spec to another. `parts` has one entry for each step, None for steps that
    this worker takes no part in. A worker that is in only one of the meshes only sends or only receives. An error on
    one worker is sent as a failure in place of the tensor, so that all workers do the same exchanges."""

    def __init__(
        self, engine: Engine, worker: int, meta: TensorMeta, source: ShardingSpec, target: ShardingSpec
    ) -> None:
        self.engine = engine
        plan = plan_reshard(meta.shape, ITEM_BYTES[meta.dtype], source, target)
        self._is_target = worker in target.mesh
        self._stride = self._target_stride(meta, target, worker)
        self.parts = [
            StepPart(worker, meta, step, nbytes) if worker in step.source.mesh or worker in step.target.mesh else None
            for step, nbytes in zip(plan.steps, plan.step_bytes, strict=True)
        ]

    def _target_stride(self, meta: TensorMeta, target: ShardingSpec, worker: int) -> tuple[int, ...]:
        if not self._is_target:
            return ()
        return meta.part(box_shape(local_box(target, meta.shape, worker))).stride

    @property
    def kind(self) -> str:
        """The kind of the collective that the move is, such as "all-gather"; empty if it is not one collective."""
        return self.parts[0].kind if len(self.parts) == 1 and self.parts[0] is not None else ""

    def finish(self, value: MoveResult, fail: Fail) -> MoveResult:
        """The part that this worker keeps, after the last step."""
        if not self.parts:
            return self._copy(value, fail) if self._is_target else None
        if value is None or isinstance(value, FailedValue):
            return value.for_dependents() if value is not None else None
        return attempt(lambda: self.engine.with_strides(value, self._stride), fail)

    def _copy(self, value: MoveResult, fail: Fail) -> MoveResult:
        return value if isinstance(value, FailedValue) else attempt(lambda: self.engine.copy(value), fail)

    def run_alone(self, part: StepPart, value: MoveResult, fail: Fail) -> MoveResult:
        """A step in which nothing is exchanged."""
        if part.after is None or isinstance(value, FailedValue):
            return value if part.after is not None else None
        held: Value = value
        boxes = {piece.peer: held[piece.source] for addend in part.addends for piece in addend}
        return attempt(lambda: part.combine(self.engine, boxes, owned=False), fail)


def run_moves(movers: Sequence[Mover], values: Sequence[MoveResult], fail: Fail) -> Exchanging:
    """Run independent moves side by side; steps with the same members are one exchange. Returns this worker's parts."""
    held = list(values)
    for number in range(max(len(mover.parts) for mover in movers)):
        batches: _Batches = {}
        for position, mover in enumerate(movers):
            part = mover.parts[number] if number < len(mover.parts) else None
            if part is not None and part.members:
                batches.setdefault(part.members, []).append((position, part))
            elif part is not None:
                held[position] = mover.run_alone(part, held[position], fail)
        for batch in batches.values():
            results = yield [MoveTask(movers[position].engine, part, held[position], fail) for position, part in batch]
            for (position, _), result in zip(batch, results, strict=True):
                held[position] = result
    return [mover.finish(value, fail) for mover, value in zip(movers, held, strict=True)]


_Batches: TypeAlias = dict[tuple[int, ...], list[tuple[int, StepPart]]]
"""Positions and parts of moves, by the members of their exchange."""
