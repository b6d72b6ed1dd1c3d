"""Cached calls: ops with given geometries and constants, which only need tensors and scalars to be emitted.

Everything in the `run` methods is a hot path.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from gt.client.interrupts import require_outside
from gt.client.storage import (
    CONJUGATE,
    NEGATE,
    Geometry,
    Storage,
    TensorRef,
    geometry_from_meta,
    reinterpreted,
    view_of,
)
from gt.client.torch_patches.dispatch import tree_leaves
from gt.client.torch_patches.tensors import make_handle, set_conjugated, set_metadata, set_negated
from gt.core.messages import Queried, QueryOp, RunOp
from gt.core.meta import TensorMeta
from gt.core.signatures import ViewStep

if TYPE_CHECKING:
    from gt.client.session import Session

HandleType: TypeAlias = type[torch.Tensor]
Rebuild: TypeAlias = Callable[[list[Any]], Any]
Returned: TypeAlias = Callable[[list[Any], tuple[Any, ...], dict[str, Any]], Any]
_is_inference_mode = torch.is_inference_mode_enabled
_thread_count = _thread._count  # threads that Python started, the main thread aside


def wrap(cls: HandleType, ref: TensorRef) -> torch.Tensor:
    """A handle: a torch tensor without bytes. Its device is "cpu", as that of the plain tensors it mixes with."""
    geometry = ref.geometry
    handle = make_handle(cls, geometry.shape, geometry.stride, geometry.offset, None, geometry.dtype)
    handle._ref = ref  # type: ignore[attr-defined]
    return handle


def wrap_view(cls: HandleType, ref: TensorRef) -> torch.Tensor:
    """A handle of a view, which may be conjugated or negated lazily. The value comes from the view's path; the handle
    also gets torch's two bits for this, so that `is_conj()` is true and torch copies the operand where it copies plain
    ones."""
    handle = wrap(cls, ref)
    lazy = reinterpreted(ref) if ref.path is not None else None
    if lazy:
        set_conjugated(handle, CONJUGATE in lazy)
        set_negated(handle, NEGATE in lazy)
    return handle


def is_normal_in_inference(tensor: torch.Tensor) -> bool:
    """Whether inference mode is on and a tensor was made outside of it. Autograd tracks the versions of its views, so
    their handles must be made outside of inference mode too."""
    return _is_inference_mode() and not tensor.is_inference()


class CachedCall(Protocol):
    """An op with given geometries and constants. `run` emits it for some tensors and scalars, and returns its
    results."""

    def run(
        self, cls: HandleType, session: Session, refs: list[TensorRef], scalars: list[Any], args: Any, kwargs: Any
    ) -> Any: ...


class SingleResultCall:
    """An op with one result, a new tensor. Nearly every op: its shape, strides and dtype are kept as attributes."""

    __slots__ = ("dtype", "geometry", "op_id", "random", "shape", "stride")

    def __init__(self, op_id: int, geometry: Geometry, random: bool) -> None:
        self.op_id = op_id
        self.geometry = geometry
        self.shape = geometry.shape
        self.stride = geometry.stride
        self.dtype = geometry.dtype
        self.random = random

    def run(
        self, cls: HandleType, session: Session, refs: list[TensorRef], scalars: list[Any], args: Any, kwargs: Any
    ) -> Any:
        if self.random:
            _take_key(scalars, args, kwargs)
        result = Storage(session, next(session.ids), self.geometry)
        scope = 0 if session.scope_resolver is None else session.scope_resolver.scope_id(refs, result)
        site = session.sites.current(3)
        if _thread_count() > session.quiet_threads or session.is_traced:
            outputs = (result.id,)
            session.outbox.submit(lambda ids: RunOp(self.op_id, ids, outputs, tuple(scalars), scope, site), refs)
        else:  # all other threads are GT's and make no ops: no lock, which costs a tenth of an op
            inputs = (refs[0].id, refs[1].id) if len(refs) == 2 else tuple([ref.id for ref in refs])
            session.outbox.emit(RunOp(self.op_id, inputs, (result.id,), tuple(scalars), scope, site))
        handle = make_handle(cls, self.shape, self.stride, None, None, self.dtype)
        handle._ref = result  # type: ignore[attr-defined]
        return handle


class MultiResultCall:
    """An op with several results, all new tensors."""

    __slots__ = ("geometries", "op_id", "random", "rebuild")

    def __init__(self, op_id: int, geometries: tuple[Geometry, ...], rebuild: Rebuild, random: bool) -> None:
        self.op_id = op_id
        self.geometries = geometries
        self.rebuild = rebuild
        self.random = random

    def run(
        self, cls: HandleType, session: Session, refs: list[TensorRef], scalars: list[Any], args: Any, kwargs: Any
    ) -> Any:
        if not self.geometries:  # every gradient is masked or undefined: there is nothing to compute
            return self.rebuild([])
        if self.random:
            _take_key(scalars, args, kwargs)
        results = [Storage(session, next(session.ids), geometry) for geometry in self.geometries]
        outputs = tuple([result.id for result in results])
        scope = 0 if session.scope_resolver is None else session.scope_resolver.scope_id(refs, *results)
        site = session.sites.current()
        session.outbox.submit(lambda ids: RunOp(self.op_id, ids, outputs, tuple(scalars), scope, site), refs)
        return self.rebuild([wrap(cls, result) for result in results])


class ViewCall:
    """An op whose results are views: no instruction is sent, each result is a storage and a path. `same`: the result is
    the input itself; `strided`: the results are plain strided memory of the storage; `lazy`: they may be conjugated or
    negated lazily."""

    __slots__ = ("geometries", "rebuild", "same", "steps", "strided", "wrap")

    def __init__(
        self,
        steps: tuple[ViewStep, ...],
        geometries: tuple[Geometry, ...],
        rebuild: Rebuild | None,
        same: bool,
        strided: bool,
        lazy: bool,
    ) -> None:
        self.steps = steps
        self.wrap = wrap_view if lazy else wrap
        self.geometries = geometries
        self.rebuild = rebuild
        self.same = same
        self.strided = strided

    def run(
        self, cls: HandleType, session: Session, refs: list[TensorRef], scalars: list[Any], args: Any, kwargs: Any
    ) -> Any:
        if is_normal_in_inference(args[0]):
            with torch.inference_mode(False):
                return self._views(cls, refs[0])
        return self._views(cls, refs[0])

    def _views(self, cls: HandleType, ref: TensorRef) -> Any:
        if self.same:
            return self.wrap(cls, ref)
        views = [
            self.wrap(cls, view_of(ref, (self, pick), step, geometry, self.strided))
            for pick, (step, geometry) in enumerate(zip(self.steps, self.geometries, strict=True))
        ]
        return views[0] if self.rebuild is None else self.rebuild(views)


class WriteCall:
    """An op that writes to some of its arguments. `writes`: their positions among the tensors of the call."""

    __slots__ = ("geometries", "op_id", "random", "returned", "writes")

    def __init__(
        self, op_id: int, geometries: tuple[Geometry, ...], writes: tuple[int, ...], returned: Returned, random: bool
    ) -> None:
        self.op_id = op_id
        self.geometries = geometries
        self.writes = writes
        self.returned = returned
        self.random = random

    def run(
        self, cls: HandleType, session: Session, refs: list[TensorRef], scalars: list[Any], args: Any, kwargs: Any
    ) -> Any:
        if self.random:
            _take_key(scalars, args, kwargs)
        results = [Storage(session, next(session.ids), geometry) for geometry in self.geometries]
        written = [refs[position].storage for position in self.writes]
        new_ids = [next(session.ids) for _ in written]
        outputs = (*[result.id for result in results], *new_ids)
        scope = 0 if session.scope_resolver is None else session.scope_resolver.scope_id(refs, *results)
        site = session.sites.current()
        session.outbox.submit(
            lambda ids: RunOp(self.op_id, ids, outputs, tuple(scalars), scope, site), refs, written, new_ids
        )
        return self.returned([wrap(cls, result) for result in results], args, kwargs or {})


class QueryCall:
    """An op whose results only a worker can tell: the call waits for its answer. `on_geometries` is called with the
    geometries of the results, None for a result that is no tensor."""

    __slots__ = ("on_geometries", "op_id", "random", "returned", "writes")

    def __init__(
        self,
        op_id: int,
        writes: tuple[int, ...],
        returned: Returned,
        random: bool,
        on_geometries: Callable[[list[Geometry | None]], None] | None = None,
    ) -> None:
        self.op_id = op_id
        self.on_geometries = on_geometries
        self.writes = writes
        self.returned = returned
        self.random = random

    def run(
        self, cls: HandleType, session: Session, refs: list[TensorRef], scalars: list[Any], args: Any, kwargs: Any
    ) -> Any:
        require_outside()  # before the query is queued
        session.require_values(f"the result of {session.signatures[self.op_id].op} depends on values")
        if self.random:
            _take_key(scalars, args, kwargs)
        written = [refs[position].storage for position in self.writes]
        new_ids = tuple([next(session.ids) for _ in written])
        request = next(session.ids)
        scope = 0 if session.scope_resolver is None else session.scope_resolver.scope_id(refs)
        site = session.sites.current()

        def build(ids: tuple[int, ...]) -> QueryOp:
            first = session.reserve_ids()  # the outbox's lock is held: the ids of a later query are higher
            return QueryOp(request, self.op_id, ids, new_ids, first, tuple(scalars), scope, site)

        query: QueryOp = session.outbox.submit(build, refs, written, new_ids)
        answer = session.read_query(request, site)
        for storage, meta in zip(written, answer.written, strict=True):
            _resize(storage, geometry_from_meta(meta), args, kwargs)
        if self.on_geometries is not None:
            self.on_geometries([geometry_from_meta(m) if isinstance(m, TensorMeta) else None for m in answer.results])
        returned = self.returned(_handles(cls, session, query.first, answer.results), args, kwargs or {})
        if after_query is not None:
            after_query(query, answer)
        return returned


def rebind(tensor: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """Make an existing handle refer to another tensor, shape included."""
    set_metadata(tensor, wrap_view(type(tensor), ref))
    tensor._ref = ref  # type: ignore[attr-defined]
    if isinstance(tensor, torch.nn.Parameter):
        ref.storage.is_parameter = True
    return tensor


def _resize(storage: Storage, geometry: Geometry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give a storage that an op has resized its new geometry, and the caller's handles of it too."""
    if geometry.shape == storage.geometry.shape:
        return
    storage.geometry = geometry
    for value in tree_leaves((args, kwargs)):
        if getattr(value, "_ref", None) is storage:
            rebind(value, storage)


def _handles(cls: HandleType, session: Session, first: int, results: Sequence[Any]) -> list[Any]:
    """Handles for the tensors of an answer, whose ids start at `first`; other values as they are."""
    values: list[Any] = []
    for result in results:
        if isinstance(result, TensorMeta):
            values.append(wrap(cls, Storage(session, first, geometry_from_meta(result))))
            first += 1
        else:
            values.append(result)
    return values


def _take_key(scalars: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    """Append the key of a random op, where `random_key` finds it. It is drawn from torch's generator on the client: so
    `torch.manual_seed`, a user's generator and the state that checkpointing saves have the effects that they have in
    torch."""
    generator = (kwargs or {}).get("generator")
    if generator is None:
        generator = next((a for a in args if isinstance(a, torch.Generator)), None)
    if before_draw is not None:
        before_draw(generator)
    scalars.append(int(torch.empty((), dtype=torch.int64).random_(generator=generator)))


before_draw: Callable[[torch.Generator | None], None] | None = None  # called with the generator of each key
# called with each query that was answered without an error, and the answer
after_query: Callable[[QueryOp, Queried], None] | None = None
