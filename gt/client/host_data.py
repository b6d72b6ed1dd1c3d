"""Conversions between plain tensors, NumPy arrays and bytes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from gt.client.geometry import Geometry
from gt.client.torch_patches.dispatch import disable_current_modes
from gt.client.torch_patches.tensors import is_zero_tensor
from gt.core.meta import is_dense, memory_order
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
