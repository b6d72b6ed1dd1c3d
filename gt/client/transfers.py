"""Plain tensors on their way to workers and back: operands that are uploaded once for each content, and the parts of a
tensor in a layout."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from gt.client.storage import DTYPE_NAMES, TORCH_DTYPES, Geometry, Storage
from gt.client.torch_patches.dispatch import current_dispatch_modes, disable_current_modes
from gt.client.torch_patches.tensors import is_zero_tensor
from gt.core.meta import is_dense, memory_order
from gt.sharding.boxes import Box, box_shape
from gt.sharding.dtypes import accumulation_dtype
from gt.sharding.held_parts import TensorPart, parts_to_read
from gt.sharding.spec import ShardingSpec
from gt.wire.codec import Buffer

TorchFunction: TypeAlias = Callable[..., Any]

_HUGE_PAGE_BYTES = 1 << 22  # memory of this size is worth huge pages

# Python's operators on an array and a tensor arrive as NumPy's functions, with the meaning of torch's operators.
_OPERATORS: dict[str, TorchFunction] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv,
    "floor_divide": operator.floordiv, "remainder": operator.mod, "power": operator.pow, "matmul": operator.matmul,
    "divmod": lambda left, right: (left // right, left % right),
    "equal": operator.eq, "not_equal": operator.ne, "less": operator.lt, "less_equal": operator.le,
    "greater": operator.gt, "greater_equal": operator.ge,
    "bitwise_and": operator.and_, "bitwise_or": operator.or_, "bitwise_xor": operator.xor,
    "left_shift": operator.lshift, "right_shift": operator.rshift,
}  # fmt: skip

# NumPy's functions that equal torch's of the same name, for floats of one dtype: for integers and mixed dtypes the two
# give different dtypes.
_SAME_NAMES = (
    "sqrt square reciprocal exp exp2 expm1 log log2 log10 log1p logaddexp logaddexp2 sin cos tan arcsin arccos arctan "
    "sinh cosh tanh arcsinh arccosh arctanh arctan2 hypot deg2rad rad2deg floor ceil trunc fmod copysign "
    "maximum minimum fmax fmin absolute negative positive isnan isinf isfinite signbit"
)
_OF_FLOATS: dict[str, TorchFunction] = {name: getattr(torch, name) for name in _SAME_NAMES.split()} | {
    "rint": torch.round,
    "fabs": torch.abs,
    "degrees": torch.rad2deg,
    "radians": torch.deg2rad,
}


def torch_call(name: str, inputs: Sequence[Any]) -> tuple[TorchFunction, list[Any]] | None:
    """The function of torch, with its operands, that equals NumPy's function of this name on these inputs; None if
    torch has none."""
    if name in _OPERATORS:
        return _OPERATORS[name], [v.item() if isinstance(v, np.generic) else _operand(v) for v in inputs]
    operands = [_operand(value) for value in inputs]
    dtypes = {value.dtype for value in operands if isinstance(value, torch.Tensor)}
    if name not in _OF_FLOATS or len(dtypes) != 1 or not all(dtype.is_floating_point for dtype in dtypes):
        return None
    (dtype,) = dtypes
    return _OF_FLOATS[name], [torch.as_tensor(value, dtype=dtype) for value in operands]


def _operand(value: Any) -> Any:
    if isinstance(value, torch.Tensor) or type(value) in (bool, int, float):
        return value
    return torch.from_numpy(np.require(value, requirements=["C", "W"]))


def from_array(value: Any) -> torch.Tensor:
    """The result of a NumPy function, array or number, as a plain tensor."""
    return torch.from_numpy(np.asarray(value))


def tensor_of(value: Any) -> Any:
    """An array as a plain tensor of the same memory; any other value as it is."""
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor whose bytes are its value: detached, and without lazy conjugation or negation."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"GT holds strided tensors, not {tensor.layout}; call to_dense() first")
    plain = tensor.detach().resolve_conj().resolve_neg()
    return torch.empty_like(plain).copy_(plain) if is_zero_tensor(plain) else plain  # zeros without memory


def payload(tensor: torch.Tensor, stride: Sequence[int]) -> memoryview:
    """The bytes of a strided tensor in the order of `stride`; its own memory if it has no gaps and these strides."""
    memory = tensor.permute(memory_order(stride)).contiguous()
    flat = memory.as_strided((memory.numel(),), (1,)).view(torch.uint8)
    return np.from_dlpack(flat).data  # after numpy() the storage could not be resized


def copy_bytes(target: memoryview, source: Buffer) -> None:
    """Copy bytes with all cores: most of the time goes into faulting in the pages of the target."""
    torch.frombuffer(target, dtype=torch.uint8).copy_(torch.frombuffer(source, dtype=torch.uint8))


def tensor_of_bytes(buffer: Buffer, geometry: Geometry, copies: bool = False) -> torch.Tensor:
    """A plain tensor of row-major bytes, with the strides of a geometry. Unless it `copies`, it uses the memory of the
    buffer where the strides are row-major."""
    if geometry.nbytes == 0:
        return empty_dense(geometry)
    tensor = torch.frombuffer(buffer, dtype=geometry.dtype)
    if len(geometry.shape) != 1:
        tensor = tensor.as_strided(geometry.shape, geometry.row_major)
    if not copies and (geometry.stride == geometry.row_major or not is_dense(geometry.shape, geometry.stride)):
        return tensor
    return empty_dense(geometry).copy_(tensor)


def empty_dense(geometry: Geometry) -> torch.Tensor:
    """Plain memory, also inside `with gt.device():`, with the strides of a geometry if these leave no gaps, otherwise
    row-major. Large memory has huge pages, which NumPy asks the system for: most of the cost of a copy to fresh memory
    is page faults."""
    stride = geometry.stride if is_dense(geometry.shape, geometry.stride) else geometry.row_major
    if geometry.nbytes >= _HUGE_PAGE_BYTES:
        memory = torch.frombuffer(np.empty(geometry.nbytes, np.uint8), dtype=geometry.dtype)
        return memory.as_strided(geometry.shape, stride)
    with disable_current_modes():
        return torch.empty_strided(geometry.shape, stride, dtype=geometry.dtype)


MAX_BYTES = 1 << 16  # size of a tensor that is kept
MAX_TENSORS = 512


class UploadCache:
    """Uploads by content; the least recently used is dropped first. Models make the same masks and numbers again and
    again. By content and not by identity, because NumPy may write to a tensor's memory unseen."""

    def __init__(self, upload: Callable[[torch.Tensor], Storage]) -> None:
        self._upload = upload
        self._kept: OrderedDict[tuple[Any, ...], Storage] = OrderedDict()
        self._lock = threading.RLock()

    def storage_of(self, tensor: torch.Tensor) -> Storage:
        """The upload of a plain tensor: an earlier one if the tensor is small and its content was uploaded before."""
        if tensor.numel() * tensor.itemsize > MAX_BYTES:
            return self._upload(tensor)
        plain = strided(tensor)
        key = (plain.dtype, plain.shape, plain.stride(), bytes(payload(plain, plain.stride())))
        with self._lock:
            kept = self._kept  # not the table of a `forget` that comes while this tensor is uploaded
            storage = kept.get(key)
            if storage is None:
                storage = kept[key] = self._upload(plain)
                if len(kept) > MAX_TENSORS:
                    kept.popitem(last=False)
            else:
                kept.move_to_end(key)
        return storage

    def forget(self) -> None:
        """Upload every content anew when it is next used: uploads may be lost with a worker. Without the lock, whose
        holder may wait for the thread that calls this."""
        self._kept = OrderedDict()


REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "and": torch.logical_and,
    "or": torch.logical_or,
}


def write_parts(
    tensor: torch.Tensor, stride: Sequence[int], parts: Sequence[TensorPart], target: memoryview
) -> None:  # fmt: skip
    """Copy boxes of a plain tensor to memory, one after another, each in the order of `stride`."""
    if not len(target):
        return
    memory = torch.frombuffer(target, dtype=tensor.dtype)
    order, start = memory_order(stride), 0
    for part in parts:
        box = tensor[_slices(part.box)].permute(order)
        memory[start : start + box.numel()].view(box.shape).copy_(box)
        start += box.numel()


def assemble(
    buffers: Sequence[Buffer], layout: ShardingSpec | None, geometry: Geometry, is_shared: bool
) -> torch.Tensor:
    """A plain tensor, put together from the parts that workers hold of it in a layout; without a layout, `buffers` has
    the whole tensor. Partial values are reduced as workers do: in the same order, and in a wider dtype where sums need
    one. Memory that `is_shared` is copied."""
    if layout is None:
        return tensor_of_bytes(buffers[0], geometry, copies=is_shared)
    with disable_current_modes() if current_dispatch_modes() else contextlib.nullcontext():
        parts = zip(parts_to_read(layout, tuple(geometry.shape)), buffers, strict=True)
        addends = [list(group) for _, group in itertools.groupby(parts, key=lambda part: part[0].addend)]
        if len(addends) == 1:
            return _joined(addends[0], geometry, copies=is_shared)
        return _reduced(layout.kind, [_joined(addend, geometry, copies=False) for addend in addends], geometry)


def _joined(parts: Sequence[tuple[TensorPart, Buffer]], geometry: Geometry, copies: bool) -> torch.Tensor:
    """The tensor that consists of some boxes."""
    if len(parts) == 1:
        return tensor_of_bytes(parts[0][1], geometry, copies)
    whole = empty_dense(geometry)
    for part, buffer in parts:
        whole[_slices(part.box)] = torch.frombuffer(buffer, dtype=geometry.dtype).view(box_shape(part.box))
    return whole


def _reduced(kind: str, addends: Sequence[torch.Tensor], geometry: Geometry) -> torch.Tensor:
    name = DTYPE_NAMES[geometry.dtype]
    wide = TORCH_DTYPES[accumulation_dtype(name)] if kind in ("sum", "prod") else geometry.dtype
    total = functools.reduce(REDUCTIONS[kind], [addend.to(wide) for addend in addends])
    return total.to(geometry.dtype)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple([slice(start, stop) for start, stop in box])
