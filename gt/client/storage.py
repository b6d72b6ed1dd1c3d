"""The client's record of a tensor's storage and of the views of it.

A `Storage` has an SSA id, the current version of its bytes: an in-place write gives it a new one. A `StorageView` is a
storage plus a path of view ops and has no own id: an op that uses it names the storage and the path, so all
aliases see a write through any of them. A handle refers to either (`TensorRef`); handles with the same bytes and the
same geometry (`detach`, `.data`) share one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, TypeAlias
from weakref import WeakValueDictionary
from weakref import ref as WeakRef  # noqa: N812

import msgspec
import torch
from torch import Size

from gt.core.meta import ITEM_BYTES, TensorMeta, contiguous_strides
from gt.core.signatures import DType, ListArg, ViewStep

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    if dtype not in DTYPE_NAMES:
        raise TypeError(f"GT has no tensors of {dtype}; it has {', '.join(TORCH_DTYPES)}")
    return DTYPE_NAMES[dtype]


class Geometry:
    """The shape, strides, offset and dtype of tensors. Equal ones are one object, compared and hashed by identity.

    That holds within a session. A tensor of an ended session never matches a cached call of a new one, so that the call
    is inferred, which raises.

    `family` is equal for tensors of the same rank and dtype that have empty dims and dims of one element in the same
    places, and are both row-major or both not.
    """

    __slots__ = ("__weakref__", "dtype", "family", "nbytes", "offset", "row_major", "shape", "stride")

    def __init__(self, shape: torch.Size, stride: tuple[int, ...], offset: int, dtype: torch.dtype) -> None:
        self.shape = shape
        self.stride = stride
        self.offset = offset
        self.dtype = dtype
        self.nbytes = math.prod(shape) * dtype.itemsize
        self.row_major = contiguous_strides(shape)
        self.family = (dtype, tuple([min(size, 2) for size in shape]), stride == self.row_major)

    def __repr__(self) -> str:
        return f"{DTYPE_NAMES[self.dtype]}{list(self.shape)}"

    def meta(self) -> TensorMeta:
        return TensorMeta(tuple(self.shape), self.stride, self.offset, dtype_name(self.dtype))

    def storage_span(self) -> int:
        """The number of elements from the start of the storage to the last one of the tensor."""
        if 0 in self.shape:
            return self.offset
        return self.offset + 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def on_meta(self) -> torch.Tensor:
        """A tensor without bytes of this geometry, for torch's shape functions."""
        storage = torch.empty(self.storage_span(), dtype=self.dtype, device="meta")
        return storage.as_strided(self.shape, self.stride, self.offset)


_Key = tuple[torch.Size, tuple[int, ...], int, torch.dtype]
_interned: WeakValueDictionary[_Key, Geometry] = WeakValueDictionary()


def forget_geometries() -> None:
    """Called when a session begins."""
    _interned.clear()


def geometry_of(tensor: torch.Tensor) -> Geometry:
    return intern_geometry(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


def geometry_from_meta(meta: TensorMeta) -> Geometry:
    return intern_geometry(torch.Size(meta.shape), meta.stride, meta.offset, TORCH_DTYPES[meta.dtype])


def intern_geometry(shape: torch.Size, stride: tuple[int, ...], offset: int, dtype: torch.dtype) -> Geometry:
    key = (shape, stride, offset, dtype)
    found = _interned.get(key)
    if found is None:
        found = _interned[key] = Geometry(shape, stride, offset, dtype)
    return found


# Views whose result is not the same strided memory: they change the reading of the bytes.
CONJUGATE, NEGATE = "aten._conj.default", "aten._neg_view.default"
REINTERPRETING = (CONJUGATE, NEGATE)

if TYPE_CHECKING:
    from gt.client.session import Session

# Beyond this many steps a path is replaced by one as_strided step, so that `x = x[1:]` in a loop stays cheap.
_MAX_STEPS = 8


class ViewPath:
    """View ops from a storage of one geometry to a view of one geometry. `extend` interns paths, so they are compared
    and hashed by identity, and a path implies the geometry of the view."""

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


class Storage(msgspec.Struct, eq=False, weakref=True):
    """The bytes of tensors on workers. A struct is made in a quarter of the time of a plain class, for every op.

    `key` is the tensor's part of a cached call's key: here the geometry, and for a view its path. `derived` are the
    tensors that were computed of a parameter alone, such as its cast to another dtype; they have the same list."""

    session: Session
    id: int
    geometry: Geometry
    is_parameter: bool = False
    derived: list[WeakRef[Storage]] | None = None
    path: ClassVar[ViewPath | None] = None
    key: ClassVar[Geometry]

    @property
    def storage(self) -> Storage:
        return self

    def live_derived(self) -> list[Storage]:
        return [storage for each in self.derived or () if (storage := each()) is not None]


Storage.key = Storage.geometry  # the same slot by another name, which costs nothing to read


def collect_into(collected: deque[Storage]) -> None:
    """Append storages that are no longer referenced to a deque, in place of the one before.

    The finalizer is a C function: Python drops exceptions that are raised in finalizers, and so would lose a Ctrl-C
    that comes while a finalizer runs Python code. `lru_cache` without a cache calls the method of the deque with the
    storage, and is a descriptor in C. A storage is finalized once, so it is freed when it leaves the deque.
    """
    Storage.__del__ = lru_cache(maxsize=0)(collected.append)  # type: ignore[attr-defined]


def is_collected_into(collected: deque[Storage]) -> bool:
    return Storage.__del__.__wrapped__.__self__ is collected  # type: ignore[attr-defined, no-any-return]


def note_derived(refs: Sequence[TensorRef], results: Sequence[Storage]) -> None:
    """Note the results of an op on parameters alone with the first parameter."""
    storages = [ref.storage for ref in refs]
    owner = next((each for each in storages if each.is_parameter or each.derived is not None), None)
    if owner is not None:
        live = [] if owner.derived is None else owner.derived
        live[:] = [each for each in live if each() is not None]
        live.extend(map(WeakRef, results))
        for storage in (owner, *results):
            storage.derived = live


class StorageView:
    """A view of a storage, given by its path."""

    __slots__ = ("geometry", "path", "storage")
    key: ClassVar[ViewPath]
    id = property(attrgetter("storage.id"))

    def __init__(self, storage: Storage, path: ViewPath, geometry: Geometry) -> None:
        self.storage = storage
        self.path: ViewPath | None = path
        self.geometry = geometry

    @property
    def session(self) -> Session:
        return self.storage.session


StorageView.key = StorageView.path  # type: ignore[misc, assignment]
TensorRef: TypeAlias = Storage | StorageView


def is_lazy(ref: TensorRef) -> bool:
    """Whether a view is conjugated or negated lazily: when it is used."""
    return bool(reinterpreted(ref))


def reinterpreted(ref: TensorRef) -> list[str]:
    """The ops among conjugation and negation that apply when a view is used."""
    ops = [step.op for step in ref.path.steps] if ref.path is not None else []
    return [name for name in REINTERPRETING if ops.count(name) % 2]


def strided_view(storage: Storage, geometry: Geometry) -> StorageView:
    """A view given by its strides in the storage alone."""
    step = _strided_step(storage.geometry, geometry)
    return StorageView(storage, ROOT.extend((storage.geometry, geometry), step), geometry)


def _strided_step(source: Geometry, geometry: Geometry) -> ViewStep:
    args = (ListArg(tuple(geometry.shape)), ListArg(geometry.stride), geometry.offset)
    return ViewStep("aten.as_strided.default", args, {}, None, source.stride, (geometry.meta(),))


def restrided(ref: TensorRef, geometry: Geometry) -> StorageView:
    """Another view of a tensor's storage, with strides in elements of the tensor's dtype. It is read as the tensor is:
    in the same dtype, and conjugated or negated if the tensor is."""
    storage, path, source = ref.storage, ROOT, ref.storage.geometry
    if geometry.dtype is not source.dtype:
        count = storage_elements(ref)
        flat = _flat(count * geometry.dtype.itemsize // source.dtype.itemsize, source)  # whole elements of the dtype
        path = path.extend((source, flat), _strided_step(source, flat))
        source = _flat(count, geometry)
        step = ViewStep("aten.view.dtype", (DType(dtype_name(geometry.dtype)),), {}, results=(source.meta(),))
        path = path.extend((flat, source), step)
    path = path.extend((source, geometry), _strided_step(source, geometry))
    for name in reinterpreted(ref):
        path = path.extend(name, ViewStep(name, (), {}, results=(geometry.meta(),)))
    return StorageView(storage, path, geometry)


def _flat(elements: int, geometry: Geometry) -> Geometry:
    return intern_geometry(Size([elements]), (1,), 0, geometry.dtype)


def storage_elements(ref: TensorRef) -> int:
    """The size of a tensor's storage in elements of the tensor's dtype."""
    storage = ref.storage.geometry
    return storage.storage_span() * storage.dtype.itemsize // ref.geometry.dtype.itemsize


def view_of(ref: TensorRef, key: object, step: ViewStep, geometry: Geometry, strided: bool) -> StorageView:
    """The view that `step` makes of a tensor. `strided`: the result is plain strided memory of its storage."""
    path = ref.path or ROOT
    if len(path.steps) >= _MAX_STEPS and strided:
        return restrided(ref, geometry)
    return StorageView(ref.storage, path.extend(key, step), geometry)
