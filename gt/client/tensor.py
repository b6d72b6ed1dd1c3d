"""`gt.Tensor`: a torch tensor whose bytes are on a worker.

torch does the autograd, the modules and the optimizers; ops arrive at `__torch_dispatch__` and go through the door.
What would read memory that is not here fetches it first, or says that it cannot.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from gt.client import session as sessions
from gt.client.call_cache import rebind, wrap, wrap_view
from gt.client.dispatch import dispatch
from gt.client.host_data import from_array, torch_call
from gt.client.layouts import LocalShard, shards_of_ref, spec_of_ref
from gt.client.library_hooks import let_libraries_read
from gt.client.printing import SHOWN_ELEMENTS, corner, describe
from gt.client.storage import REINTERPRETING, Storage, StorageView, TensorRef
from gt.client.subclasses import has_memory, make_subclasses_on_gt, on_gt
from gt.client.torch_patches.data_property import patch_data_property
from gt.client.torch_patches.dtensor import keep_dtensor_out
from gt.client.torch_patches.dynamo import hide_from_dynamo
from gt.client.torch_patches.handles import is_view, no_torch_function, swap_tensors
from gt.client.torch_patches.pytree import tree_map, tree_map_only
from gt.client.tracebacks import ends_on_users_line
from gt.client.unsupported import require_strided, require_values
from gt.client.untyped_storage import RemoteStorage, address_of, no_memory
from gt.core.meta import is_dense
from gt.sharding.placements import Placements, Replicate, require_mesh, spec_from
from gt.sharding.spec import DeviceMesh, ShardingSpec


class Tensor(torch.Tensor):
    __slots__ = ("_ref",)
    _ref: TensorRef
    __torch_function__ = no_torch_function
    __torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment]
    user_type: type[torch.Tensor] = torch.Tensor  # the class of its plain copies

    @property
    def _is_param(self) -> bool:
        """What torch knows a parameter of a subclass by; its storage is marked too, for signal scopes."""
        return "_marked" in self.__dict__

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        if value:
            self.__dict__["_marked"] = True
            self._ref.storage.is_parameter = True
        else:
            self.__dict__.pop("_marked", None)

    def _fetch(self) -> torch.Tensor:
        return self._ref.session.fetch(self._ref)

    # Reading

    @ends_on_users_line
    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """A plain tensor with this value. Differentiable: its gradient comes back to GT."""
        copy = _Download.apply(self)
        return copy if self.user_type is torch.Tensor else copy.as_subclass(self.user_type)  # type: ignore[no-any-return]

    @ends_on_users_line
    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self._fetch().numpy(force=force)

    @ends_on_users_line
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    @ends_on_users_line
    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """`array + tensor`, `np.sin(tensor)`: computed on GT where torch means the same by it, so that gradients pass.
        The rest NumPy computes, of the values."""
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
        """What NumPy's other functions make of their results (`np.clip`)."""
        return to_gt(from_array(array))

    @ends_on_users_line
    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, np.ndarray | np.generic):
            value = torch.as_tensor(value)
        super().__setitem__(index, value)

    @ends_on_users_line
    def tolist(self) -> Any:
        return self._fetch().tolist()

    @ends_on_users_line
    def item(self) -> Any:
        return self._fetch().item()

    # Torch reads the numbers of a list (`torch.tensor([loss, loss])`) by these, where it does not dispatch.

    @ends_on_users_line
    def __float__(self) -> float:
        return float(self._fetch())

    @ends_on_users_line
    def __int__(self) -> int:
        return int(self._fetch())

    @ends_on_users_line
    def __index__(self) -> int:
        return self._fetch().__index__()

    @ends_on_users_line
    def __complex__(self) -> complex:
        return complex(self._fetch())

    @ends_on_users_line
    def __bool__(self) -> bool:
        return bool(self._fetch())

    @ends_on_users_line
    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 and not self._is_param else object.__format__(self, spec)

    @ends_on_users_line  # type: ignore[arg-type]
    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with torch.no_grad():
            plain = self.detach()
            shown = plain if plain.numel() <= SHOWN_ELEMENTS else corner(plain)
            return describe(self, shown._fetch(), self._ref.session.locate(self._ref))

    @ends_on_users_line
    def __dlpack__(self, **options: Any) -> Any:
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return self._fetch().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0).__dlpack_device__()

    # Layout

    @property
    @ends_on_users_line
    def spec(self) -> ShardingSpec:
        """How the tensor is laid out over workers."""
        return spec_of_ref(self._ref)

    @ends_on_users_line
    def shards(self) -> dict[int, LocalShard]:
        """By worker, which part of the tensor it holds."""
        return shards_of_ref(self._ref)

    @ends_on_users_line
    def redistribute(self, mesh: DeviceMesh | None = None, placements: Placements | None = None) -> Tensor:
        """A copy in another layout: on the same mesh if none is given, replicated if no placements are."""
        if mesh is None:
            mesh = placements.mesh if isinstance(placements, ShardingSpec) else self.spec.mesh
        if placements is None:
            placements = [Replicate()] * len(require_mesh(mesh).shape)
        return _Redistribute.apply(self, spec_from(placements, require_mesh(mesh), self._ref.geometry.meta()))  # type: ignore[no-any-return]

    def full_tensor(self) -> torch.Tensor:
        """The whole value as a plain tensor, as DTensor's method of this name; the same as `cpu()`."""
        return self.cpu()

    # Copying

    def as_subclass(self, cls: Any) -> Any:
        """The same tensor as one of a user's class, which is of ours too."""
        new: Any = torch.ops.aten.alias.default(self)
        new.__class__ = on_gt(cls, Tensor)
        return new

    def __copy__(self) -> Any:
        """Another leaf of the same storage."""
        new: Any = wrap_view(Tensor, self._ref).requires_grad_(self.requires_grad)
        new.__class__ = type(self)
        new.__dict__.update(self.__dict__)
        return new

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
            )
        new: Any = wrap(Tensor, self._copied_ref(memo)).requires_grad_(self.requires_grad)
        new.__class__ = type(self)
        memo[id(self)] = new
        if self.grad is not None and not self._is_param:  # as in torch
            new.grad = copying.deepcopy(self.grad, memo)
        new.__dict__.update(copying.deepcopy(self.__dict__, memo))
        new._is_param = self._is_param
        return new

    def _copied_ref(self, memo: dict[Any, Any]) -> TensorRef:
        """A parameter of torch's is copied by itself, other tensors with their storage."""
        if self._is_param:
            return self.data.clone()._ref  # type: ignore[no-any-return]
        return _copied(self._ref, memo.setdefault("gt", {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = dict(self.__dict__)
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
        place = (tuple(geometry.shape), geometry.stride, geometry.offset)
        return restore_part, (storage, *place, self.requires_grad, is_parameter)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def data(self) -> Any:
        """A handle of the same storage that counts its writes by itself: autograd does not notice them."""
        return wrap_view(Tensor, self._ref)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            rebind(self, to_gt(value.detach())._ref)

    # Views that change in place

    def t_(self) -> Any:
        return self._become("t")

    def transpose_(self, dim0: int, dim1: int) -> Any:
        return self._become("transpose", dim0, dim1)

    def swapaxes_(self, axis0: int, axis1: int) -> Any:
        return self._become("transpose", axis0, axis1)

    def swapdims_(self, dim0: int, dim1: int) -> Any:
        return self._become("transpose", dim0, dim1)

    def squeeze_(self, *dim: Any, **named: Any) -> Any:
        return self._become("squeeze", *dim, **named)

    def unsqueeze_(self, dim: int) -> Any:
        return self._become("unsqueeze", dim)

    def as_strided_(self, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
        return self._become("as_strided", size, stride, storage_offset)

    def _become(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Become a view of this tensor. Autograd remembers the ops that made a view and forgets those that change it in
        place: so this tensor is exchanged for the other view, with all that autograd knows of that."""
        if not (torch.is_grad_enabled() and is_view(self)):
            return getattr(super(), f"{name}_")(*args, **kwargs)
        other = getattr(self, name)(*args, **kwargs)
        self._ref, other._ref = other._ref, self._ref
        swap_tensors(self, other)
        return self

    # What calls Python for every element

    def apply_(self, function: Callable[[Any], Any]) -> Any:
        return self._change("apply_", lambda plain: plain.apply_(function))

    def map_(self, other: torch.Tensor, function: Callable[[Any, Any], Any]) -> Any:  # type: ignore[override]
        return self._change("map_", lambda plain: plain.map_(here(other), function))

    def map2_(self, x: torch.Tensor, y: torch.Tensor, function: Callable[[Any, Any, Any], Any]) -> Any:  # type: ignore[override]
        return self._change("map2_", lambda plain: plain.map2_(here(x), here(y), function))

    def _change(self, name: str, change: Callable[[torch.Tensor], Any]) -> Tensor:
        """Write to the values here, and then there. As in torch, autograd does not notice."""
        if self.requires_grad:
            raise RuntimeError(
                f"Can't call {name}() on Variable that requires grad. Use var.detach().{name}() instead."
            )
        self.data.copy_(change(self._fetch()))
        return self

    # Memory that is not here

    def data_ptr(self) -> int:
        """A number that tells which tensors start at the same byte; no address of memory."""
        return address_of(self._ref)

    def const_data_ptr(self) -> int:
        return address_of(self._ref)

    def untyped_storage(self) -> Any:
        """The size and the identity of the storage, without its bytes."""
        let_libraries_read(Tensor)
        return RemoteStorage(self._ref.storage)

    def storage(self) -> Any:
        let_libraries_read(Tensor)
        return RemoteStorage(self._ref.storage, self.itemsize)

    def _typed_storage(self) -> Any:
        """What the workers of a data loader call to put batches into shared memory."""
        self._ref.session.require_open()
        raise RuntimeError(no_memory("a typed storage"))

    @ends_on_users_line
    def share_memory_(self) -> Any:
        raise RuntimeError(no_memory("share_memory_()"))


class _Download(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> torch.Tensor:
        return tensor._fetch()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return to_gt(gradient)


class _Upload(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> Tensor:
        return _uploaded(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.cpu()


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, spec: ShardingSpec) -> Tensor:
        return wrap(Tensor, tensor._ref.session.redistribute(tensor._ref, spec))  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _uploaded(tensor: torch.Tensor) -> Tensor:
    return wrap(Tensor, sessions.current().upload(tensor))  # type: ignore[return-value]


_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def here(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor of the same value, apart from any graph."""
    return tensor._fetch() if isinstance(tensor, Tensor) else tensor


def to_gt(tensor: torch.Tensor) -> Tensor:
    """A tensor on GT: itself if it is there, otherwise an upload that gradients pass through."""
    if isinstance(tensor, Tensor):
        return tensor
    require_strided(tensor)
    require_values(tensor)
    plain = tensor.as_subclass(torch.Tensor) if has_memory(type(tensor)) else tensor
    moved: Tensor = _Upload.apply(plain) if plain.requires_grad and torch.is_grad_enabled() else _uploaded(plain)
    if type(tensor) not in _PLAIN_TYPES and has_memory(type(tensor)):
        moved.__class__ = on_gt(type(tensor), Tensor)
        moved.__dict__.update(tensor.__dict__)
    return moved


def _copied(ref: TensorRef, copies: dict[int, tuple[Storage, Storage]]) -> TensorRef:
    """A ref in a copy of its storage. Each storage is copied once, so that what shared it shares the copy."""
    storage = ref.storage
    if id(storage) not in copies:
        copies[id(storage)] = storage, wrap(Tensor, storage).clone()._ref  # type: ignore[attr-defined]
    copy = copies[id(storage)][1]
    if copy.geometry is not storage.geometry:  # a copy has no gaps, so its views would be elsewhere
        return wrap(Tensor, ref).clone()._ref  # type: ignore[attr-defined, no-any-return]
    return copy if ref.path is None else StorageView(copy, ref.path, ref.geometry)


class _Storage:
    """The bytes of a storage as something to pickle: a pickler that meets it again knows that it is the same."""

    __slots__ = ("__weakref__", "_storage")

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __reduce_ex__(self, protocol: Any) -> Any:
        return restore, (self._storage.session.fetch(self._storage), False, False)


_storages: WeakValueDictionary[int, _Storage] = WeakValueDictionary()  # by the id of the storage, while one is pickled


def _storage_of(ref: TensorRef) -> _Storage | None:
    """What to pickle of a tensor so that it stays tied to others of its storage. None where its place there cannot be
    said by strides, or where the storage would not come back as it is."""
    storage = ref.storage
    steps = ref.path.steps if ref.path is not None else ()
    reinterpreted = storage.geometry.dtype is not ref.geometry.dtype or any(step.op in REINTERPRETING for step in steps)
    if reinterpreted or not is_dense(storage.geometry.shape, storage.geometry.stride):
        return None
    return _storages.setdefault(id(storage), _Storage(storage))


def restore(value: torch.Tensor, requires_grad: bool, is_parameter: bool) -> Tensor:
    """Unpickle: the value goes back to GT."""
    return _restored(_uploaded(value), requires_grad, is_parameter)


def restore_part(
    storage: Tensor,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    requires_grad: bool,
    is_parameter: bool,
) -> Tensor:
    """Unpickle: all of a storage that is back on GT, or a view of it."""
    whole = storage._ref.geometry
    is_whole = (shape, stride, offset) == (tuple(whole.shape), whole.stride, 0)
    part = storage if is_whole else storage.as_strided(shape, stride, offset)
    return _restored(part.data, requires_grad, is_parameter)


def restore_subclass(kind: type[torch.Tensor], build: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Tensor:
    """Unpickle: a tensor that is of a user's class too."""
    tensor = build(*arguments)
    tensor.__class__ = on_gt(kind, Tensor)
    return tensor


def _restored(tensor: Tensor, requires_grad: bool, is_parameter: bool) -> Tensor:
    tensor.requires_grad_(requires_grad)
    if is_parameter:
        tensor._is_param = True
    return tensor


keep_dtensor_out(Tensor, dispatch)
hide_from_dynamo(dispatch)
make_subclasses_on_gt(Tensor)
patch_data_property(Tensor)
torch.serialization.add_safe_globals([restore, restore_part, restore_subclass])
