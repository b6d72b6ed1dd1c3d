"""The client's side of a tensor's storage: an SSA id that follows in-place writes, and the views of it.

A `Storage` stands for a storage; its id is the current version of the bytes. A `StorageView` is a base plus a path
of view ops and has no id of its own: an op that uses it names the base and the path, so a write through any alias is
seen by all of them. Tensors with the same bytes and the same geometry (`detach`, `.data`) share one node.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import msgspec
from torch import Size

from gt.client.geometry import Geometry, dtype_name, intern_geometry
from gt.core.signatures import DType, ListArg, ViewStep

# Views whose result is not the same strided memory: they change the reading of the bytes.
CONJUGATE, NEGATE = "aten._conj.default", "aten._neg_view.default"
REINTERPRETING = (CONJUGATE, NEGATE)

if TYPE_CHECKING:
    from gt.client.session import Session

# Beyond this many steps a path is replaced by one as_strided step, so that `x = x[1:]` in a loop stays cheap.
_LONGEST_PATH = 8


class ViewPath:
    """Steps from a base of one geometry to a view of one geometry. Interned by whoever extends it, so it is compared
    and hashed by identity, and stands for the geometry too."""

    __slots__ = ("children", "steps")

    def __init__(self, steps: tuple[ViewStep, ...]) -> None:
        self.steps = steps
        self.children: dict[object, ViewPath] = {}

    def extend(self, key: object, step: ViewStep) -> ViewPath:
        child = self.children.get(key)
        if child is None:
            child = self.children[key] = ViewPath((*self.steps, step))
        return child


ROOT = ViewPath(())


class Storage(msgspec.Struct, eq=False):
    """A struct because one is made for every op: making it takes a quarter of the time of a plain class.

    `key` is what an op's result may depend on: here the geometry, and for a view its path, which stands for it."""

    session: Session
    id: int
    geometry: Geometry
    is_parameter: bool = False
    path: ClassVar[ViewPath | None] = None
    key: ClassVar[Geometry]

    def __del__(self) -> None:
        self.session.release(self.id, self.geometry.nbytes)

    @property
    def base(self) -> Storage:
        return self


Storage.key = Storage.geometry  # the same slot by another name, which costs nothing to read


class StorageView:
    __slots__ = ("base", "geometry", "path")
    key: ClassVar[ViewPath]
    id = property(attrgetter("base.id"))

    def __init__(self, base: Storage, path: ViewPath, geometry: Geometry) -> None:
        self.base = base
        self.path: ViewPath | None = path
        self.geometry = geometry

    @property
    def session(self) -> Session:
        return self.base.session


StorageView.key = StorageView.path  # type: ignore[misc, assignment]
Node: TypeAlias = Storage | StorageView


def is_lazy(node: Node) -> bool:
    """Whether a view is conjugated or negated, which torch does when the view is used."""
    return bool(reinterpreted(node))


def reinterpreted(node: Node) -> list[str]:
    """Which of conjugation and negation are to be done when a view is used."""
    ops = [step.op for step in node.path.steps] if node.path is not None else []
    return [name for name in REINTERPRETING if ops.count(name) % 2]


def strided_view(base: Storage, geometry: Geometry) -> StorageView:
    """A view given by its place in the storage alone: the worker needs the strides that this place is counted in."""
    return StorageView(base, ROOT.extend((base.geometry, geometry), _strided_step(base.geometry, geometry)), geometry)


def _strided_step(source: Geometry, geometry: Geometry) -> ViewStep:
    args = (ListArg(tuple(geometry.shape)), ListArg(geometry.stride), geometry.offset)
    return ViewStep("aten.as_strided.default", args, {}, None, source.stride, (geometry.meta(),))


def restrided(node: Node, geometry: Geometry) -> StorageView:
    """A view of a node's storage at another place, counted in the dtype of the node. It is read as the node is: in the
    same dtype, and conjugated or negated where the node is."""
    base, path, source = node.base, ROOT, node.base.geometry
    if geometry.dtype is not source.dtype:
        count = storage_elements(node)
        flat = _flat(count * geometry.dtype.itemsize // source.dtype.itemsize, source)  # of whole elements of the dtype
        path = path.extend((source, flat), _strided_step(source, flat))
        source = _flat(count, geometry)
        step = ViewStep("aten.view.dtype", (DType(dtype_name(geometry.dtype)),), {}, results=(source.meta(),))
        path = path.extend((flat, source), step)
    path = path.extend((source, geometry), _strided_step(source, geometry))
    for name in reinterpreted(node):
        path = path.extend(name, ViewStep(name, (), {}, results=(geometry.meta(),)))
    return StorageView(base, path, geometry)


def _flat(elements: int, geometry: Geometry) -> Geometry:
    return intern_geometry(Size([elements]), (1,), 0, geometry.dtype)


def storage_elements(node: Node) -> int:
    """How many elements of a tensor's dtype its storage has."""
    base = node.base.geometry
    return base.span() * base.dtype.itemsize // node.geometry.dtype.itemsize


def view_of(node: Node, key: object, step: ViewStep, geometry: Geometry, strided: bool) -> StorageView:
    """The view that `step` makes of a node. `strided` says that the result is plain strided memory of its base."""
    path = node.path or ROOT
    if len(path.steps) >= _LONGEST_PATH and strided:
        return restrided(node, geometry)
    return StorageView(node.base, path.extend(key, step), geometry)
