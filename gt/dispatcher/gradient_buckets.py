"""Gradients of parameters, moved into the layouts of their parameters together: one exchange for each bucket.

A gradient of a parameter that several workers hold is partial where the batch is cut. It stays partial until its value
is needed, and is then reduced with others that are waiting. A gradient that is freed before is never reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gt.core.ids import session_of
from gt.core.messages import NoteGradient
from gt.core.meta import TensorMeta
from gt.dispatcher.plan_cache import PlanCache
from gt.dispatcher.planner import TensorMove
from gt.dispatcher.redistribution import Redistributor
from gt.dispatcher.state import State
from gt.dispatcher.state_records import SessionRecord
from gt.dispatcher.tensor_records import GradientRecord, TensorRecord
from gt.sharding.spec import DimSpec, ShardingSpec, whole
from gt.wire.codec import Buffer

BUCKET_BYTES = 4 << 20  # a bucket is full when a worker's parts have this size
CUT_BUCKET_BYTES = 1 << 20  # the same for cut parameters: their partial gradients are larger than the reduced parts
MAX_TENSORS = 512  # tensors of a bucket: its program has one step for each
MAX_PLANS = 64  # plans of a session's buckets: a program whose gradients differ from step to step needs ever new plans


class GradientBuckets:
    """Collects the partial gradients of parameters, and reduces them bucket by bucket."""

    def __init__(self, state: State, redistributor: Redistributor, plan_cache: PlanCache) -> None:
        self._state = state
        self._redistributor = redistributor
        self._plan_cache = plan_cache

    def note(self, session: SessionRecord, note: NoteGradient, _: Buffer | None) -> None:
        """Let a partial gradient wait for others. A full bucket is reduced immediately if the parameters are cut, since
        their gradients take more memory than the reduced parts, or if the exchange goes on while backward does and the
        session does not add up gradients. Added gradients are reduced once, at the end."""
        state = self._state
        gradient, parameter = state.tensors.get(note.gradient), state.tensors.get(note.parameter)
        if gradient is None or parameter is None:
            for ident in (note.gradient, note.parameter):
                state.meta(ident)  # raises for an unknown id
            return
        target = layout_of_gradient(gradient.meta, parameter, is_transposed=note.is_transposed)
        if not gradient.spec.partial or target is None or target.mesh is not gradient.spec.mesh:
            return
        move = TensorMove(gradient.meta, gradient.spec, target)
        state.note_gradient(note.gradient, GradientRecord(move, move.exchange, gradient.nbytes))
        is_cut = bool(set(target.axes).intersection(gradient.spec.partial))
        if is_cut or (not session.accumulates and state.overlaps(target.mesh)):
            same = self._waiting_with(note.gradient)
            limit = CUT_BUCKET_BYTES if is_cut else BUCKET_BYTES
            if _is_full([state.gradients[ident].nbytes for ident in same], limit):
                self._move(session, [(ident, state.gradients[ident].move) for ident in same], "backward", note.site)

    def reduce(self, session: SessionRecord, idents: Iterable[int], op: str, site: int) -> bool:
        """Reduce the waiting gradients among some tensors, each with as many of its neighbours in the order of backward
        as a bucket takes. Returns whether any gradient was waiting."""
        needed = [ident for ident in idents if self._state.is_waiting(ident)]
        for ident in needed:
            if self._state.is_waiting(ident):
                bucket = self._bucket_around(ident)
                self._move(session, [(member, self._state.gradients[member].move) for member in bucket], op, site)
        return bool(needed)

    def before_write(self, session: SessionRecord, inputs: Sequence[int], target: int, site: int) -> None:
        """Make a reduced gradient of a whole parameter partial again, if autograd adds a partial one to it: the sum is
        reduced once, with others. Nothing is exchanged."""
        state, tensor, move = self._state, self._state.tensors[target], self._state.gradients[target].move
        others = [state.tensors.get(ident) for ident in inputs if ident != target]
        is_sum = len(others) == 1 and others[0] is not None and others[0][:2] == (move.meta, move.source)
        if is_sum and tensor.spec is move.target and move.target.is_whole:
            state.note_accumulation(session)
            self._redistributor.move(session, tensor, target, target, move.source, "backward", site)
            state.set_layout(target, move.source)

    def move_into(
        self, session: SessionRecord, targets: Sequence[tuple[int, ShardingSpec]], op: str, site: int
    ) -> list[int]:
        """Move gradients into layouts, in full buckets. Returns the ids under which they have these layouts."""
        state = self._state
        by_exchange: dict[tuple[object, ...], list[tuple[int, TensorMove]]] = {}
        in_use = {copy for ident, target in targets if (copy := state.use_copy(ident, target)) is not None}
        for ident, target in dict(targets).items():
            tensor = state.tensor(ident)
            if tensor.spec is not target and target not in state.copies.get(ident, {}):
                move = TensorMove(tensor.meta, tensor.spec, target)
                by_exchange.setdefault(move.exchange, []).append((ident, move))
        for moves in by_exchange.values():
            for bucket in self._buckets(moves):
                self._move(session, bucket, op, site, in_use)
                in_use.update(state.copies.get(ident, {}).get(move.target, ident) for ident, move in bucket)
        return [state.copies.get(ident, {}).get(target, ident) for ident, target in targets]

    def _buckets(self, moves: Sequence[tuple[int, TensorMove]]) -> Iterator[list[tuple[int, TensorMove]]]:
        bucket: list[tuple[int, TensorMove]] = []
        for ident, move in moves:
            bucket.append((ident, move))
            if _is_full([self._state.tensors[member].nbytes for member, _ in bucket], BUCKET_BYTES):
                yield bucket
                bucket = []
        if bucket:
            yield bucket

    def _waiting_with(self, ident: int) -> list[int]:
        """The waiting gradients that may share an exchange with one of them, which is included."""
        gradients, session = self._state.gradients, session_of(ident)
        exchange = gradients[ident].exchange
        return [
            other
            for other, gradient in gradients.items()
            if gradient.exchange == exchange and self._state.is_waiting(other) and session_of(other) == session
        ]

    def _bucket_around(self, ident: int) -> list[int]:
        """The bucket of a waiting gradient: first those before it in the order of backward, then those after it."""
        same = self._waiting_with(ident)
        position = same.index(ident)
        bucket: list[int] = []
        sizes: list[int] = []
        for member in (*reversed(same[: position + 1]), *same[position + 1 :]):
            bucket.append(member)
            sizes.append(self._state.gradients[member].nbytes)
            if _is_full(sizes, BUCKET_BYTES):
                break
        return bucket

    def _move(
        self,
        session: SessionRecord,
        bucket: Sequence[tuple[int, TensorMove]],
        op: str,
        site: int,
        in_use: Iterable[int] = (),
    ) -> None:
        """Move gradients in one exchange. On the same mesh a moved gradient replaces the original, because a fused
        optimizer writes to gradients and so would not use a copy; on another mesh it is a copy. To make room for it,
        copies that are not `in_use` may be dropped."""
        state = self._state
        kept = set(in_use)
        self._limit_plans(session, tuple([move for _, move in bucket]))
        is_replaced = bucket[0][1].source.mesh is bucket[0][1].target.mesh
        for ident, move in () if is_replaced else bucket:
            self._redistributor.make_room(session, state.tensor(ident), move.target, kept)
        moves = [(ident, ident if is_replaced else state.new_id(session), move) for ident, move in bucket]
        self._redistributor.move_together(session, moves, op, site)
        for ident, moved, move in moves:
            if moved == ident:
                state.set_layout(ident, move.target)
            else:
                state.add_copy(ident, move.target, moved)

    def _limit_plans(self, session: SessionRecord, moves: tuple[TensorMove, ...]) -> None:
        """Forget the plans of all buckets if another one is too many."""
        if len(moves) < 2 or moves in session.move_plans:
            return
        buckets = [key for key in session.move_plans if len(key) > 1]
        if len(buckets) >= MAX_PLANS:
            self._plan_cache.forget(session, self._state.forget_moves(session, buckets))


def layout_of_gradient(
    gradient: TensorMeta, parameter: TensorRecord, *, is_transposed: bool = False
) -> ShardingSpec | None:
    """The layout of a parameter for the storage of its gradient, which may have its dims in reverse order, other dims
    of one element, or any shape if the parameter is whole; None if the parameter's layout does not apply."""
    spec, shape = parameter.spec, parameter.meta.shape
    if spec.partial or not spec.is_partition(shape):
        return None
    if spec.is_whole:
        return whole(spec.mesh, len(gradient.shape))
    if is_transposed:
        spec, shape = spec.replace(dims=spec.dims[::-1], cuts=spec.cuts[::-1]), shape[::-1]
    if gradient.shape == shape:
        return spec
    sizes = [size for size in gradient.shape if size > 1]
    cut = [(axes, cuts, size) for axes, cuts, size in zip(spec.dims, spec.cuts, shape, strict=True)]
    if sizes != [size for _, _, size in cut if size > 1] or any(axes for axes, _, size in cut if size == 1):
        return None
    own = iter([(axes, cuts) for axes, cuts, size in cut if size > 1])
    none: tuple[DimSpec, None] = ((), None)
    dims = [next(own) if size > 1 else none for size in gradient.shape]
    return ShardingSpec(spec.mesh, [axes for axes, _ in dims], (), "sum", [cuts for _, cuts in dims])


def _is_full(sizes: Sequence[int], limit: int) -> bool:
    return sum(sizes) >= limit or len(sizes) >= MAX_TENSORS
