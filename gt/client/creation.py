"""The functions of `gt` that create tensors: torch's own, run inside a mode in which factories create GT tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from gt.client.creation_docstrings import docstring_of
from gt.client.factory_mode import FactoryMode
from gt.client.layouts import current_mesh, require_workers
from gt.client.model_layout import apply_model_config, layouts_of_plain
from gt.client.module_moving import move_module
from gt.client.registration_hooks import keep_on_gt, move_assigned_tensors, watch_modules
from gt.client.safetensors_hooks import LoadOneByOne
from gt.client.storage import TORCH_DTYPES, dtype_name
from gt.client.tensor import Tensor, to_gt, to_host
from gt.client.torch_patches.dispatch import disable_current_modes, tree_map_only
from gt.client.transfers import tensor_of
from gt.core.errors import LayoutError, nearest
from gt.core.meta import TensorMeta, contiguous_strides
from gt.core.tracebacks import ends_on_users_line
from gt.sharding.placements import Layout, Placements, Replicate, Shard, placement_per_axis, require_mesh, spec_from
from gt.sharding.spec import DeviceMesh, ShardingSpec

_Module = TypeVar("_Module", bound=torch.nn.Module)


class _DeviceType(type):
    """Makes `isinstance(x, gt.device)` true for torch's devices."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.device)


class device(metaclass=_DeviceType):  # noqa: N801
    """Inside `with gt.device():` torch's own factory functions create GT tensors, so that a third-party model is built
    on the workers without ever being whole in this process.

    Called with arguments, as torch.device is, it returns torch.device("cpu"), the device of all GT tensors. The workers
    choose the devices that compute.

    >>> with gt.device():
    ...     layer = torch.nn.Linear(3, 2)
    >>> isinstance(layer.weight, gt.Tensor)
    True
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            return _DeviceScope(Tensor)
        asked = torch.device(*args, **kwargs)
        return asked if asked.type == "meta" else torch.device("cpu")


class _DeviceScope(FactoryMode):
    """The context of `with gt.device():`."""

    def __init__(self, cls: type[torch.Tensor]) -> None:
        super().__init__(cls)
        self._list_reads = _ListReads()
        self._lazy_loading = LoadOneByOne()

    def __enter__(self) -> _DeviceScope:
        watch_modules()
        self._lazy_loading.__enter__()
        self._list_reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._list_reads.__exit__(*error)
        self._lazy_loading.__exit__(*error)
        if error[0] is None:
            move_assigned_tensors()


class _ListReads(TorchFunctionMode):
    """Reads GT tensors in the lists that `torch.tensor` is given, whose memory torch reads before it dispatches
    anything; and turns modes off for `torch.asarray` of a storage, which fails inside any mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor or func is torch.as_tensor:
            data = read_tensors_in(args[0] if args else kwargs.pop("data"))
            return func(data, *args[1:], **kwargs)
        if func is torch.asarray and args and isinstance(args[0], torch.UntypedStorage):
            with disable_current_modes():  # memory of this process, such as a mapped file
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def read_tensors_in(data: Any) -> Any:
    """Nested lists with plain tensors in place of GT tensors. Tensors of one element are read together."""
    tensors: list[Tensor] = []
    _collect(data, tensors)
    if not tensors:
        return data
    if len({tensor.dtype for tensor in tensors}) == 1 and all(tensor.numel() == 1 for tensor in tensors):
        values: Iterable[torch.Tensor] = to_host(
            torch.stack([tensor.detach().reshape(()) for tensor in tensors])
        ).unbind()
    else:
        values = map(to_host, tensors)
    return _replaced(data, {id(tensor): value for tensor, value in zip(tensors, values, strict=True)})


def _collect(data: Any, tensors: list[Tensor]) -> None:
    if not isinstance(data, list | tuple) or not any(issubclass(kind, _CONTAINERS) for kind in set(map(type, data))):
        return  # a long list of numbers
    for item in data:
        if isinstance(item, Tensor):
            tensors.append(item)
        else:
            _collect(item, tensors)


_CONTAINERS = (list, tuple, Tensor)


def _replaced(data: Any, values: dict[int, torch.Tensor]) -> Any:
    if isinstance(data, list | tuple):
        return [_replaced(item, values) for item in data]
    return values.get(id(data), data)


def _on_gt(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """A factory on GT. With `mesh=` and `placements=` each worker makes its part of the tensor; without placements,
    each worker of the mesh makes the whole tensor."""

    @ends_on_users_line
    @functools.wraps(function)
    def create(
        *args: Any, mesh: DeviceMesh | None = None, placements: Placements | None = None, **kwargs: Any
    ) -> Tensor:
        with FactoryMode(Tensor, layout_of(mesh, placements)):
            if "dtype" in kwargs:
                kwargs["dtype"] = dtype_of(kwargs["dtype"])
            return function(*args, **kwargs)  # type: ignore[no-any-return]

    create.__doc__ = docstring_of(function.__name__)
    return create


def _on_gt_tensors(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function of GT tensors; plain tensors among its arguments are moved to GT first."""

    @ends_on_users_line
    @functools.wraps(function)
    def create(
        *args: Any, mesh: DeviceMesh | None = None, placements: Placements | None = None, **kwargs: Any
    ) -> Tensor:
        args, kwargs = tree_map_only(torch.Tensor, to_gt, (args, kwargs))
        if "dtype" in kwargs:
            kwargs["dtype"] = dtype_of(kwargs["dtype"])
        return _laid_out(function(*args, **kwargs), mesh, placements)

    create.__doc__ = docstring_of(function.__name__)
    return create


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype, which may be given by its name: `"float32"`."""
    if not isinstance(dtype, str):
        return dtype
    found = TORCH_DTYPES.get(dtype.removeprefix("torch."))
    if found is None:
        raise TypeError(f"dtype={dtype!r} is no dtype of GT; {nearest(dtype, TORCH_DTYPES)}")
    return found


def layout_of(mesh: DeviceMesh | None, placements: Placements | None) -> Layout | None:
    """The layout that the arguments `mesh` and `placements` give; None without them. Placements without a mesh are on
    the open one."""
    if mesh is None and placements is None:
        return None
    if mesh is None:
        mesh = placements.mesh if isinstance(placements, ShardingSpec) else current_mesh()
    if mesh is None:
        raise LayoutError(
            "placements= needs mesh=: say over which workers, as in mesh=gt.mesh((2, 2), ('dp', 'tp')), or once for "
            "several calls, with gt.open_mesh((2, 2), ('dp', 'tp')):"
        )
    if placements is None:
        placements = [Replicate()] * len(require_mesh(mesh).shape)
    is_spec = isinstance(placements, str | ShardingSpec)
    return Layout(require_workers(mesh), placements if is_spec else placement_per_axis(placements))  # type: ignore[arg-type]


def _laid_out(x: torch.Tensor, mesh: DeviceMesh | None, placements: Placements | None) -> Tensor:
    """A tensor on GT in the layout that the caller gave, if any."""
    layout = layout_of(mesh, placements)
    if layout is None:
        return to_gt(x)
    shape = tuple(x.shape)
    meta = TensorMeta(shape, contiguous_strides(shape), 0, dtype_name(x.dtype))
    return to_gt(x, spec_from(layout.placements, layout.mesh, meta))


@ends_on_users_line
def distribute(
    x: torch.Tensor | np.ndarray[Any, Any], mesh: DeviceMesh | None = None, placements: Placements | None = None
) -> Tensor:  # fmt: skip
    """A copy of a tensor or array, laid out over a mesh: a placement for each axis of the mesh, or a spec as text such
    as `"dp, - + tp"`; whole on every worker without placements. Without a mesh it is the one of gt.open_mesh. Gradients
    pass.

    >>> gt.init(workers=4, mode="virtual")
    >>> mesh = gt.mesh((2, 2), ("dp", "tp"))
    >>> x = gt.distribute(torch.ones(4, 6), mesh, [gt.Shard(0), gt.Replicate()])
    >>> x.spec, x.shards()[0].shape
    (ShardingSpec('dp, -' on (dp=2, tp=2)), (2, 6))
    """
    value = tensor_of(x)
    if not isinstance(value, torch.Tensor):
        raise LayoutError(
            f"{type(x).__name__} is not a tensor, which alone has a layout: make one, with gt.tensor(data)"
        )
    if not isinstance(placements, ShardingSpec):
        mesh = require_mesh(mesh or current_mesh())
    return _laid_out(value, mesh, placements)


@ends_on_users_line
def shard(x: torch.Tensor | np.ndarray[Any, Any], mesh: DeviceMesh | None = None, dim: int = 0) -> Tensor:
    """A copy of a tensor or array with one dim cut over all of a mesh, or of the open one, in the order of its axes.

    >>> gt.init(workers=2, mode="virtual")
    >>> gt.shard(torch.ones(4, 6), gt.mesh(2), dim=1).shards()[0].shape
    (4, 3)
    """
    own = require_mesh(mesh or current_mesh())
    return distribute(x, own, [Shard(dim)] * len(own.shape))


@ends_on_users_line
def replicate(x: torch.Tensor | np.ndarray[Any, Any], mesh: DeviceMesh | None = None) -> Tensor:
    """A copy of a tensor or array that is whole on every worker of a mesh, or of the open one.

    >>> gt.init(workers=2, mode="virtual")
    >>> gt.replicate(torch.ones(4, 6), gt.mesh(2)).spec.is_whole
    True
    """
    return distribute(x, mesh)


zeros, ones, full, empty = _on_gt(torch.zeros), _on_gt(torch.ones), _on_gt(torch.full), _on_gt(torch.empty)
eye, arange, linspace = _on_gt(torch.eye), _on_gt(torch.arange), _on_gt(torch.linspace)
rand, randn, randint, randperm = _on_gt(torch.rand), _on_gt(torch.randn), _on_gt(torch.randint), _on_gt(torch.randperm)

logspace, normal, scalar_tensor = _on_gt(torch.logspace), _on_gt(torch.normal), _on_gt(torch.scalar_tensor)
empty_strided, tril_indices, triu_indices = map(_on_gt, (torch.empty_strided, torch.tril_indices, torch.triu_indices))
bartlett_window, blackman_window, hamming_window, hann_window, kaiser_window = map(
    _on_gt,
    (torch.bartlett_window, torch.blackman_window, torch.hamming_window, torch.hann_window, torch.kaiser_window),
)

bernoulli = _on_gt_tensors(torch.bernoulli)
zeros_like = _on_gt_tensors(torch.zeros_like)
ones_like = _on_gt_tensors(torch.ones_like)
full_like = _on_gt_tensors(torch.full_like)
empty_like = _on_gt_tensors(torch.empty_like)
rand_like = _on_gt_tensors(torch.rand_like)
randn_like = _on_gt_tensors(torch.randn_like)
randint_like = _on_gt_tensors(torch.randint_like)


@ends_on_users_line
def tensor(
    data: Any,
    *,
    dtype: torch.dtype | str | None = None,
    device: Any = None,
    requires_grad: bool = False,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> Tensor:
    """A new tensor with a copy of the data, as torch.tensor. `device` is ignored; `mesh` and `placements` give the
    layout.

    >>> x = gt.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    >>> x.sum().item()
    10.0
    """
    dtype = dtype_of(dtype)
    if isinstance(data, Tensor):
        copy: Any = data.detach().clone() if dtype is None else data.detach().to(dtype, copy=True)
    elif isinstance(data, torch.Tensor):
        copy = data.detach().to(dtype or data.dtype)
    else:
        copy = torch.tensor(read_tensors_in(data), dtype=dtype)
    made = _laid_out(copy, mesh, placements)
    return made.requires_grad_() if requires_grad else made  # type: ignore[return-value]


@ends_on_users_line
def as_tensor(
    data: Any,
    dtype: torch.dtype | str | None = None,
    device: Any = None,
    *,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> Tensor:
    """The data on GT: itself if it is a GT tensor of that dtype.

    >>> x = gt.ones(2)
    >>> gt.as_tensor(x) is x, gt.as_tensor([1, 2]).tolist()
    (True, [1, 2])

    `gt.asarray` is the same function.
    """
    dtype = dtype_of(dtype)
    if isinstance(data, Tensor):
        return _laid_out(data if dtype is None else data.to(dtype), mesh, placements)  # type: ignore[arg-type]
    return _laid_out(torch.as_tensor(read_tensors_in(data), dtype=dtype), mesh, placements)


@ends_on_users_line
def from_numpy(
    array: np.ndarray[Any, Any],
    *,
    requires_grad: bool = False,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> Tensor:
    """A copy of an array on GT. Unlike torch.from_numpy it does not share memory: a worker may be elsewhere.

    >>> import numpy as np
    >>> gt.from_numpy(np.arange(3)).tolist()
    [0, 1, 2]
    """
    made = _laid_out(torch.from_numpy(array), mesh, placements)
    return made.requires_grad_() if requires_grad else made  # type: ignore[return-value]


asarray = as_tensor


def manual_seed(seed: int) -> torch.Generator:
    """Seed random ops. Their keys are drawn from torch's generator, so torch.manual_seed does the same.

    >>> seeded = gt.manual_seed(0)
    >>> x = gt.randn(3)
    >>> seeded = gt.manual_seed(0)
    >>> torch.equal(x, gt.randn(3))
    True
    """
    return torch.manual_seed(seed)


@overload
def to(what: torch.Tensor | np.ndarray[Any, Any]) -> Tensor: ...


@overload
def to(what: _Module) -> _Module: ...  # type: ignore[overload-cannot-match]


@ends_on_users_line
def to(what: Any) -> Any:
    """Move a tensor, or a module in place with its parameters and buffers; tied weights stay tied. A module is laid out
    as the `model` section of the configuration says.

    >>> model = gt.to(torch.nn.Linear(3, 2))
    >>> x = gt.to(torch.ones(4, 3))
    >>> model(x).shape
    torch.Size([4, 2])
    """
    if isinstance(what, Tensor):
        what._ref.session.require_open()
    if isinstance(what, torch.Tensor):
        return to_gt(what)
    if isinstance(what, torch.nn.Module):
        placed = move_module(what, layouts_of_plain(what))
        keep_on_gt(what)
        apply_model_config(what, placed)
        return what
    if isinstance(what, np.ndarray):
        return from_numpy(what)
    raise TypeError(f"gt.to() moves a tensor, an array or a torch.nn.Module, not {type(what).__name__}")
