"""The reference engine: the core ops in NumPy, on the CPU. Written to be read; slow and incomplete."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gt.core.meta import TensorMeta, dense_strides, is_dense, memory_order
from gt.core.signatures import Arg, Complex, DType, ListArg, MemoryFormat, Number, TorchLayout, ViewStep, WorkerDevice
from gt.wire.codec import Buffer
from gt.worker.engines.counter_rng import Region
from gt.worker.engines.engine import Engine, Finiteness, reserve_nothing
from gt.worker.engines.host_memory_size import available_memory, host_memory
from gt.worker.engines.numpy_arrays import (
    VIEWS,
    Array,
    array_at,
    copy_with_strides,
    dtype_named,
    element_strides,
    empty_strided,
    make_strided_view,
    memory_owner,
    with_strides,
)
from gt.worker.engines.numpy_ops import OPS, on_lists
from gt.worker.engines.numpy_random import RandomSource


class NumPyEngine(Engine):
    """NumPy computes on the CPU, with the threads of its BLAS, and new memory is always zero: `device`, `threads` and
    `clears` have no effect."""

    is_torch_cpu = False

    def __init__(self, device: str = "", threads: int = 0, checks_geometry: bool = False, clears: bool = True) -> None:
        self.device = "cpu"
        self.checks_geometry = checks_geometry
        self.restrided = 0
        self.reserve: Callable[[int], None] = reserve_nothing

    def memory(self) -> int:
        return host_memory()

    def available_memory(self) -> int | None:
        return available_memory()

    @contextmanager
    def isolated(self) -> Generator[None]:
        # torch gives inf and nan without a warning
        with np.errstate(all="ignore"):
            yield

    # Ops

    def resolve(self, op: str) -> Callable[..., Any]:
        return on_lists(op) or _found(op, OPS)

    def shortcut(self, op: str, values: Sequence[Array], scalars: Sequence[Number] | None = ()) -> Callable[..., Any]:
        return self.resolve(op)

    def literal(self, arg: Arg) -> Any:
        if isinstance(arg, ListArg):
            return [self.literal(item) for item in arg.values]
        if isinstance(arg, DType):
            return dtype_named(arg.name)
        if isinstance(arg, MemoryFormat | TorchLayout):
            return arg.name
        if isinstance(arg, Complex):
            return complex(arg.real, arg.imag)
        return None if isinstance(arg, WorkerDevice) else arg

    def seeded(self, op: str, function: Callable[..., Any], region: Region | None) -> Callable[..., Any]:
        return lambda key, *args, **kwargs: function(RandomSource(key, region), *args, **kwargs)

    def with_default_dtype(self, dtype: str, function: Callable[..., Any]) -> Callable[..., Any]:
        raise NotImplementedError(f"the numpy backend has no default dtype but float32, and this op needs {dtype}")

    # Values

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, np.ndarray)

    def with_strides(self, value: Array, stride: tuple[int, ...]) -> Array:
        if element_strides(value) == stride:
            return value
        self.restrided += 1
        self.reserve(value.nbytes)
        return with_strides(value, stride)

    def make_view(self, step: ViewStep) -> Callable[[Array], Array]:
        args = [self.literal(arg) for arg in step.args]
        kwargs = {name: self.literal(arg) for name, arg in step.kwargs.items()}
        if step.op == "aten.as_strided.default":
            size, strides, offset = args
            return make_strided_view(size, strides, offset, step.strides or ())
        function, pick = _found(step.op, VIEWS), step.pick
        if pick is None:
            return lambda value: function(value, *args, **kwargs)
        return lambda value: function(value, *args, **kwargs)[pick]

    def aliases(self, view: Array, base: Array) -> bool:
        return memory_owner(view) is memory_owner(base)

    def write_through(self, base: Array, view: Callable[[Array], Array], value: Array) -> None:
        positions = view(np.arange(base.size).reshape(base.shape))
        base.flat[positions.reshape(-1)] = value.reshape(-1)

    def meta(self, value: Array) -> TensorMeta:
        return TensorMeta(value.shape, element_strides(value), 0, value.dtype.name)

    def nbytes(self, value: Array) -> int:
        return value.nbytes

    def storage(self, value: Array) -> tuple[int, int]:
        owner = memory_owner(value)
        return id(owner), getattr(owner, "nbytes", value.nbytes)

    def finiteness(self, value: Array) -> Finiteness:
        if value.dtype.kind not in "fc" or np.isfinite(value).all():
            return Finiteness(False, False)
        return Finiteness(bool(np.isnan(value).any()), bool(np.isinf(value).any()))

    def extremes(self, value: Array) -> tuple[float, float] | None:
        return (float(value.min()), float(value.max())) if value.dtype.kind == "f" and value.size else None

    def from_buffer(self, buffer: Buffer, meta: TensorMeta, owned: bool) -> Array:
        if not meta.nbytes:
            return self.empty(meta)
        memory = np.frombuffer(buffer, dtype_named(meta.dtype))
        if not is_dense(meta.shape, meta.stride):
            rows = array_at(memory, meta.shape, dense_strides(meta.shape, meta.stride), 0)
            return copy_with_strides(meta.stride, rows)
        return array_at(memory if owned and memory.flags.writeable else memory.copy(), meta.shape, meta.stride, 0)

    def read_into(self, value: Array, target: memoryview) -> None:
        if len(target):
            np.copyto(np.frombuffer(target, value.dtype).reshape(value.shape), value)

    def flat(self, value: Array) -> Array:
        return value.transpose(memory_order(value.strides)).reshape(-1)

    def bytes_of(self, value: Array) -> Array:
        return self.flat(value).view(np.uint8)

    def empty(self, meta: TensorMeta) -> Array:
        self.reserve(meta.nbytes)
        return empty_strided(meta.shape, meta.stride, dtype_named(meta.dtype))

    def copy(self, value: Array) -> Array:
        self.reserve(value.nbytes)
        return copy_with_strides(element_strides(value), value)

    def synchronize(self) -> None:
        """NumPy computes synchronously."""


def _found(op: str, table: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    if op not in table:
        raise NotImplementedError(f"the numpy backend has no {op}; use the pytorch backend, or add it to numpy_ops.py")
    return table[op]
