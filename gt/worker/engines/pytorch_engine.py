"""The default engine: torch on CUDA where there is a GPU, otherwise on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gt.core.meta import (
    ITEM_BYTES,
    TensorMeta,
    dense_strides,
    has_overlap,
    is_dense,
    memory_order,
    memory_span,
    same_places,
)
from gt.core.signatures import (
    Arg,
    Complex,
    DType,
    Input,
    ListArg,
    MemoryFormat,
    Number,
    TorchLayout,
    ViewStep,
    WorkerDevice,
)
from gt.wire.codec import Buffer
from gt.worker.engines.checked_ops import checked, has_checks
from gt.worker.engines.cleared_memory import clear, cleared, leaves_unwritten
from gt.worker.engines.counter_rng import Region
from gt.worker.engines.default_dtype import WithDefaultDtype, may_need_default, without_default_dtype
from gt.worker.engines.device_fallbacks import DEVICE_FALLBACKS
from gt.worker.engines.engine import Finiteness, reserve_nothing
from gt.worker.engines.host_memory_size import available_memory, host_memory
from gt.worker.engines.random_ops import COUNTER_BASED
from gt.worker.engines.refused_ops import OpNotAllowed, refusal
from gt.worker.engines.schema_checks import check_constants
from gt.worker.engines.torch_private import (
    Isolation,
    OpWatcher,
    find_overload,
    find_python_function,
    find_schema,
    is_profiled,
    profiler_range,
    qualified_name,
    registered_ops,
)
from gt.worker.engines.torch_values import (
    extremes,
    finiteness,
    takes_number_as_tensor,
    with_number_as_tensor,
    write_through,
)

_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LAYOUTS = {"strided": torch.strided, "sparse_coo": torch.sparse_coo, "sparse_csr": torch.sparse_csr}
_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
_HUGE_PAGE_BYTES = 1 << 25  # memory of this size is worth huge pages

# Random ops where their dropout is not 0, in which case they have no sharding rule.
_RANDOM_BY_DROPOUT = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
}

# Ops that return the workspace of their backward only in grad mode, which a worker is never in.
_GRAD_MODE_MATTERS = {"aten.mkldnn_rnn_layer.default"}


class PyTorchEngine:
    """Runs the ops of some `namespaces`. `group` is the process group of collectives that name none. With `clears`, new
    memory that an op does not write is zero."""

    def __init__(
        self,
        device: str = "",
        threads: int = 0,
        checks_geometry: bool = False,
        clears: bool = False,
        namespaces: Sequence[str] = ("aten",),
    ) -> None:
        self._device = _device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        if threads:
            torch.set_num_threads(threads)
        self.device = str(self._device)
        self.checks_geometry = checks_geometry
        self._clears = clears
        self.is_torch_cpu = self._device.type == "cpu"
        self.restrided = 0
        self.reserve: Callable[[int], None] = reserve_nothing
        self._allowed = frozenset(name for name in registered_ops() if name.partition("::")[0] in namespaces)
        self.group: dist.ProcessGroup | None = None
        self._shortcuts: dict[tuple[str, int], Callable[..., Any]] = {}
        self._overloads: dict[str, Callable[..., Any]] = {}  # resolved ops: at most all that torch has

    def memory(self) -> int:
        if self._device.type != "cuda":
            return host_memory()
        return torch.cuda.get_device_properties(self._device).total_memory

    def available_memory(self) -> int | None:
        return available_memory() if self._device.type != "cuda" else None

    def isolated(self) -> AbstractContextManager[None]:
        return Isolation()

    # Ops

    def resolve(self, op: str) -> Callable[..., Any]:
        return WithDefaultDtype(self._overload(op), torch.float32)

    def _overload(self, op: str) -> Callable[..., Any]:
        found = self._overloads.get(op)
        if found is None:
            found = self._overloads[op] = self._find_overload(op)
        return found

    def _find_overload(self, op: str) -> Callable[..., Any]:
        qualified, overload = qualified_name(op)
        if (f"{qualified}.{overload}" if overload else qualified) not in self._allowed:
            raise OpNotAllowed(f"{op} is not an op that this worker may run")
        reason = refusal(qualified.partition("::")[2], overload) if qualified.startswith("aten::") else None
        if reason is not None:
            raise OpNotAllowed(f"{op} is not an op that this worker may run: {reason}")
        if self._device.type != "cpu" and op in DEVICE_FALLBACKS:
            return DEVICE_FALLBACKS[op]
        function = find_overload(op)
        function = checked(op, _in_grad_mode(function) if op in _GRAD_MODE_MATTERS else function)
        return cleared(op, function) if self._clears else function

    def check_constants(self, op: str, args: Sequence[Arg], kwargs: Mapping[str, Arg]) -> None:
        check_constants(op, args, kwargs)

    def shortcut(
        self, op: str, values: Sequence[torch.Tensor], scalars: Sequence[Number] | None = ()
    ) -> Callable[..., Any]:
        """Torch's Python function of the op's name, which takes two thirds of the time of the overload: where it runs
        this very overload on these tensors alone (its defaults may be others). Where torch would make a tensor of a
        number at every call, a function that keeps such tensors."""
        if may_need_default(values, {}):
            return self.resolve(op)
        if scalars is None:
            return self._overload(op)
        if scalars:
            takes_tensor = len(values) == len(scalars) == 1 and takes_number_as_tensor(op, values[0])
            return with_number_as_tensor(self.shortcut(op, [*values, *values])) if takes_tensor else self._overload(op)
        key = (op, len(values))
        if key not in self._shortcuts:
            self._shortcuts[key] = self._find_shortcut(op, values)
        return self._shortcuts[key]

    def _find_shortcut(self, op: str, values: Sequence[torch.Tensor]) -> Callable[..., Any]:
        function = self._overload(op)
        named = find_python_function(op)
        wrapped = has_checks(op) or (self._clears and leaves_unwritten(op)) or find_schema(op).is_mutable
        if named is None or op in DEVICE_FALLBACKS or op in _GRAD_MODE_MATTERS or wrapped:
            return function
        with OpWatcher() as watcher:
            try:
                named(*values)
            except Exception:  # it takes other arguments than the overload
                return function
        same = [(name, list(map(id, given))) for name, given in watcher.seen] == [(op, list(map(id, values)))]
        return named if same else function

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
        return WithDefaultDtype(self._seeded(op, without_default_dtype(function), region), torch.float32)

    def _seeded(self, op: str, function: Callable[..., Any], region: Region | None) -> Callable[..., Any]:
        draw = COUNTER_BASED.get(op)
        if draw is not None:
            return lambda key, *args, **kwargs: draw(key, region, *args, **kwargs)
        if region is not None and op not in _RANDOM_BY_DROPOUT:
            raise NotImplementedError(f"{op} is not counter-based: it cannot make a part of its result")
        if any(argument.name == "generator" for argument in find_schema(op).arguments):
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

    def with_default_dtype(self, dtype: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return WithDefaultDtype(without_default_dtype(function), _DTYPES[dtype])

    # Values

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def without_lazy_bits(self, value: torch.Tensor) -> torch.Tensor:
        if value.is_conj() or value.is_neg():
            return value.resolve_conj().resolve_neg()
        if value.layout is not torch.strided:
            raise NotImplementedError(
                f"a result of layout {value.layout} cannot be kept; GT holds strided tensors: leave it dense "
                f"(sparse=False of an embedding), or make it of tensor.cpu()"
            )
        return value

    def with_strides(self, value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
        if value.stride() == stride and (value.numel() or not value.untyped_storage().nbytes()):
            return value
        self.restrided += 1
        if value.numel() and same_places(value.shape, value.stride(), stride):
            return value.as_strided(value.shape, stride)
        self.reserve(value.nbytes)
        return _copy_with_strides(stride, value)

    def resizable(self, value: torch.Tensor) -> torch.Tensor:
        return value if value.untyped_storage().resizable() else self.copy(value)

    def make_view(self, step: ViewStep) -> Callable[[torch.Tensor], torch.Tensor]:
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

    def storage(self, value: torch.Tensor) -> tuple[int, int]:
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.nbytes()

    def is_profiled(self) -> bool:
        return is_profiled()

    def profiled(self, name: str) -> AbstractContextManager[object]:
        return profiler_range(name)

    def leaves_unwritten(self, op: str) -> bool:
        return leaves_unwritten(op)

    def finiteness(self, value: torch.Tensor) -> Finiteness:
        return finiteness(value)

    def extremes(self, value: torch.Tensor) -> tuple[float, float] | None:
        return extremes(value)

    def from_buffer(self, buffer: Buffer, meta: TensorMeta, owned: bool) -> torch.Tensor:
        if not meta.nbytes:
            return self.empty(meta)
        writable = not memoryview(buffer).readonly
        source = buffer if writable else bytearray(buffer)
        flat = torch.frombuffer(source, dtype=_DTYPES[meta.dtype])
        if not is_dense(meta.shape, meta.stride):
            rows = flat.as_strided(meta.shape, dense_strides(meta.shape, meta.stride))
            return _copy_with_strides(meta.stride, rows.to(self._device))
        if self._device.type != "cpu":
            return flat.to(self._device, copy=True).as_strided(meta.shape, meta.stride)
        if not owned and writable:
            flat = flat.clone() if meta.nbytes < _HUGE_PAGE_BYTES else self._empty_huge(meta).copy_(flat)
        return flat.as_strided(meta.shape, meta.stride)

    def _empty_huge(self, meta: TensorMeta) -> torch.Tensor:
        """Memory of huge pages, which NumPy asks the system for: with small pages an upload spends three quarters of
        its time in page faults. Smaller tensors get pages that the allocator had before."""
        return torch.frombuffer(np.empty(meta.nbytes, np.uint8), dtype=_DTYPES[meta.dtype])

    def read_into(self, value: torch.Tensor, target: memoryview) -> None:
        if len(target):
            rows = torch.frombuffer(target, dtype=value.dtype)
            (rows if value.dim() < 2 else rows.view(value.shape)).copy_(value)  # a 0-d tensor fills one row

    def flat(self, value: torch.Tensor) -> torch.Tensor:
        return value.permute(memory_order(value.stride())).view(-1)

    def bytes_of(self, value: torch.Tensor) -> torch.Tensor:
        return self.flat(value).view(torch.uint8)

    def empty(self, meta: TensorMeta) -> torch.Tensor:
        self.reserve(meta.nbytes)
        return torch.empty_strided(meta.shape, meta.stride, dtype=_DTYPES[meta.dtype], device=self._device)

    def copy(self, value: torch.Tensor) -> torch.Tensor:
        self.reserve(value.nbytes)
        return _copy_with_strides(value.stride(), value)

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

    def all_gather(self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """The shards of all members, which may have different lengths, joined along dim 0."""
        chosen = self._group(group)
        shard = torch.atleast_1d(tensor)
        counts = torch.zeros(chosen.size(), dtype=torch.int64, device=tensor.device)
        counts[chosen.rank()] = len(shard)
        chosen.allreduce([counts]).wait()
        lengths = counts.tolist()
        padded = shard.new_zeros(max(lengths), *shard.shape[1:])
        padded[: len(shard)] = shard
        parts = [torch.empty_like(padded) for _ in lengths]
        chosen.allgather([parts], [padded]).wait()
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    def reduce_scatter(self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """This member's part of the sum over the group: dim 0 is cut into parts as equal as possible."""
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
    """The device of a name; "cuda" is the current GPU, with its index, which torch needs to select it."""
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _in_grad_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.enable_grad():
            return function(*args, **kwargs)

    return run


def _copy_with_strides(stride: tuple[int, ...], value: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor with these strides, which may let equal elements share memory."""
    shape = value.shape
    target = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    if is_dense(shape, stride):
        return target.copy_(value)
    clear(target)
    if not has_overlap(shape, stride):
        return target.copy_(value)
    memory = target.as_strided((memory_span(shape, stride),), (1,))
    positions = torch.arange(len(memory), device=value.device).as_strided(shape, stride)
    memory[positions.reshape(-1)] = value.reshape(-1)
    return target


def _strided_view(
    size: Sequence[int], stride: Sequence[int], offset: int, assumed: tuple[int, ...]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """as_strided on the storage that the client assumes: one that starts at the tensor and has strides `assumed`."""

    def view(value: torch.Tensor) -> torch.Tensor:
        if value.stride() != assumed:
            value = _copy_with_strides(assumed, value)
        return value.as_strided(size, stride, offset + value.storage_offset())

    return view
