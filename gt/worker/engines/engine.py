"""What the executor asks of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

from gt.core.meta import TensorMeta
from gt.core.signatures import Arg, ViewStep
from gt.worker.engines.counter_rng import Region

Value: TypeAlias = Any
"""A tensor of the engine: torch.Tensor or numpy.ndarray."""

Buffer: TypeAlias = memoryview | bytes | bytearray


class Engine(Protocol):
    """`restrided` counts the tensors that a kernel gave with other strides than those that the client was told. Where
    it `checks`, geometry is compared after every op and move; `is_reference`: its kernels are those of torch on the
    CPU, whose strides the client tells its user."""

    device: str
    checks: bool
    is_reference: bool
    restrided: int

    def isolated(self) -> AbstractContextManager[None]:
        """Commands run inside this: nothing of the surrounding program (modes, autocast, grad) may leak in."""

    def resolve(self, op: str) -> Callable[..., Any]:
        """The function of an op name, which runs where numbers without a dtype become float32. Raises
        NotImplementedError with the name where the engine lacks the op, or refuses it."""

    def check_constants(self, op: str, args: Sequence[Arg], kwargs: Mapping[str, Arg]) -> None:
        """Raise TypeError where an argument is of no kind that the op takes in its place."""

    def shortcut(self, op: str, values: Sequence[Value]) -> Callable[..., Any]:
        """The quickest function that does an op for tensors like these and nothing else, in their order."""

    def literal(self, arg: Arg) -> Any:
        """A constant argument as the engine's functions take it."""

    def seeded(self, op: str, function: Callable[..., Any], region: Region | None) -> Callable[..., Any]:
        """A random op as a function of its key and its arguments. With a region it makes that part of the whole, from
        the arguments of the part; only elementwise ops can."""

    def with_floating(self, dtype: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function where numbers without a dtype become this one."""

    def settle(self, value: Value) -> Value:
        """A result as it can be kept: with no lazy conjugation or negation."""

    def with_strides(self, value: Value, stride: tuple[int, ...]) -> Value:
        """The tensor with these strides: itself where it has them, otherwise in new memory. Counted in `restrided`."""

    def resizable(self, value: Value) -> Value:
        """The tensor itself where its memory can grow, otherwise a copy: ops with `out=` may want more of it."""

    def view_step(self, step: ViewStep) -> Callable[[Value], Value]:
        """A view op as a function of its tensor; a copy where the strides here do not allow a view."""

    def write_through(self, base: Value, view: Callable[[Value], Value], value: Value) -> None:
        """Write `value` into the view of `base`, although `view` cannot alias `base` here."""

    def is_tensor(self, value: Any) -> bool: ...

    def aliases(self, view: Value, base: Value) -> bool: ...

    def meta(self, value: Value) -> TensorMeta: ...

    def nbytes(self, value: Value) -> int: ...

    def from_buffer(self, buffer: Buffer, meta: TensorMeta, owned: bool) -> Value:
        """A tensor with these elements, which follow each other in the order of its strides: over the buffer itself
        where that is `owned` and writable, otherwise a copy."""

    def read_into(self, value: Value, target: memoryview) -> None:
        """Copy the bytes, in row-major order, to host memory."""

    def flat(self, value: Value) -> Value:
        """The elements of a tensor without gaps in the order in which they lie in memory, over that memory."""

    def bytes_of(self, value: Value) -> Value:
        """The memory of a tensor without gaps as a flat tensor of uint8."""

    def empty(self, meta: TensorMeta) -> Value:
        """Memory with the strides of a tensor."""

    def copy(self, value: Value) -> Value:
        """The same value in memory of its own, with the same strides."""

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it."""

    def supports_distributed(self) -> bool: ...

    def all_reduce_sum(self, tensor: Value, group: Any = None) -> Value: ...

    def all_gather(self, tensor: Value, group: Any = None) -> Sequence[Value]: ...

    def reduce_scatter(self, tensor: Value, group: Any = None) -> Value: ...
