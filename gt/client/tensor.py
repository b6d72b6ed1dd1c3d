"""`gt.Tensor`: a torch tensor whose bytes are on workers.

Torch does the autograd, the modules and the optimizers; ops arrive at `__torch_dispatch__`, which is `dispatch`.
Methods that would access memory in torch read the value first, or raise.
"""

from __future__ import annotations

import contextlib
import copy as copying
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from gt.client import active_session
from gt.client.cached_calls import HandleType, rebind, wrap, wrap_view
from gt.client.error_text import refuse_other_processes, require_strided, require_values
from gt.client.layouts import (
    LocalShard,
    Topology,
    layout_to_save,
    read_layout,
    read_shards,
    read_topology,
    require_workers,
    saved_layout,
)
from gt.client.operators import install_operators
from gt.client.printing import SHOWN_ELEMENTS, corner, describe, describe_html, describe_without_value, edges
from gt.client.session_reads import fetch, locate
from gt.client.storage import REINTERPRETING, Storage, StorageView, TensorRef
from gt.client.subclasses import has_memory, make_subclasses_on_gt, on_gt
from gt.client.tensor_methods import InPlaceViews, MemoryMethods, ValueReads
from gt.client.torch_dispatch import dispatch
from gt.client.torch_patches.autograd_nodes import refuse_backward
from gt.client.torch_patches.avoided_imports import hide_from_dynamo, keep_dtensor_out
from gt.client.torch_patches.checkpoint_staging import patch_staging
from gt.client.torch_patches.dispatch import OpOverload, is_transformed, tree_map, tree_map_only
from gt.client.torch_patches.nn_modules import patch_module_cpu
from gt.client.torch_patches.optimizer_defaults import patch_optimizer_defaults
from gt.client.torch_patches.tensors import no_torch_function, patch_data_property, patch_swapping, swap_tensors
from gt.client.transfers import from_array, torch_call
from gt.core.errors import GTError, LayoutError
from gt.core.meta import is_dense
from gt.core.tables import html_text
from gt.core.tracebacks import ends_on_users_line
from gt.sharding.placements import OpRequest, Placements, Replicate, require_mesh, spec_from
from gt.sharding.spec import DeviceMesh, ShardingSpec

_DETACH = torch.ops.aten.detach.default


def dispatch_of_object(
    cls: HandleType, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None, request: OpRequest | None = None
) -> Any:
    """The `__torch_dispatch__` of tensors that are no handles. The results are handles, except of `detach`: torch makes
    parameters only of tensors that keep their class there."""
    return dispatch(cls if func is _DETACH else Handle, func, types, args, kwargs, request)


class Tensor(ValueReads, InPlaceViews, MemoryMethods):
    """A tensor on GT: a torch tensor without bytes, which refers to a storage on workers, or to a view of one.

    It is a `torch.Tensor`: all of torch's functions and methods work on it. Values are read by `print`, `item()`,
    `tolist()`, `numpy()` and `cpu()`, which wait; everything else returns at once.

    >>> x = gt.ones(2, 3)
    >>> isinstance(x, torch.Tensor)
    True
    >>> x
    gt.Tensor([[1., 1., 1.],
               [1., 1., 1.]], shape=(2, 3), dtype=torch.float32, on=worker 0)
    """

    __slots__ = ()
    _ref: TensorRef
    __torch_function__ = no_torch_function
    __torch_dispatch__ = classmethod(dispatch_of_object)  # type: ignore[assignment]
    user_type: type[torch.Tensor] = torch.Tensor  # the class of its plain copies

    def __new__(cls, *args: Any, requires_grad: bool | None = None, _marked: bool = False, **kwargs: Any) -> Any:
        """With `requires_grad`, a parameter: accelerate calls `type(parameter)(data, requires_grad=...)`, also with all
        attributes of the parameter. Otherwise the tensor that `torch.Tensor` makes of the arguments, on GT."""
        if requires_grad is not None:
            (data,) = args
            return torch.nn.Parameter(data if data.is_meta else to_gt(data), requires_grad)
        if args and isinstance(args[0], Tensor):
            return super().__new__(cls, *args, **kwargs)
        return of_class(cls, to_gt(torch.Tensor(*args, **kwargs)))

    @property
    def _is_param(self) -> bool:
        """The flag that makes torch take a tensor of a subclass for a parameter. The storage is marked too, for signal
        scopes."""
        return "_marked" in self.__dict__

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        if value:
            self.__dict__["_marked"] = True
            self._ref.storage.is_parameter = True
        else:
            self.__dict__.pop("_marked", None)

    # Reading

    @ends_on_users_line
    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """A plain tensor with this value. Differentiable: its gradient comes back to GT.

        >>> type(gt.ones(2).cpu())
        <class 'torch.Tensor'>
        """
        copy = _DownloadFunction.apply(self, None)
        return copy if self.user_type is torch.Tensor else copy.as_subclass(self.user_type)  # type: ignore[no-any-return]

    @ends_on_users_line
    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Run a ufunc (`array + tensor`, `np.sin(tensor)`) on GT if torch has the same function, so that gradients
        pass. NumPy computes the others, of the values."""
        call = torch_call(ufunc.__name__, inputs) if method == "__call__" and not options else None
        if call is not None:
            function, operands = call
            return function(*operands)
        targets = inputs[:1] if method == "at" else options.get("out", ())
        if any(isinstance(target, torch.Tensor) for target in targets):
            raise TypeError(f"numpy.{ufunc.__name__} cannot write to a tensor, only to an array")
        args, options = tree_map_only(torch.Tensor, lambda tensor: tensor.numpy(), (inputs, options))
        result = getattr(ufunc, method)(*args, **options)
        return (
            result if result is None or "out" in options else tree_map(lambda value: to_gt(from_array(value)), result)
        )

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """The result of another NumPy function (`np.clip`), on GT."""
        return to_gt(from_array(array))

    @ends_on_users_line
    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, np.ndarray | np.generic):
            value = torch.as_tensor(value)
        super().__setitem__(index, value)

    @ends_on_users_line  # type: ignore[arg-type]
    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with torch.no_grad():
            plain = self.detach()
            shown = plain if plain.numel() <= SHOWN_ELEMENTS else edges(plain)
            return describe(self, shown._fetch(), locate(self._ref))

    def _repr_html_(self) -> str:
        """For notebooks. Reads a few values only, and says which; a tensor that has failed says why."""
        try:
            with torch.no_grad():
                shown, which = corner(self.detach())
                return describe_html(self, shown._fetch(), which, locate(self._ref))  # type: ignore[attr-defined]
        except GTError as error:
            return html_text(describe_without_value(self, error))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For IPython, which would print the traceback of a tensor that has failed."""
        try:
            printer.text(repr(self))
        except GTError as error:
            printer.text(describe_without_value(self, error))

    # Layout

    @property
    @ends_on_users_line
    def spec(self) -> ShardingSpec:
        """The layout of the tensor over workers.

        >>> gt.ones(2, 3).spec
        ShardingSpec('-, -' on (w=1))
        """
        return read_layout(self._ref)

    @property
    @ends_on_users_line
    def topology(self) -> Topology:
        """The mesh of the tensor, a placement for each axis of it, and the coordinate of each worker."""
        return read_topology(self._ref)

    @ends_on_users_line
    def shards(self) -> dict[int, LocalShard]:
        """The part of the tensor that each worker holds.

        >>> gt.init(workers=2, mode="virtual")
        >>> {worker: part.shape for worker, part in gt.randn(4, 3).shards().items()}
        {0: (2, 3), 1: (2, 3)}
        """
        return read_shards(self._ref)

    @ends_on_users_line
    def redistribute(self, mesh: DeviceMesh | None = None, placements: Placements | None = None) -> Tensor:
        """A copy in another layout: on the same mesh if none is given, replicated if no placements are.

        >>> gt.init(workers=2, mode="virtual")
        >>> x = gt.ones(4, 6, mesh=gt.mesh(2, ("tp",)), placements="tp, -")
        >>> x.redistribute(placements="-, tp").spec
        ShardingSpec('-, tp' on (tp=2))
        """
        if mesh is None:
            mesh = placements.mesh if isinstance(placements, ShardingSpec) else self.spec.mesh
        if placements is None:
            placements = [Replicate()] * len(require_mesh(mesh).shape)
        spec = spec_from(placements, require_workers(mesh), self._ref.geometry.meta())
        return _RedistributeFunction.apply(self, spec)  # type: ignore[no-any-return]

    def full_tensor(self) -> torch.Tensor:
        """The whole value as a plain tensor, as DTensor's method of this name; the same as `cpu()`.

        >>> gt.ones(2).full_tensor()
        tensor([1., 1.])
        """
        return self.cpu()

    # Copying

    def as_subclass(self, cls: Any) -> Any:
        """The same tensor, of a class that is both a user's and GT's."""
        return of_class(cls, torch.ops.aten.alias.default(self))

    def __copy__(self) -> Any:
        """Another leaf of the same storage."""
        new: Any = of_class(self.user_type, self.data.requires_grad_(self.requires_grad))
        new.__dict__.update(self._attributes())
        return new

    def _attributes(self) -> dict[str, Any]:
        """What the program and its libraries have noted on the tensor, and the mark of a parameter."""
        return {name: value for name, value in self.__dict__.items() if name != "_ref"}

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
            )
        copied = wrap(Handle, self._copied_ref(memo)).requires_grad_(self.requires_grad)
        new: Any = of_class(self.user_type, copied)  # type: ignore[arg-type]
        memo[id(self)] = new
        if self.grad is not None and not self._is_param:  # as torch does
            new.grad = copying.deepcopy(self.grad, memo)
        new.__dict__.update(copying.deepcopy(self._attributes(), memo))
        new._is_param = self._is_param
        return new

    def _copied_ref(self, memo: dict[Any, Any]) -> TensorRef:
        """A parameter is copied by itself, other tensors with their whole storage."""
        if self._is_param:
            return self.data.clone()._ref  # type: ignore[no-any-return]
        return _copied(self._ref, memo.setdefault("gt", {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = self._attributes()
        build, arguments = self._recipe(state.pop("_marked", False))
        if self.user_type is not torch.Tensor:
            build, arguments = restore_subclass, (self.user_type, build, arguments)
        return build, arguments, state or None

    def _recipe(self, is_parameter: bool) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """A function that unpickling calls, and its arguments."""
        storage = _storage_of(self._ref)
        if storage is None:
            return restore, (self._fetch(), self.requires_grad, is_parameter)
        geometry = self._ref.geometry
        view = (tuple(geometry.shape), geometry.stride, geometry.offset)
        return restore_part, (storage, *view, self.requires_grad, is_parameter)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def data(self) -> Any:
        """A handle of the same storage with its own version counter: autograd does not notice writes to it."""
        return wrap_view(Handle, self._ref)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            rebind(self, self._as_data(value.detach())._ref)

    def _as_data(self, value: torch.Tensor) -> Tensor:
        """A value for `data`. A plain one, or one of another shape, as of resized embeddings, lies as the parameter."""
        shape = self._ref.geometry.shape  # lazy parameters have no other
        is_alike = isinstance(value, Tensor) and value.shape == shape
        layout = self._layout_if_known() if self._is_param and value.dim() == len(shape) and not is_alike else None
        if layout is None or not isinstance(value, Tensor):
            return to_gt(value, layout)
        if value._ref is value._ref.storage:
            value._ref.session.place(value._ref.storage, layout)
        return value

    def _layout_if_known(self) -> ShardingSpec | None:
        """The dims that are cut, for a tensor that may have other sizes. None on one worker, or if the tensor is
        lost."""
        with contextlib.suppress(GTError):
            spec = None if self._ref.session.alone else read_layout(self._ref)
            if spec is not None and spec.mesh.size > 1:
                return ShardingSpec(spec.mesh, spec.dims)
        return None

    # Functions of Python for every element

    def apply_(self, function: Callable[[Any], Any]) -> Any:
        return self._change("apply_", lambda plain: plain.apply_(function))

    def map_(self, other: torch.Tensor, function: Callable[[Any, Any], Any]) -> Any:  # type: ignore[override]
        return self._change("map_", lambda plain: plain.map_(to_host(other), function))

    def map2_(self, x: torch.Tensor, y: torch.Tensor, function: Callable[[Any, Any, Any], Any]) -> Any:  # type: ignore[override]
        return self._change("map2_", lambda plain: plain.map2_(to_host(x), to_host(y), function))

    def _change(self, name: str, change: Callable[[torch.Tensor], Any]) -> Tensor:
        """Read the value, change it, and write it back. As in torch, autograd does not notice."""
        if self.requires_grad:
            raise RuntimeError(
                f"Can't call {name}() on Variable that requires grad. Use var.detach().{name}() instead."
            )
        self.data.copy_(change(self._fetch()))
        return self


class Handle(Tensor):
    """The class of the results of ops. A slot makes a tensor in two thirds of the time, but only an object without it
    may have been a plain tensor before."""

    __slots__ = ("_ref",)
    __torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment]


Handle.__name__ = Handle.__qualname__ = Tensor.__name__  # one class to the program


def as_object(target: Any, tensor: Tensor, cls: type[torch.Tensor]) -> Any:
    """Make an object that is no handle the given tensor, with all that autograd knows of that. Whoever holds the object
    holds the tensor then."""
    swap_tensors(target, tensor)
    target.__class__ = cls
    target._ref = tensor._ref
    return target


def _exchange(first: Tensor, second: Tensor) -> None:
    """Exchange two tensors: each object becomes the other tensor, with the attributes of that."""
    for tensor in (first, second):
        refuse_backward(tensor, "a tensor of this graph was exchanged after its forward: run the forward again")
    swap_tensors(first, second)
    first._ref, second._ref = second._ref, first._ref  # type: ignore[misc]
    attributes = first._attributes(), second._attributes()
    for tensor, old, new in zip((first, second), attributes, reversed(attributes), strict=True):
        for name in old:
            del tensor.__dict__[name]
        tensor.__dict__.update(new)
    if Handle not in (type(first), type(second)):
        first.__class__, second.__class__ = type(second), type(first)


def of_class(cls: type[torch.Tensor], tensor: Tensor) -> Any:
    """A tensor of a user's class and GT's; itself for torch's own class."""
    kind = on_gt(cls, Tensor)
    return tensor if kind in (Tensor, Handle) else as_object(wrap(Tensor, tensor._ref), tensor, kind)


class _Transfer(torch.autograd.Function):
    """A tensor moved to another place or layout, for autograd, forward-mode AD and the transforms of `torch.func`: its
    gradient goes the other way, and its tangent the same."""

    generate_vmap_rule = False

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.layout = inputs[1]

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], tensor: torch.Tensor, layout: ShardingSpec | None) -> Any:
        if layout is not None:
            raise LayoutError(
                "inside torch.vmap a tensor is one of a batch, and has no layout of its own: lay out the batch before"
            )
        return cls.apply(tensor, None), in_dims[0]


class _DownloadFunction(_Transfer):
    """The autograd function of `cpu()`."""

    @staticmethod
    def forward(tensor: torch.Tensor, layout: None) -> torch.Tensor:
        return to_host(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return to_gt(gradient), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:
        return tangent.cpu()


class _UploadFunction(_Transfer):
    """The autograd function of `gt.to(tensor)`."""

    @staticmethod
    def forward(tensor: torch.Tensor, layout: ShardingSpec | None) -> torch.Tensor:
        """Transforms hide that a tensor is on GT until here."""
        return tensor.view_as(tensor) if isinstance(tensor, Tensor) else _uploaded(tensor, layout)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.cpu(), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:
        return to_gt(tangent, ctx.layout)


class _RedistributeFunction(_Transfer):
    """The autograd function of `redistribute()`: the gradient keeps its layout."""

    @staticmethod
    def forward(tensor: Tensor, layout: ShardingSpec) -> Tensor:
        return wrap(Handle, tensor._ref.session.redistribute(tensor._ref, layout))  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:
        return to_gt(tangent, ctx.layout)


def _uploaded(tensor: torch.Tensor, layout: ShardingSpec | None = None) -> Tensor:
    return wrap(Handle, active_session.current().upload(tensor, layout))  # type: ignore[return-value]


_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor of the same value, detached from any graph."""
    return tensor._fetch() if isinstance(tensor, Tensor) else tensor


def to_gt(tensor: torch.Tensor, layout: ShardingSpec | None = None) -> Tensor:
    """A tensor on GT, in a layout if one is given: itself if it is one, otherwise an upload that gradients pass
    through."""
    if isinstance(tensor, Tensor):
        return tensor if layout is None else tensor.redistribute(placements=layout)
    require_strided(tensor)
    require_values(tensor)
    plain = tensor.as_subclass(torch.Tensor) if has_memory(type(tensor)) else tensor
    has_graph = (plain.requires_grad and torch.is_grad_enabled()) or is_transformed()
    moved: Tensor = _UploadFunction.apply(plain, layout) if has_graph else _uploaded(plain, layout)
    if type(tensor) not in _PLAIN_TYPES and has_memory(type(tensor)):
        moved = of_class(type(tensor), moved)
        moved.__dict__.update(tensor.__dict__)
    return moved


def _copied(ref: TensorRef, copies: dict[int, tuple[Storage, Storage]]) -> TensorRef:
    """The same tensor in a copy of its storage. Each storage is copied once, so that tensors that share it share the
    copy."""
    storage = ref.storage
    if id(storage) not in copies:
        copies[id(storage)] = storage, wrap(Handle, storage).clone()._ref  # type: ignore[attr-defined]
    copy = copies[id(storage)][1]
    if copy.geometry is not storage.geometry:  # a copy has no gaps, so views of it have other strides
        return wrap(Handle, ref).clone()._ref  # type: ignore[attr-defined, no-any-return]
    return copy if ref.path is None else StorageView(copy, ref.path, ref.geometry)


class _PickledStorage:
    """The bytes of a storage as an object to pickle: a pickler recognises an object that it has pickled before."""

    __slots__ = ("__weakref__", "_storage")

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __reduce_ex__(self, protocol: Any) -> Any:
        return restore, (fetch(self._storage), False, False, layout_to_save(self._storage))


_storages: WeakValueDictionary[int, _PickledStorage] = WeakValueDictionary()  # storages being pickled, by id()


def _storage_of(ref: TensorRef) -> _PickledStorage | None:
    """The object to pickle for a tensor so that it stays tied to others of its storage. None if the tensor is not
    given by strides, or if the storage has gaps, which are not restored."""
    storage = ref.storage
    steps = ref.path.steps if ref.path is not None else ()
    reinterpreted = storage.geometry.dtype is not ref.geometry.dtype or any(step.op in REINTERPRETING for step in steps)
    if reinterpreted or not is_dense(storage.geometry.shape, storage.geometry.stride):
        return None
    return _storages.setdefault(id(storage), _PickledStorage(storage))


def restore(
    value: torch.Tensor, requires_grad: bool, is_parameter: bool, layout: Sequence[Any] | None = None
) -> Tensor:  # fmt: skip
    """Unpickle a tensor: upload its value, in the layout that it had if the session has the workers of that."""
    return _restored(_uploaded(value, saved_layout(layout, value.dim())), requires_grad, is_parameter)


def restore_part(
    storage: Tensor,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    requires_grad: bool,
    is_parameter: bool,
) -> Tensor:
    """Unpickle a tensor that is all of a storage, or a view of it."""
    whole = storage._ref.geometry
    is_whole = (shape, stride, offset) == (tuple(whole.shape), whole.stride, 0)
    part = storage if is_whole else storage.as_strided(shape, stride, offset)
    return _restored(part.data, requires_grad, is_parameter)


def restore_subclass(kind: type[torch.Tensor], build: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Tensor:
    """Unpickle a tensor of a user's class."""
    return of_class(kind, build(*arguments))  # type: ignore[no-any-return]


def _restored(tensor: Tensor, requires_grad: bool, is_parameter: bool) -> Tensor:
    tensor.requires_grad_(requires_grad)
    if is_parameter:
        tensor._is_param = True
    return tensor


keep_dtensor_out({Tensor: dispatch_of_object, Handle: dispatch})
hide_from_dynamo(dispatch)
hide_from_dynamo(dispatch_of_object)
install_operators(Tensor, Handle)
make_subclasses_on_gt(Tensor, of_class)
patch_data_property(Tensor)
patch_module_cpu(Tensor)
patch_swapping(Tensor, _exchange)
patch_optimizer_defaults((Tensor, Handle))
patch_staging(Tensor)
refuse_other_processes(Tensor)
refuse_other_processes(Handle)
torch.serialization.add_safe_globals([restore, restore_part, restore_subclass])
