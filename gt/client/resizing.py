"""Tensors that get another size: by `resize_`, or as `out=` of an op whose result has another size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from gt.client.cached_calls import HandleType, rebind, wrap
from gt.client.op_schema import OpSchema
from gt.client.storage import Geometry, Storage, TensorRef, intern_geometry, restrided, storage_elements, strided_view
from gt.client.torch_patches.dispatch import tree_leaves

if TYPE_CHECKING:
    from gt.client.session import Session


class ResizingCall:
    """An op that first gives tensors that it writes to other sizes; `geometries` by their positions among the tensors
    of the call. After that the call is an ordinary one."""

    __slots__ = ("geometries", "op")

    def __init__(self, op: OpSchema, geometries: dict[int, Geometry]) -> None:
        self.op = op
        self.geometries = geometries

    def run(
        self, cls: HandleType, session: Session, refs: Sequence[TensorRef], scalars: list[Any], args: Any, kwargs: Any
    ) -> Any:
        by_ref = {id(refs[position]): geometry for position, geometry in self.geometries.items()}
        for value in tree_leaves((args, kwargs or {})):
            geometry = by_ref.get(id(getattr(value, "_ref", None)))
            if geometry is not None:
                resize_handle(cls, value, geometry)
        return cls.__torch_dispatch__(self.op.func, (), args, kwargs or {})  # type: ignore[attr-defined]


def resize_handle(cls: HandleType, tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Make a handle view the same storage in another shape. Where that is too small, the handle gets a new storage that
    starts with the old bytes, and aliases keep the old one."""
    ref: TensorRef = tensor._ref  # type: ignore[attr-defined]
    if geometry is ref.geometry:
        return tensor
    if geometry.storage_span() <= storage_elements(ref):
        return rebind(tensor, restrided(ref, geometry))
    return rebind(tensor, grow(cls, ref, geometry))


def grow(cls: HandleType, ref: TensorRef, geometry: Geometry) -> TensorRef:
    """A tensor of a larger geometry in a new storage that starts with the bytes of a tensor's storage."""
    flat_old = intern_geometry(torch.Size([ref.storage.geometry.storage_span()]), (1,), 0, geometry.dtype)
    flat_new = intern_geometry(torch.Size([geometry.storage_span()]), (1,), 0, geometry.dtype)
    with torch.no_grad():
        grown = allocate(cls, flat_new if geometry.offset else geometry)
        if ref.storage.geometry.storage_span() and geometry.dtype is ref.storage.geometry.dtype:
            old = wrap(cls, strided_view(ref.storage, flat_old))
            wrap(cls, strided_view(grown, flat_old)).copy_(old)
    return restrided(grown, geometry) if geometry.offset else grown


def allocate(cls: HandleType, geometry: Geometry) -> Storage:
    """A new storage without values."""
    handle = cls.__torch_dispatch__(  # type: ignore[attr-defined]
        torch.ops.aten.empty_strided.default,
        (),
        (list(geometry.shape), list(geometry.stride)),
        {"dtype": geometry.dtype},
    )
    storage: Storage = handle._ref
    return storage
