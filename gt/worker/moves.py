"""Moves a tensor from one layout to another: the part of one worker, with the swaps it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce

from gt.core.meta import ITEM_BYTES, TensorMeta, dense_strides
from gt.core.signatures import DType, ListArg
from gt.sharding.boxes import Box, Interval, Shape, box_shape
from gt.sharding.dtypes import accumulation_dtype, identity
from gt.sharding.reshard import ReshardStep, contributions, plan_reshard, pulls, pushes, segments
from gt.sharding.spec import ShardingSpec, local_box
from gt.worker.engines.engine import Engine, Value
from gt.worker.exchange.interface import ReceivedValues, Swap, Swapping
from gt.worker.failed_value import Fail, FailedValue

_REDUCTIONS = {
    "sum": "aten.add.Tensor",
    "prod": "aten.mul.Tensor",
    "max": "aten.maximum.default",
    "min": "aten.minimum.default",
    "and": "aten.logical_and.default",
    "or": "aten.logical_or.default",
}


class Mover:
    """Moves a tensor of a given meta from one spec to another; `run` returns this worker's part of the target. A worker
    that is in only one of the meshes only sends or only receives. An error on one worker is sent as a failure in place
    of the tensor, so that all workers do the same swaps."""

    def __init__(
        self, engine: Engine, worker: int, meta: TensorMeta, source: ShardingSpec, target: ShardingSpec
    ) -> None:
        self._engine = engine
        self._worker = worker
        self._whole = meta
        self._shape = meta.shape
        self._dtype = meta.dtype
        self._source = source
        self._target = target
        self._plan = plan_reshard(meta.shape, ITEM_BYTES[meta.dtype], source, target)

    def run(self, value: Value | FailedValue | None, fail: Fail) -> Swapping:
        if not self._plan.steps:
            return self._kept(value, fail) if self._worker in self._target.mesh else None
        for step, members in self._steps():
            value = yield from self._step(step, members, value, fail)
        if value is None or isinstance(value, FailedValue):
            return value.for_dependents() if value is not None else None
        expected = self._whole.part(box_shape(local_box(self._target, self._shape, self._worker)))
        moved = value
        return _try(lambda: self._engine.with_strides(moved, expected.stride), fail)

    def _steps(self) -> Iterator[tuple[ReshardStep, tuple[int, ...]]]:
        """The steps that this worker takes part in, each with its members; none where nothing is exchanged."""
        for step, nbytes in zip(self._plan.steps, self._plan.step_bytes, strict=True):
            members = tuple(sorted({*step.source.mesh.workers, *step.target.mesh.workers}))
            if self._worker in members:
                yield step, members if nbytes else ()

    def _receives(self, step: ReshardStep) -> dict[int, TensorMeta]:
        own_pulls = pulls(step, self._shape, self._worker)
        return {pull.peer: self._meta(box_shape(pull.box)) for pull in own_pulls if pull.peer != self._worker}

    def swaps(self) -> list[Swap] | None:
        """The swaps of `run`, without the values that it sends; None where there may be several."""
        steps = [(step, members) for step, members in self._steps() if members]
        if len(steps) > 1 or any(step.kind == "all-reduce" for step, _ in steps):
            return None
        return [Swap(members, {}, self._receives(step)) for step, members in steps]

    def _kept(self, value: Value | FailedValue | None, fail: Fail) -> Value | FailedValue:
        """A copy of the part that this worker holds already."""
        return value if isinstance(value, FailedValue) else _try(lambda: self._engine.copy(value), fail)

    def _step(
        self, step: ReshardStep, members: tuple[int, ...], value: Value | FailedValue | None, fail: Fail
    ) -> Swapping:
        """Run one step. `members` is empty where nothing is exchanged."""
        if step.kind == "all-reduce":
            if not members:
                return self._kept(value, fail)
            return (yield from self._all_reduce(step, members, self._dense(value, step, fail), fail))
        own_pulls = pulls(step, self._shape, self._worker)
        received: ReceivedValues = {}
        if members:
            sends = {
                push.peer: (self._meta(box_shape(push.box)), self._cut(value, step.source, push.box, fail))
                for push in pushes(step, self._shape, self._worker)
            }
            received = yield Swap(members, sends, self._receives(step))
        if self._worker not in step.target.mesh:
            return None
        if any(pull.peer == self._worker for pull in own_pulls):
            (own,) = [pull.box for pull in own_pulls if pull.peer == self._worker]
            received[self._worker] = self._cut(value, step.source, own, fail)
        failure = _first_failure((value, *received.values()))
        return failure if failure is not None else _try(lambda: self._combine(step, received), fail)

    def _combine(self, step: ReshardStep, received: ReceivedValues) -> Value:
        box = local_box(step.target, self._shape, self._worker)
        if step.kind in ("reduce", "reduce-scatter"):
            addends = contributions(step, self._shape, self._worker)
            parts = [self._assemble(box, [(pull.box, received[pull.peer]) for pull in addend]) for addend in addends]
            if not parts:
                return self._engine.empty(self._meta(box_shape(box)))
            return self._reduce(step.source.kind, parts)
        placed = [(pull.box, received[pull.peer]) for pull in pulls(step, self._shape, self._worker)]
        if step.kind == "to-partial":
            return self._assemble(box, placed, self._identity(step.target.kind, box_shape(box)))
        return self._assemble(box, placed)

    def _all_reduce(
        self, step: ReshardStep, members: tuple[int, ...], value: Value | FailedValue | None, fail: Fail
    ) -> Swapping:
        """Every worker of a group reduces one segment of the flat tensor, and sends it to the others."""
        peers, cuts = segments(step, self._shape, self._worker)
        metas = [TensorMeta((stop - start,), (1,), 0, self._dtype) for start, stop in cuts]
        size = dict(zip(peers, metas, strict=True))
        others = [peer for peer in peers if peer != self._worker]
        reducers = [peer for peer in others if size[peer].nbytes]  # a tensor may have fewer elements than workers
        part = {peer: self._segment(value, cut, fail) for peer, cut in zip(peers, cuts, strict=True)}
        is_reducer = size[self._worker].nbytes > 0
        mine = dict.fromkeys(others, size[self._worker]) if is_reducer else {}
        received = yield Swap(members, {peer: (size[peer], part[peer]) for peer in reducers}, mine)
        total = part[self._worker]
        if is_reducer:
            addends = [part[peer] if peer == self._worker else received[peer] for peer in peers]
            total = _first_failure(addends) or _try(lambda: self._reduce(step.source.kind, addends), fail)
        # a copy for each peer: virtual workers receive the very tensor that is sent, and may write to it
        sends = {peer: (size[self._worker], self._kept(total, fail)) for peer in mine}
        received = yield Swap(members, sends, {peer: size[peer] for peer in reducers})
        received[self._worker] = total
        failure = _first_failure(received.values())
        if failure is not None:
            return failure
        placed: list[tuple[Box, Value]] = [
            ((cut,), received[peer]) for peer, cut in zip(peers, cuts, strict=True) if peer in received
        ]
        shape = box_shape(local_box(step.target, self._shape, self._worker))
        return _try(lambda: self._join_segments(shape, placed), fail)

    def _join_segments(self, shape: Shape, segments: Sequence[tuple[Box, Value]]) -> Value:
        """The tensor whose memory consists of these segments."""
        whole = self._engine.empty(self._meta(shape))
        flat = self._engine.flat(whole)
        for (cut,), segment in segments:
            flat[slice(*cut)] = segment
        return whole

    def _segment(self, value: Value | FailedValue | None, cut: Interval, fail: Fail) -> Value | FailedValue:
        """A copy of one segment of a tensor's memory."""
        if isinstance(value, FailedValue):
            return value
        return _try(lambda: self._engine.copy(self._engine.flat(value)[slice(*cut)]), fail)

    def _dense(self, value: Value | FailedValue | None, step: ReshardStep, fail: Fail) -> Value | FailedValue | None:
        """The part that this worker holds before a step, in memory without gaps."""
        if value is None or isinstance(value, FailedValue):
            return value
        stride = self._meta(box_shape(local_box(step.source, self._shape, self._worker))).stride
        return _try(lambda: self._engine.with_strides(value, stride), fail)

    # Parts

    def _meta(self, shape: Shape) -> TensorMeta:
        """The meta of a part of the tensor: in the tensor's memory format, without gaps."""
        return TensorMeta(shape, dense_strides(shape, self._whole.stride), 0, self._dtype)

    def _cut(self, value: Value | FailedValue | None, spec: ShardingSpec, box: Box, fail: Fail) -> Value | FailedValue:
        """A copy of one box of the part that this worker holds."""

        def cut() -> Value:
            part = self._engine.empty(self._meta(box_shape(box)))
            part[...] = value[_within(local_box(spec, self._shape, self._worker), box)]  # type: ignore[index]
            return part

        return value if isinstance(value, FailedValue) else _try(cut, fail)

    def _assemble(self, box: Box, parts: Sequence[tuple[Box, Value]], whole: Value | None = None) -> Value:
        if whole is None and len(parts) == 1 and parts[0][0] == box:
            return parts[0][1]
        if whole is None:
            whole = self._engine.empty(self._meta(box_shape(box)))
        for part_box, part in parts:
            whole[_within(box, part_box)] = part
        return whole

    def _reduce(self, kind: str, parts: Sequence[Value]) -> Value:
        """Reduce parts in their order; short floats are summed in a wider dtype."""
        dtype = accumulation_dtype(self._dtype) if kind in ("sum", "prod") else self._dtype
        total = reduce(self._engine.resolve(_REDUCTIONS[kind]), [self._cast(part, dtype) for part in parts])
        return self._cast(total, self._dtype)

    def _cast(self, value: Value, dtype: str) -> Value:
        if self._engine.meta(value).dtype == dtype:
            return value
        return self._engine.resolve("aten._to_copy.default")(value, dtype=self._engine.literal(DType(dtype)))

    def _identity(self, kind: str, shape: Shape) -> Value:
        size = self._engine.literal(ListArg(shape))
        full = self._engine.resolve("aten.full.default")
        return full(size, identity(kind, self._dtype), dtype=self._engine.literal(DType(self._dtype)))


def _try(compute: Callable[[], Value], fail: Fail) -> Value | FailedValue:
    try:
        return compute()
    except Exception as error:  # most likely the device is out of memory
        return fail("redistribute", (), error)


def _within(outer: Box, inner: Box) -> tuple[slice, ...]:
    """The slices of one box inside another one."""
    return tuple(slice(low - start, high - start) for (start, _), (low, high) in zip(outer, inner, strict=True))


def _first_failure(values: Iterable[Value | FailedValue]) -> FailedValue | None:
    return next((value for value in values if isinstance(value, FailedValue)), None)
