"""The default engine: torch on CUDA where there is a GPU, otherwise on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from gt.core.meta import ITEM_BYTES, TensorMeta, dense_strides, is_dense, memory_order, same_places, span
from gt.core.signatures import Arg, Complex, DType, Input, ListArg, MemoryFormat, TorchLayout, ViewStep, WorkerDevice
from gt.worker.engines.checked_ops import checked, has_checks
from gt.worker.engines.cleared_memory import clear, cleared, leaves_memory
from gt.worker.engines.constant_checks import check_constants
from gt.worker.engines.counter_rng import Region
from gt.worker.engines.device_fallbacks import PORTABLE
from gt.worker.engines.engine import Buffer
from gt.worker.engines.random_ops import COUNTER_BASED
from gt.worker.engines.refused_ops import REFUSED
from gt.worker.engines.write_back import write_through

_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LAYOUTS = {"strided": torch.strided, "sparse_coo": torch.sparse_coo, "sparse_csr": torch.sparse_csr}
_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
_LARGE = 1 << 25  # bytes

# They are random where their dropout is not 0, and then they have no sharding rule.
_RANDOM_BY_DROPOUT = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
}

# They return what their backward needs only where gradients are recorded, which is never the case on a worker.
_GRAD_MODE_MATTERS = {"aten.mkldnn_rnn_layer.default"}


def _dispatch_state_of_a_new_thread() -> tuple[Any, Any]:
    """Torch's thread-local dispatch keys as they are where no mode, autocast or transform is active."""
    found: list[Any] = []

    def read() -> None:
        found.extend((torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    return found[0], found[1]


_CLEAN_INCLUDE, _CLEAN_EXCLUDE = _dispatch_state_of_a_new_thread()


class _Floating:
    """A function that runs where numbers without a dtype become `dtype`.

    Torch has one default dtype for the whole process. An embedded worker shares it with the user's threads, which see
    any change of it, so it is changed only where it is another one and may matter, and only while the function runs.
    That is the case for ops that were recorded before the program changed its default and run after that.
    """

    __slots__ = ("bare", "dtype")

    def __init__(self, bare: Callable[..., Any], dtype: torch.dtype) -> None:
        self.bare = bare
        self.dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.get_default_dtype() is self.dtype or not _may_need_default(args, kwargs):
            return self.bare(*args, **kwargs)
        with _default_dtype(self.dtype):
            return self.bare(*args, **kwargs)


def _bare(function: Callable[..., Any]) -> Callable[..., Any]:
    return function.bare if isinstance(function, _Floating) else function


def _may_need_default(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Torch takes the default dtype where none is given and the tensors suggest none: integers that are divided, for
    example. Which of these ops do so it does not tell."""
    if kwargs.get("dtype") is not None:
        return False
    dtypes = {tensor.dtype for tensor in _tensors((*args, *kwargs.values()))}
    return not dtypes or not all(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)


def _tensors(values: Sequence[Any]) -> Generator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None]:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        if torch.get_default_dtype() is dtype:  # otherwise another thread has set it meanwhile
            torch.set_default_dtype(usual)


class _Isolation(AbstractContextManager[None]):
    """Torch's thread-local state as in a program that has set none of it. A class, because it is entered for every
    batch: a generator would take twice as long."""

    def __enter__(self) -> None:
        # One after the other, and inference mode last: some guards act when they are made, and inference mode changes
        # the dispatch keys that the first guard has set.
        self._keys = torch._C._ForceDispatchKeyGuard(_CLEAN_INCLUDE, _CLEAN_EXCLUDE)
        self._keys.__enter__()
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()
        self._inference = torch._C._InferenceMode(True)
        self._inference.__enter__()

    def __exit__(self, *error: object) -> None:
        for guard in (self._inference, self._functions, self._keys):
            guard.__exit__(None, None, None)


class _Watch(TorchDispatchMode):
    """Sees which ops run, with what. An argument that is what the schema says anyway is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[Any, ...]]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, to keep it out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((str(func), (*args, *(kwargs or {}).items())))
        return func(*args, **(kwargs or {}))


class PyTorchEngine:
    """`namespaces` are those whose ops may be run; `group` is used by collectives that name none. Where it `clears`,
    new memory that an op does not write is zero."""

    def __init__(
        self,
        device: str = "",
        threads: int = 0,
        checks: bool = False,
        clears: bool = False,
        namespaces: Sequence[str] = ("aten",),
    ) -> None:
        self._device = _device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        if threads:
            torch.set_num_threads(threads)
        self.device = str(self._device)
        self.checks = checks
        self._clears = clears
        self.is_reference = self._device.type == "cpu"
        self.restrided = 0
        self._allowed = frozenset(
            name for name in torch._C._dispatch_get_all_op_names() if name.partition("::")[0] in namespaces
        )
        self.group: dist.ProcessGroup | None = None
        self._shortcuts: dict[tuple[str, int], Callable[..., Any]] = {}

    def isolated(self) -> AbstractContextManager[None]:
        return _Isolation()

    # Ops

    def resolve(self, op: str) -> Callable[..., Any]:
        return _Floating(self._overload(op), torch.float32)

    def _overload(self, op: str) -> Callable[..., Any]:
        qualified, overload = _qualified(op)
        if (f"{qualified}.{overload}" if overload else qualified) not in self._allowed:
            raise NotImplementedError(f"{op} is not an op that this worker may run")
        reason = REFUSED.get(qualified.partition("::")[2]) if qualified.startswith("aten::") else None
        if reason is not None:
            raise NotImplementedError(f"{op} is not an op that this worker may run: {reason}")
        if self._device.type != "cpu" and op in PORTABLE:
            return PORTABLE[op]
        function, _, _ = torch._C._get_operation_overload(qualified, overload)
        function = checked(op, _in_grad_mode(function) if op in _GRAD_MODE_MATTERS else function)
        return cleared(op, function) if self._clears else function

    def check_constants(self, op: str, args: Sequence[Arg], kwargs: Mapping[str, Arg]) -> None:
        check_constants(op, args, kwargs)

    def shortcut(self, op: str, values: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """Torch's own Python function of the op's name, where it runs this very overload with these arguments alone (it
        may have other defaults): it takes two thirds of the time of calling the overload."""
        if _may_need_default(values, {}):
            return self.resolve(op)
        key = (op, len(values))
        if key not in self._shortcuts:
            self._shortcuts[key] = self._find_shortcut(op, values)
        return self._shortcuts[key]

    def _find_shortcut(self, op: str, values: Sequence[torch.Tensor]) -> Callable[..., Any]:
        function = self._overload(op)
        named = getattr(torch._C._VariableFunctions, op.split(".")[1], None)
        wrapped = has_checks(op) or (self._clears and leaves_memory(op))
        if named is None or op in PORTABLE or op in _GRAD_MODE_MATTERS or wrapped:
            return function
        with _Watch() as watch:
            try:
                named(*values)
            except Exception:  # it takes other arguments than the overload
                return function
        same = [(name, list(map(id, given))) for name, given in watch.seen] == [(op, list(map(id, values)))]
        return named if same else function  # type: ignore[no-any-return]

    def literal(self, arg: Arg) -> Any:
        if isinstance(arg, ListArg):
            return [self.literal(item) for item in arg.values]
        if isinstance(arg, DType):
            return _DTYPES[arg.name]
        if isinstance(arg, WorkerDevice):
            return self._device
        if isinstance(arg, MemoryFormat):
            return _FORMATS[arg.name]
        if isinstance(arg, TorchLayout):
            return _LAYOUTS[arg.name]
        if isinstance(arg, Complex):
            return complex(arg.real, arg.imag)
        return arg

    def seeded(self, op: str, function: Callable[..., Any], region: Region | None) -> Callable[..., Any]:
        return _Floating(self._seeded(op, _bare(function), region), torch.float32)

    def _seeded(self, op: str, function: Callable[..., Any], region: Region | None) -> Callable[..., Any]:
        draw = COUNTER_BASED.get(op)
        if draw is not None:
            return lambda key, *args, **kwargs: draw(key, region, *args, **kwargs)
        if region is not None and op not in _RANDOM_BY_DROPOUT:
            raise NotImplementedError(f"{op} is not counter-based: it cannot make a part of what it makes")
        schema = torch._C._get_schema(*_qualified(op))
        if any(argument.name == "generator" for argument in schema.arguments):
            return self._with_generator(function)
        return self._with_seeded_default(function)

    def _with_generator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(key: int, *args: Any, **kwargs: Any) -> Any:
            generator = torch.Generator(self._device)
            generator.manual_seed(key)
            return function(*args, **kwargs | {"generator": generator})

        return run

    def _with_seeded_default(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(key: int, *args: Any, **kwargs: Any) -> Any:
            devices = [self._device.index] if self._device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices):
                torch.manual_seed(key)
                return function(*args, **kwargs)

        return run

    def with_floating(self, dtype: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return _Floating(_bare(function), _DTYPES[dtype])

    # Values

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def settle(self, value: torch.Tensor) -> torch.Tensor:
        if value.is_conj() or value.is_neg():
            return value.resolve_conj().resolve_neg()
        if value.layout is not torch.strided:
            raise NotImplementedError(f"a result of layout {value.layout} cannot be kept; GT holds strided tensors")
        return value

    def with_strides(self, value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
        if value.stride() == stride:
            return value
        self.restrided += 1
        if same_places(value.shape, value.stride(), stride):
            return value.as_strided(value.shape, stride)
        return _copied_into(stride, value)

    def resizable(self, value: torch.Tensor) -> torch.Tensor:
        return value if value.untyped_storage().resizable() else self.copy(value)

    def view_step(self, step: ViewStep) -> Callable[[torch.Tensor], torch.Tensor]:
        args = [self.literal(arg) for arg in step.args]
        kwargs = {name: self.literal(arg) for name, arg in step.kwargs.items()}
        if step.op == "aten.as_strided.default":
            return _strided_view(args[0], args[1], args[2], step.strides or ())
        if step.op in ("aten.view.default", "aten._unsafe_view.default", "aten._reshape_alias.default"):
            return lambda value: value.reshape(args[0])
        function, pick = self._overload(step.op), step.pick
        self.check_constants(step.op, (Input(0), *step.args), step.kwargs)
        if pick is None:
            return lambda value: function(value, *args, **kwargs)
        return lambda value: function(value, *args, **kwargs)[pick]

    def aliases(self, view: torch.Tensor, base: torch.Tensor) -> bool:
        return view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()

    def write_through(
        self, base: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor], value: torch.Tensor
    ) -> None:
        write_through(base, view, value)

    def meta(self, value: torch.Tensor) -> TensorMeta:
        return TensorMeta(tuple(value.shape), value.stride(), 0, _NAMES[value.dtype])

    def nbytes(self, value: torch.Tensor) -> int:
        return value.numel() * value.itemsize

    def from_buffer(self, buffer: Buffer, meta: TensorMeta, owned: bool) -> torch.Tensor:
        if not meta.nbytes:
            return self.empty(meta)
        writable = not memoryview(buffer).readonly
        source = buffer if writable else bytearray(buffer)
        flat = torch.frombuffer(source, dtype=_DTYPES[meta.dtype])
        if not is_dense(meta.shape, meta.stride):
            rows = flat.as_strided(meta.shape, dense_strides(meta.shape, meta.stride))
            return _copied_into(meta.stride, rows.to(self._device))
        if self._device.type != "cpu":
            return flat.to(self._device, copy=True).as_strided(meta.shape, meta.stride)
        if not owned and writable:
            flat = flat.clone() if meta.nbytes < _LARGE else self._large(meta).copy_(flat)
        return flat.as_strided(meta.shape, meta.stride)

    def _large(self, meta: TensorMeta) -> torch.Tensor:
        """Memory that is worth huge pages, which NumPy asks the system for: with small ones an upload spends three
        quarters of its time in page faults. Below this size the allocator gives pages again that it had before."""
        return torch.frombuffer(np.empty(meta.nbytes, np.uint8), dtype=_DTYPES[meta.dtype])

    def read_into(self, value: torch.Tensor, target: memoryview) -> None:
        if len(target):
            rows = torch.frombuffer(target, dtype=value.dtype)
            (rows if value.dim() < 2 else rows.view(value.shape)).copy_(value)  # one number fills the one row

    def flat(self, value: torch.Tensor) -> torch.Tensor:
        return value.permute(memory_order(value.stride())).view(-1)

    def bytes_of(self, value: torch.Tensor) -> torch.Tensor:
        return self.flat(value).view(torch.uint8)

    def empty(self, meta: TensorMeta) -> torch.Tensor:
        return torch.empty_strided(meta.shape, meta.stride, dtype=_DTYPES[meta.dtype], device=self._device)

    def copy(self, value: torch.Tensor) -> torch.Tensor:
        return _copied_into(value.stride(), value)

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # Collectives

    def supports_distributed(self) -> bool:
        return dist.is_available()

    def all_reduce_sum(self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        result = tensor.clone().contiguous()
        self._group(group).allreduce([result]).wait()
        return result

    def all_gather(self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
        chosen = self._group(group)
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(chosen.size())]
        chosen.allgather([parts], [tensor.contiguous()]).wait()
        return parts

    def reduce_scatter(self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """The sum over the group, of which this member keeps its part of dim 0 (parts as equal as can be)."""
        chosen = self._group(group)
        parts = [part.contiguous() for part in torch.tensor_split(tensor, chosen.size())]
        if len({part.shape for part in parts}) > 1:
            return torch.tensor_split(self.all_reduce_sum(tensor, chosen), chosen.size())[chosen.rank()].clone()
        result = torch.empty_like(parts[0])
        chosen.reduce_scatter([result], [parts]).wait()
        return result

    def _group(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        chosen = group or self.group
        if chosen is None and dist.is_initialized():
            chosen = dist.group.WORLD
        if chosen is None:
            raise RuntimeError(
                "this worker has no process group yet: pass group=, run it with other workers, or call "
                "torch.distributed.init_process_group()"
            )
        return chosen


def _device(name: str) -> torch.device:
    """A GPU has an index, without which torch cannot make it the current one; "cuda" means the one that is."""
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _in_grad_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.enable_grad():
            return function(*args, **kwargs)

    return run


def _copied_into(stride: tuple[int, ...], value: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in memory with these strides. Elements may share memory there, if they are equal."""
    shape = value.shape
    target = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    if is_dense(shape, stride):
        return target.copy_(value)
    clear(target)
    memory = target.as_strided((span(shape, stride),), (1,))
    places = torch.arange(len(memory), device=value.device).as_strided(shape, stride)
    memory[places.reshape(-1)] = value.reshape(-1)
    return target


def _strided_view(
    size: Sequence[int], stride: Sequence[int], offset: int, counted_in: tuple[int, ...]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """as_strided on the storage that the client thinks of: one that starts at the tensor and has the given strides."""

    def view(value: torch.Tensor) -> torch.Tensor:
        if value.stride() != counted_in:
            value = _copied_into(counted_in, value)
        return value.as_strided(size, stride, offset + value.storage_offset())

    return view


def _qualified(op: str) -> tuple[str, str]:
    """`aten.add.Tensor` as torch's registry has it; whatever is not of that form is in no registry."""
    parts = op.split(".")
    if len(parts) != 3:
        return op, "is not an overload"
    return f"{parts[0]}::{parts[1]}", "" if parts[2] == "default" else parts[2]
