"""Local steps: the boxes that one worker gives and takes in one step of a move, and how it combines those it takes.

Transports differ in how a box travels. They all give the boxes of a step to `LocalStep.combine`, so that every
transport gives the same bits: addends are reduced in the order of the mesh, and short floats are summed in a wider
dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from gt.core.meta import ITEM_BYTES, TensorMeta, dense_strides
from gt.core.signatures import DType, ListArg
from gt.sharding.boxes import Box, Cuts, Shape, balanced_cuts, box_elements, box_shape
from gt.sharding.dtypes import accumulation_dtype, identity
from gt.sharding.reshard import (
    Pull,
    ReshardStep,
    contributions,
    exchange_group,
    has_equal_boxes,
    pulls,
    pushes,
    source_replica,
)
from gt.sharding.spec import ShardingSpec, local_box
from gt.worker.engines.engine import Engine, Value
from gt.worker.failed_value import FailedValue

Slices: TypeAlias = tuple[slice, ...]

_REDUCTIONS = {
    "sum": "aten.add.Tensor",
    "prod": "aten.mul.Tensor",
    "max": "aten.maximum.default",
    "min": "aten.minimum.default",
    "and": "aten.logical_and.default",
    "or": "aten.logical_or.default",
}


class TakenBox(NamedTuple):
    """A box that a worker takes from `peer`, which may be the worker itself: its place in the peer's part before the
    step, its place in the worker's part after the step, and its meta."""

    peer: int
    source: Slices
    target: Slices
    meta: TensorMeta
    is_part: bool
    """Whether it is less than the peer's part."""


class LocalStep:
    """One step of a move, as one worker sees it.

    `members` are all workers that exchange in the step, in the order of the mesh; none if nothing is exchanged.
    `nbytes` are the bytes that all workers of the step receive together.

    `before` and `after` are the metas of the worker's part, None where it has none. `peers` are the metas of the parts
    of the workers that it takes from. `gives` are the boxes that others take from it. `addends` are the boxes that it
    takes, each addend a tuple; one addend if nothing is reduced. `received` are the bytes that the plan counts, by
    sender. `is_even` says whether all members take and give boxes of one shape, as native collectives do. Steps with
    the same `recipe` take the same boxes, and give the same value. `holders` are the workers that the addends are taken
    from, if each addend is one box; otherwise it is empty.
    """

    def __init__(self, worker: int, meta: TensorMeta, reshard_step: ReshardStep, nbytes: int) -> None:
        self.worker = worker
        self.nbytes = nbytes
        self.kind = reshard_step.kind
        self.dtype = meta.dtype
        self.reshard_step = reshard_step
        self._strides = meta.stride
        self._shape = meta.shape
        self.members = exchange_group(reshard_step, worker) if nbytes else ()
        self._befores: dict[int, TensorMeta | None] = {}
        self._operators: dict[Engine, Callable[..., Value]] = {}
        self.before = self._part(reshard_step.source, worker)
        self.after = self._part(reshard_step.target, worker)
        self.reduction = reshard_step.source.kind if self.kind in ("all-reduce", "reduce-scatter", "reduce") else ""
        self.addends = self._addends()
        target = reshard_step.target
        self.recipe = (
            (source_replica(reshard_step, worker), local_box(target, meta.shape, worker)) if self.after else ()
        )
        self.holders = self._holders()
        takes_from = {box.peer for addend in self.addends for box in addend} - {worker}
        source = reshard_step.source
        self.peers = {peer: self._require_part(source, peer) for peer in self.members if peer in takes_from}
        self.gives = self._gives()
        self.received = self._received()
        self.is_even = bool(self.members) and has_equal_boxes(reshard_step, meta.shape, self.members)

    # Boxes

    def meta_of(self, shape: Shape) -> TensorMeta:
        """The meta of a part of the tensor: in the tensor's memory format, without gaps."""
        return TensorMeta(shape, dense_strides(shape, self._strides), 0, self.dtype)

    def before_of(self, worker: int) -> TensorMeta | None:
        """The meta of a member's part before the step."""
        if worker not in self._befores:
            self._befores[worker] = self._part(self.reshard_step.source, worker)
        return self._befores[worker]

    def _part(self, spec: ShardingSpec, worker: int) -> TensorMeta | None:
        return self._require_part(spec, worker) if worker in spec.mesh else None

    def _require_part(self, spec: ShardingSpec, worker: int) -> TensorMeta:
        return self.meta_of(box_shape(local_box(spec, self._shape, worker)))

    def _addends(self) -> tuple[tuple[TakenBox, ...], ...]:
        if self.after is None:
            return ()
        if self.kind == "all-reduce":
            everything = tuple(slice(0, size) for size in self.after.shape)
            group = self.members or (self.worker,)
            return tuple((TakenBox(peer, everything, everything, self.after, False),) for peer in group)
        target = local_box(self.reshard_step.target, self._shape, self.worker)
        taken = contributions if self.reduction else _as_one_addend
        return tuple(
            tuple(self._taken_box(pull.peer, pull.box, target) for pull in addend)
            for addend in taken(self.reshard_step, self._shape, self.worker)
        )

    def _holders(self) -> tuple[int, ...]:
        is_one_each = self.reduction and all(len(addend) == 1 for addend in self.addends)
        return tuple(addend[0].peer for addend in self.addends) if is_one_each else ()

    def _taken_box(self, peer: int, box: Box, target: Box) -> TakenBox:
        source = local_box(self.reshard_step.source, self._shape, peer)
        return TakenBox(peer, _within(source, box), _within(target, box), self.meta_of(box_shape(box)), source != box)

    def _gives(self) -> dict[int, tuple[Slices, TensorMeta]]:
        if self.before is None or not self.members:
            return {}
        if self.kind == "all-reduce":
            everything = tuple(slice(0, size) for size in self.before.shape)
            return {peer: (everything, self.before) for peer in self.members if peer != self.worker}
        own = local_box(self.reshard_step.source, self._shape, self.worker)
        return {
            push.peer: (_within(own, push.box), self.meta_of(box_shape(push.box)))
            for push in pushes(self.reshard_step, self._shape, self.worker)
        }

    def _received(self) -> dict[int, int]:
        if self.kind != "all-reduce":
            taken = [box for addend in self.addends for box in addend if box.peer in self.peers]
            return {box.peer: box.meta.nbytes for box in taken}
        itemsize = ITEM_BYTES[self.dtype]
        cuts = self.reduced_slices()
        size = {peer: itemsize * (stop - start) for peer, (start, stop) in zip(self.members, cuts, strict=True)}
        return {peer: size[self.worker] + size[peer] for peer in self.peers}

    def reduced_slices(self) -> Cuts:
        """Of an all-reduce: the interval of the flat part that each member reduces for the others."""
        assert self.after is not None
        return balanced_cuts(elements(self.after), (len(self.members),)) if self.members else ()

    @property
    def sent(self) -> dict[int, int]:
        """The bytes that the plan counts, by receiver."""
        if self.kind == "all-reduce":
            return self.received  # every member sends a slice and the total of its own one, as it receives them
        return {peer: meta.nbytes for peer, (_, meta) in self.gives.items()}

    # Values

    def combine(self, engine: Engine, boxes: Mapping[int, Value], *, owned: bool) -> Value:
        """This worker's part after the step, from the boxes that it takes, by peer. Boxes that are not `owned` are
        memory of others: the result has none of it."""
        assert self.after is not None
        if self.kind == "to-partial":
            start = self._identity(engine, self.reshard_step.target.kind)
            return self._assemble(engine, self.addends[0] if self.addends else (), boxes, start, owned=owned)
        if not self.reduction:
            return self._assemble(engine, self.addends[0] if self.addends else (), boxes, None, owned=owned)
        addends = [self._assemble(engine, addend, boxes, None, owned=True) for addend in self.addends]
        if not addends:
            return engine.empty(self.after)
        total = self.reduce(engine, addends)
        return total if owned or len(addends) > 1 else engine.copy(total)

    def reduce(self, engine: Engine, addends: Sequence[Value]) -> Value:
        """Reduce addends in their order; short floats are summed in a wider dtype."""
        dtype = self._total_dtype()
        operator = self._operators.get(engine)
        if operator is None:
            operator = self._operators[engine] = engine.resolve(_REDUCTIONS[self.reduction])
        if dtype == self.dtype:
            return functools.reduce(operator, addends)
        total = functools.reduce(operator, [_cast(engine, addend, dtype) for addend in addends])
        return _cast(engine, total, self.dtype)

    def reduce_into(self, engine: Engine, addends: Sequence[Value], target: Value) -> None:
        """Write the total of addends to existing memory: the first use of new memory costs more than a sum."""
        try:
            operator = engine.resolve(_REDUCTIONS[self.reduction].rpartition(".")[0] + ".out")
        except NotImplementedError:
            operator = None
        if operator is None or len(addends) < 2 or self._total_dtype() != self.dtype:
            target[...] = self.reduce(engine, addends)
            return
        operator(addends[0], addends[1], out=target)
        for addend in addends[2:]:
            operator(target, addend, out=target)

    def _total_dtype(self) -> str:
        return accumulation_dtype(self.dtype) if self.reduction in ("sum", "prod") else self.dtype

    def _assemble(
        self, engine: Engine, taken: Sequence[TakenBox], boxes: Mapping[int, Value], whole: Value | None, *, owned: bool
    ) -> Value:
        assert self.after is not None
        if owned and whole is None and len(taken) == 1 and taken[0].meta.shape == self.after.shape:
            return boxes[taken[0].peer]
        if whole is None:
            whole = engine.empty(self.after)
        for box in taken:
            whole[box.target] = boxes[box.peer]
        return whole

    def _identity(self, engine: Engine, kind: str) -> Value:
        assert self.after is not None
        size = engine.literal(ListArg(self.after.shape))
        full = engine.resolve("aten.full.default")
        return full(size, identity(kind, self.dtype), dtype=engine.literal(DType(self.dtype)))


def first_failure(values: Iterable[Value | FailedValue | None]) -> FailedValue | None:
    return next((value for value in values if isinstance(value, FailedValue)), None)


def elements(meta: TensorMeta) -> int:
    return box_elements(tuple((0, size) for size in meta.shape))


def _cast(engine: Engine, value: Value, dtype: str) -> Value:
    if engine.meta(value).dtype == dtype:
        return value
    return engine.resolve("aten._to_copy.default")(value, dtype=engine.literal(DType(dtype)))


def _within(outer: Box, inner: Box) -> Slices:
    """The slices of one box inside another one."""
    return tuple(slice(low - start, high - start) for (start, _), (low, high) in zip(outer, inner, strict=True))


def _as_one_addend(reshard_step: ReshardStep, shape: Shape, worker: int) -> tuple[tuple[Pull, ...], ...]:
    taken = pulls(reshard_step, shape, worker)
    return (taken,) if taken else ()
