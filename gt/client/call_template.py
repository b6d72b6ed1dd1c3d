"""The arguments of a call in wire form, and the signature that they make with the geometries of its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gt.client.op_schema import ArgumentKind, OpSchema
from gt.client.storage import Geometry, TensorRef, dtype_name
from gt.core.signatures import (
    Arg,
    Complex,
    DType,
    Input,
    ListArg,
    MemoryFormat,
    Scalar,
    Signature,
    TorchLayout,
    WorkerDevice,
)
from gt.sharding.placements import OpRequest

LIST_KINDS = (ArgumentKind.TENSORS, ArgumentKind.TARGETS, ArgumentKind.TARGETS_OR_COPIES)


class CallTemplate:
    """The arguments of a call in wire form, with placeholders for its tensors and scalars, numbered in the order in
    which `dispatch` sorts arguments: the n-th placeholder is the n-th tensor or scalar of every such call."""

    def __init__(
        self,
        op: OpSchema,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        refs: Sequence[TensorRef] = (),
        request: OpRequest | None = None,
    ) -> None:
        self.random = op.draws(args, kwargs)
        self._request = request or OpRequest()
        self._tensors = 0
        self._scalars = 0
        self._written: list[int] = []
        pairs = zip(op.kinds, args, strict=False)
        self.args: tuple[Arg, ...] = tuple(self._argument(kind, value) for kind, value in pairs)
        kinds = op.kwarg_kinds
        self.kwargs: dict[str, Arg] = {
            name: self._argument(kinds[name], value)
            for name, value in kwargs.items()
            if kinds[name] not in (ArgumentKind.IGNORED, ArgumentKind.GENERATOR)
        }
        if "device" in kinds and "device" not in kwargs and self._tensors == 0:
            self.kwargs["device"] = WorkerDevice()
        self.paths = tuple(ref.path.steps if ref.path is not None else () for ref in refs)
        first_of = {id(refs[position].storage): position for position in reversed(self._written)}
        self.writes = tuple(reversed(first_of.values()))  # one input for each storage that is written
        is_whole = op.writes_all and all(refs[position].path is None for position in self.writes)
        self.fully_written = tuple([refs[position].geometry.meta() for position in self.writes]) if is_whole else ()

    def signature(self, op: OpSchema, outputs: Sequence[Geometry | None]) -> Signature:
        """The signature of the call. `outputs` are the geometries of its results, none if only a worker can tell
        them."""
        metas = tuple(output.meta() for output in outputs if output is not None)
        positions = tuple(position for position, output in enumerate(outputs) if output is not None)
        default_dtype = dtype_name(torch.get_default_dtype())
        layout, algorithm, _ = self._request
        spec = layout.spec(metas[0]) if layout is not None and metas else None
        return Signature(
            op.name,
            self.args,
            self.kwargs,
            self.paths,
            self.writes,
            metas,
            positions,
            self.random,
            default_dtype,
            op.functional,
            None if spec is None else spec.record(),
            self.fully_written,
            algorithm,
        )

    def _argument(self, kind: ArgumentKind, value: Any) -> Arg:
        """An argument in wire form."""
        if kind in LIST_KINDS and value is not None:
            inner = ArgumentKind.TENSOR if kind is ArgumentKind.TENSORS else ArgumentKind.TARGET
            return ListArg(tuple(self._argument(inner, item) for item in value))
        if isinstance(value, torch.Tensor):
            if kind is ArgumentKind.TARGET:
                self._written.append(self._tensors)
            self._tensors += 1
            return Input(self._tensors - 1)
        if kind is ArgumentKind.SCALARS and value is not None:
            return ListArg(tuple(self._scalar() for _ in value))
        if kind in (ArgumentKind.SCALAR, ArgumentKind.TENSOR) and type(value) in (float, int, bool):
            return self._scalar()
        return (
            WorkerDevice()
            if kind is ArgumentKind.DEVICE
            else None
            if kind is ArgumentKind.GENERATOR
            else to_wire(value)
        )

    def _scalar(self) -> Scalar:
        self._scalars += 1
        return Scalar(self._scalars - 1)


def to_wire(value: Any) -> Arg:
    """A constant argument in wire form."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return ListArg(tuple(to_wire(item) for item in value))
    if isinstance(value, torch.dtype):
        return DType(dtype_name(value))
    if isinstance(value, torch.layout):
        return TorchLayout(str(value).removeprefix("torch."))
    if isinstance(value, torch.memory_format):
        return MemoryFormat(str(value).removeprefix("torch."))
    if isinstance(value, complex):
        return Complex(value.real, value.imag)
    if isinstance(value, torch.device):
        return WorkerDevice()
    raise TypeError(f"an argument of type {type(value).__name__} ({value!r}) cannot be sent to a worker")
