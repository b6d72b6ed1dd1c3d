"""The interface of engines, which hold and compute the tensors of a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeAlias

from gt.core.meta import TensorMeta
from gt.core.signatures import Arg, Number, ViewStep
from gt.wire.codec import Buffer
from gt.worker.engines.counter_rng import Region

Value: TypeAlias = Any
"""A tensor of the engine: torch.Tensor or numpy.ndarray."""


def reserve_nothing(nbytes: int) -> None:
    """The `reserve` of an engine whose memory nobody guards."""


class Finiteness(NamedTuple):
    """Whether a tensor has elements that are NaN, and infinite ones."""

    has_nan: bool
    has_inf: bool


class Engine(Protocol):
    """Computes and holds tensors. `restrided` counts results with other strides than declared. With `checks_geometry`,
    geometry is compared after every op and move. `is_torch_cpu`: ops run in torch's CPU kernels, whose strides clients
    expect. Methods that allocate memory for a tensor first call `reserve` with its size, which may raise. The methods
    with a body are those of a library that lacks what they are about: a subclass has them."""

    reserve: Callable[[int], None]
    device: str
    checks_geometry: bool
    is_torch_cpu: bool
    restrided: int

    def memory(self) -> int:
        """The bytes of memory that the device has; 0 if they are not known."""

    def available_memory(self) -> int | None:
        """The bytes of memory that can be taken now; None if the device's own allocator refuses what it lacks."""

    def isolated(self) -> AbstractContextManager[None]:
        """A context for running commands, without the modes, autocast and grad mode of the surrounding program."""

    def resolve(self, op: str) -> Callable[..., Any]:
        """The function of an op, with float32 as default dtype. Raises NotImplementedError with the op's name where the
        engine lacks or refuses it."""

    def check_constants(self, op: str, args: Sequence[Arg], kwargs: Mapping[str, Arg]) -> None:
        """Raise TypeError for a constant argument of a type that the op does not take. Not needed where functions
        compare all their arguments."""

    def shortcut(self, op: str, values: Sequence[Value], scalars: Sequence[Number] | None = ()) -> Callable[..., Any]:
        """The fastest function of an op whose arguments are tensors like `values` and then scalars like these, in this
        order; None for `scalars`: it has other arguments too."""

    def literal(self, arg: Arg) -> Any:
        """A constant argument of a signature as the engine's functions take it."""

    def seeded(self, op: str, function: Callable[..., Any], region: Region | None) -> Callable[..., Any]:
        """A random op as a function of its key and its arguments. With a `region` it computes that part of the whole
        result, from arguments of the part's size; only elementwise ops can."""

    def with_default_dtype(self, dtype: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function with another default dtype."""

    def without_lazy_bits(self, value: Value) -> Value:
        """The tensor with lazy conjugation and negation carried out, so that it can be stored."""
        return value

    def with_strides(self, value: Value, stride: tuple[int, ...]) -> Value:
        """The tensor itself where it has these strides, otherwise a copy, counted in `restrided`."""

    def resizable(self, value: Value) -> Value:
        """The tensor itself where its memory can grow, otherwise a copy: ops with `out=` may resize it."""
        return value

    def make_view(self, step: ViewStep) -> Callable[[Value], Value]:
        """A view op as a function of its tensor. Where the tensor's strides do not allow a view, it returns a copy."""

    def write_through(self, base: Value, view: Callable[[Value], Value], value: Value) -> None:
        """Write `value` to the elements of `base` that `view` selects, where `view` returns a copy."""

    def is_tensor(self, value: Any) -> bool: ...

    def aliases(self, view: Value, base: Value) -> bool: ...

    def meta(self, value: Value) -> TensorMeta: ...

    def nbytes(self, value: Value) -> int: ...

    def storage(self, value: Value) -> tuple[int, int]:
        """The address and the size in bytes of the memory that a tensor is in, which it may share with others."""

    def from_buffer(self, buffer: Buffer, meta: TensorMeta, owned: bool) -> Value:
        """A tensor of the elements in a buffer, which are in the order of the tensor's strides: over the buffer's
        memory where that is `owned` and writable, otherwise a copy."""

    def read_into(self, value: Value, target: memoryview) -> None:
        """Copy the tensor's bytes to host memory, in row-major order."""

    def flat(self, value: Value) -> Value:
        """A flat view of a tensor without gaps, in the order of its memory."""

    def bytes_of(self, value: Value) -> Value:
        """A flat uint8 view of the memory of a tensor without gaps."""

    def empty(self, meta: TensorMeta) -> Value:
        """An uninitialized tensor with the shape, strides and dtype of a meta."""

    def copy(self, value: Value) -> Value:
        """A copy with the same strides."""

    def is_profiled(self) -> bool:
        """Whether a profiler records the ops of this process."""
        return False

    def profiled(self, name: str) -> AbstractContextManager[object]:
        """A context that the profiler records under a name."""
        return nullcontext()

    def leaves_unwritten(self, op: str) -> bool:
        """Whether an op gives memory that it has not written."""
        return False

    def finiteness(self, value: Value) -> Finiteness:
        """Whether the elements of a tensor are finite; those of integers are."""

    def extremes(self, value: Value) -> tuple[float, float] | None:
        """The smallest and the largest element of a tensor of real numbers, both NaN if one is; None for any other,
        and for an empty one."""

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""

    def supports_distributed(self) -> bool:
        return False

    def all_reduce_sum(self, tensor: Value, group: Any = None) -> Value:
        raise NoCollectives(self, "all_reduce_sum")

    def all_gather(self, tensor: Value, group: Any = None) -> Value:
        raise NoCollectives(self, "all_gather")

    def reduce_scatter(self, tensor: Value, group: Any = None) -> Value:
        raise NoCollectives(self, "reduce_scatter")


class NoCollectives(NotImplementedError):
    """An engine without collectives was asked for one."""

    def __init__(self, engine: object, name: str) -> None:
        super().__init__(
            f"{type(engine).__name__} has no {name}: its library has no collectives; use the pytorch backend"
        )
