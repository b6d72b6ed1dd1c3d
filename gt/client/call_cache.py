"""What is remembered of an op for given shapes: how to emit it and what it returns."""

from __future__ import annotations

import _thread
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from gt.client.geometry import Geometry, geometry_from_meta
from gt.client.storage import CONJUGATE, NEGATE, Node, Storage, reinterpreted, view_of
from gt.client.torch_patches.handles import make_handle, set_conjugated, set_metadata, set_negated
from gt.client.torch_patches.pytree import tree_leaves
from gt.core.messages import QueryOp, RunOp
from gt.core.meta import TensorMeta
from gt.core.signatures import ViewStep

if TYPE_CHECKING:
    from gt.client.session import Session

HandleType: TypeAlias = type[torch.Tensor]
Rebuild: TypeAlias = Callable[[list[Any]], Any]
Returned: TypeAlias = Callable[[list[Any], tuple[Any, ...], dict[str, Any]], Any]
_id_of = attrgetter("id")
_other_threads = _thread._count  # that Python started; only such a thread could start another one meanwhile


def wrap(cls: HandleType, node: Node) -> torch.Tensor:
    """A handle for a node: a torch tensor without bytes. It says "cpu", as the plain tensors it mixes with do."""
    geometry = node.geometry
    handle = make_handle(cls, geometry.shape, geometry.stride, geometry.offset, None, geometry.dtype)
    handle._node = node  # type: ignore[attr-defined]
    return handle


def wrap_view(cls: HandleType, node: Node) -> torch.Tensor:
    """A handle for a node that may be conjugated or negated lazily, of which torch knows by two bits of a tensor. The
    path gives the value; by the bits `is_conj()` is true, and torch copies such an operand where it would copy a plain
    one."""
    handle = wrap(cls, node)
    lazy = reinterpreted(node) if node.path is not None else None
    if lazy:
        set_conjugated(handle, CONJUGATE in lazy)
        set_negated(handle, NEGATE in lazy)
    return handle


class CachedCall(Protocol):
    def run(
        self, cls: HandleType, session: Session, nodes: list[Node], numbers: list[Any], args: Any, kwargs: Any
    ) -> Any: ...


class SingleResultCall:
    """An op with one result, a new tensor: nearly every op, so everything that can be prepared is."""

    __slots__ = ("code", "dtype", "geometry", "random", "shape", "stride")

    def __init__(self, code: int, geometry: Geometry, random: bool) -> None:
        self.code = code
        self.geometry = geometry
        self.shape = geometry.shape
        self.stride = geometry.stride
        self.dtype = geometry.dtype
        self.random = random

    def run(
        self, cls: HandleType, session: Session, nodes: list[Node], numbers: list[Any], args: Any, kwargs: Any
    ) -> Any:
        if self.random:
            numbers.append(draw_key(args, kwargs))
        result = Storage(session, next(session.ids), self.geometry)
        scope = 0 if session.scoping is None else session.scoping.of(nodes, self.geometry)
        site = session.sites.here(3)
        if _other_threads() > 1:
            with session.lock:
                inputs = tuple([node.id for node in nodes])
                session.enqueue(RunOp(self.code, inputs, (result.id,), tuple(numbers), scope, site))
            session.emitted()
        else:  # no thread but the one that flushes: the lock would take a tenth of the whole
            inputs = (nodes[0].id, nodes[1].id) if len(nodes) == 2 else tuple([node.id for node in nodes])
            session.emit(RunOp(self.code, inputs, (result.id,), tuple(numbers), scope, site))
        handle = make_handle(cls, self.shape, self.stride, None, None, self.dtype)
        handle._node = result  # type: ignore[attr-defined]
        return handle


class PlainCall:
    """An op with several results, all new tensors."""

    __slots__ = ("code", "outputs", "random", "rebuild")

    def __init__(self, code: int, outputs: tuple[Geometry, ...], rebuild: Rebuild, random: bool) -> None:
        self.code = code
        self.outputs = outputs
        self.rebuild = rebuild
        self.random = random

    def run(
        self, cls: HandleType, session: Session, nodes: list[Node], numbers: list[Any], args: Any, kwargs: Any
    ) -> Any:
        if self.random:
            numbers.append(draw_key(args, kwargs))
        results = [Storage(session, next(session.ids), geometry) for geometry in self.outputs]
        outputs = tuple([result.id for result in results])
        scope = 0 if session.scoping is None else session.scoping.of(nodes, None)
        site = session.sites.here()
        with session.lock:
            session.enqueue(RunOp(self.code, tuple(map(_id_of, nodes)), outputs, tuple(numbers), scope, site))
        session.emitted()
        return self.rebuild([wrap(cls, result) for result in results])


class ViewCall:
    """An op whose results are views: nothing is sent, the result is a path."""

    __slots__ = ("outputs", "rebuild", "same", "steps", "strided", "wrap")

    def __init__(
        self,
        steps: tuple[ViewStep, ...],
        outputs: tuple[Geometry, ...],
        rebuild: Rebuild | None,
        same: bool,
        strided: bool,
        lazy: bool,
    ) -> None:
        self.steps = steps
        self.wrap = wrap_view if lazy else wrap
        self.outputs = outputs
        self.rebuild = rebuild
        self.same = same
        self.strided = strided

    def run(
        self, cls: HandleType, session: Session, nodes: list[Node], numbers: list[Any], args: Any, kwargs: Any
    ) -> Any:
        node = nodes[0]
        if self.same:
            return self.wrap(cls, node)
        views = [
            self.wrap(cls, view_of(node, (self, pick), step, geometry, self.strided))
            for pick, (step, geometry) in enumerate(zip(self.steps, self.outputs, strict=True))
        ]
        return views[0] if self.rebuild is None else self.rebuild(views)


class WriteCall:
    """An op that overwrites some of its arguments: `writes` are their places among the tensors of the call."""

    __slots__ = ("code", "outputs", "random", "returned", "writes")

    def __init__(
        self, code: int, outputs: tuple[Geometry, ...], writes: tuple[int, ...], returned: Returned, random: bool
    ) -> None:
        self.code = code
        self.outputs = outputs
        self.writes = writes
        self.returned = returned
        self.random = random

    def run(
        self, cls: HandleType, session: Session, nodes: list[Node], numbers: list[Any], args: Any, kwargs: Any
    ) -> Any:
        if self.random:
            numbers.append(draw_key(args, kwargs))
        results = [Storage(session, next(session.ids), geometry) for geometry in self.outputs]
        written = [nodes[place].base for place in self.writes]
        renewed = [next(session.ids) for _ in written]
        outputs = (*[result.id for result in results], *renewed)
        scope = 0 if session.scoping is None else session.scoping.of(nodes, None)
        site = session.sites.here()
        with session.lock:
            inputs = tuple(map(_id_of, nodes))
            _write(session, RunOp(self.code, inputs, outputs, tuple(numbers), scope, site), written, renewed)
        session.emitted()
        return self.returned([wrap(cls, result) for result in results], args, kwargs or {})


class QueryCall:
    """An op whose results only a worker can tell: the call waits for the answer."""

    __slots__ = ("code", "learn", "random", "returned", "writes")

    def __init__(
        self,
        code: int,
        writes: tuple[int, ...],
        returned: Returned,
        random: bool,
        learn: Callable[[list[Geometry | None]], None] | None = None,
    ) -> None:
        self.code = code
        self.learn = learn
        self.writes = writes
        self.returned = returned
        self.random = random

    def run(
        self, cls: HandleType, session: Session, nodes: list[Node], numbers: list[Any], args: Any, kwargs: Any
    ) -> Any:
        if self.random:
            numbers.append(draw_key(args, kwargs))
        written = [nodes[place].base for place in self.writes]
        renewed = tuple([next(session.ids) for _ in written])
        request = next(session.ids)
        scope = 0 if session.scoping is None else session.scoping.of(nodes, None)
        site = session.sites.here()
        with session.lock:
            inputs = tuple(map(_id_of, nodes))
            first = session.reserve_ids()  # under the lock: the ids of a later query are higher
            query = QueryOp(request, self.code, inputs, renewed, first, tuple(numbers), scope, site)
            _write(session, query, written, renewed)
        answer = session.ask(request)
        for base, meta in zip(written, answer.written, strict=True):
            _resized(base, geometry_from_meta(meta), args, kwargs)
        if self.learn is not None:
            self.learn([geometry_from_meta(m) if isinstance(m, TensorMeta) else None for m in answer.results])
        return self.returned(_handles(cls, session, first, answer.results), args, kwargs or {})


def _write(session: Session, op: RunOp | QueryOp, written: Sequence[Storage], renewed: Sequence[int]) -> None:
    """Emit an op that consumes the ids of what it writes, with the session's lock held. An interrupt may come at any
    point of this: tensors get their new ids if and only if the op is in the queue."""
    before = [base.id for base in written]
    try:
        for base, ident in zip(written, renewed, strict=True):
            base.id = ident
        session.enqueue(op)
    except BaseException:
        queue = session.outbox.queue
        if not queue or queue[-1] is not op:
            for base, ident in zip(written, before, strict=True):
                base.id = ident
        raise


def rebind(tensor: torch.Tensor, node: Node) -> torch.Tensor:
    """Make an existing handle stand for another node, shape included."""
    set_metadata(tensor, wrap_view(type(tensor), node))
    tensor._node = node  # type: ignore[attr-defined]
    if isinstance(tensor, torch.nn.Parameter):
        node.base.is_parameter = True
    return tensor


def _resized(base: Storage, geometry: Geometry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An op has resized a tensor that it wrote to; the caller's handles of it show that."""
    if geometry.shape == base.geometry.shape:
        return
    base.geometry = geometry
    for value in tree_leaves((args, kwargs)):
        if getattr(value, "_node", None) is base:
            rebind(value, base)


def _handles(cls: HandleType, session: Session, first: int, results: Sequence[Any]) -> list[Any]:
    """Handles for the tensors of an answer, which took the ids from `first` on; other values as they are."""
    values: list[Any] = []
    for result in results:
        if isinstance(result, TensorMeta):
            values.append(wrap(cls, Storage(session, first, geometry_from_meta(result))))
            first += 1
        else:
            values.append(result)
    return values


def draw_key(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> int:
    """The key of a random op, drawn from torch's generator on the client: so `torch.manual_seed`, a user's generator
    and the state that checkpointing saves and restores all mean what they mean in torch."""
    generator = (kwargs or {}).get("generator")
    if generator is None:
        generator = next((a for a in args if isinstance(a, torch.Generator)), None)
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))
