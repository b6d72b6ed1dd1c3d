"""`gt.Tensor`: a torch tensor whose bytes are on a worker.

torch does the autograd, the modules and the optimizers; ops arrive at `__torch_dispatch__` and go through the door.
What would read memory that is not here fetches it first, or says that it cannot.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gt.client import session as sessions
from gt.client.door import dispatch
from gt.client.entries import rebind, wrap
from gt.client.layouts import LocalShard, shards_of_node, spec_of_node
from gt.client.nodes import Node
from gt.client.printing import SHOWN_ELEMENTS, corner, describe
from gt.client.quirks import hide_from_dynamo, keep_dtensor_out
from gt.sharding.placements import Placements, Replicate, spec_from
from gt.sharding.spec import DeviceMesh, ShardingSpec


class Tensor(torch.Tensor):
    __slots__ = ("_node",)
    _node: Node
    __torch_function__ = torch._C._disabled_torch_function_impl
    __torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment]

    @property
    def _is_param(self) -> bool:
        """What torch knows a parameter of a subclass by; its storage is marked too, for signal scopes."""
        return "_marked" in self.__dict__

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        if value:
            self.__dict__["_marked"] = True
            self._node.base.is_parameter = True
        else:
            self.__dict__.pop("_marked", None)

    def _fetch(self) -> torch.Tensor:
        return self._node.session.fetch(self._node)

    # Reading

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """A plain tensor with this value. Differentiable: its gradient comes back to GT."""
        return _Download.apply(self)  # type: ignore[no-any-return]

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self._fetch().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """`array + tensor`, `np.add(array, tensor)`, `np.sin(tensor)`: computed on GT, as the operator would be."""
        function = _UFUNCS.get(ufunc.__name__) or getattr(torch, ufunc.__name__, None)
        if method != "__call__" or options or function is None:
            raise TypeError(f"numpy.{ufunc.__name__} ({method}) cannot work on a GT tensor; take tensor.numpy() first")
        return function(*[to_gt(torch.from_numpy(x)) if isinstance(x, np.ndarray) else x for x in inputs])

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, np.ndarray | np.generic):
            value = torch.as_tensor(value)
        super().__setitem__(index, value)

    def tolist(self) -> Any:
        return self._fetch().tolist()

    def item(self) -> Any:
        return self._fetch().item()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec and self.dim() == 0 else format(repr(self), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with torch.no_grad():
            plain = self.detach()
            shown = plain if plain.numel() <= SHOWN_ELEMENTS else corner(plain)
            return describe(self, shown._fetch(), self._node.session.locate(self._node))

    def __dlpack__(self, **options: Any) -> Any:
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return self._fetch().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0).__dlpack_device__()

    # Layout

    @property
    def spec(self) -> ShardingSpec:
        """How the tensor is laid out over workers."""
        return spec_of_node(self._node)

    def shards(self) -> dict[int, LocalShard]:
        """By worker, which part of the tensor it holds."""
        return shards_of_node(self._node)

    def redistribute(self, mesh: DeviceMesh | None = None, placements: Placements | None = None) -> Tensor:
        """A copy in another layout: on the same mesh if none is given, replicated if no placements are."""
        if mesh is None:
            mesh = placements.mesh if isinstance(placements, ShardingSpec) else self.spec.mesh
        if placements is None:
            placements = [Replicate()] * len(mesh.shape)
        return _Redistribute.apply(self, spec_from(placements, mesh, self._node.geometry.meta()))  # type: ignore[no-any-return]

    def full_tensor(self) -> torch.Tensor:
        """The whole value as a plain tensor, as DTensor's method of this name; the same as `cpu()`."""
        return self.cpu()

    # Copying

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
            )
        with torch.no_grad():
            new = self.detach().clone()
        new.requires_grad_(self.requires_grad)
        memo[id(self)] = new
        if self.grad is not None:
            new.grad = copying.deepcopy(self.grad, memo)
        new.__dict__.update(copying.deepcopy(self.__dict__, memo))
        new._is_param = self._is_param
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = dict(self.__dict__)
        is_parameter = state.pop("_marked", False)
        return restore, (self._fetch(), self.requires_grad, is_parameter), state or None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            rebind(self, to_gt(value.detach())._node)

    # What needs memory that is not here

    def data_ptr(self) -> int:
        raise _no_memory("data_ptr()")

    def untyped_storage(self) -> Any:
        raise _no_memory("untyped_storage()")

    def storage(self) -> Any:
        raise _no_memory("storage()")

    def share_memory_(self) -> Any:
        raise _no_memory("share_memory_()")


_UFUNCS: dict[str, Callable[..., Any]] = {
    "true_divide": torch.true_divide,
    "divide": torch.true_divide,
    "power": torch.pow,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "absolute": torch.abs,
    "negative": torch.neg,
    "invert": torch.bitwise_not,
    "left_shift": torch.bitwise_left_shift,
    "right_shift": torch.bitwise_right_shift,
}


def _no_memory(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} is not possible on a GT tensor: its bytes are on a worker; use tensor.cpu() for a copy here"
    )


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
        return wrap(Tensor, tensor._node.session.redistribute(tensor._node, spec))  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _uploaded(tensor: torch.Tensor) -> Tensor:
    return wrap(Tensor, sessions.current().upload(tensor))  # type: ignore[return-value]


def to_gt(tensor: torch.Tensor) -> Tensor:
    """A tensor on GT: itself if it is there, otherwise an upload that gradients pass through."""
    if isinstance(tensor, Tensor):
        return tensor
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Upload.apply(tensor)  # type: ignore[no-any-return]
    return _uploaded(tensor)


def restore(value: torch.Tensor, requires_grad: bool, is_parameter: bool) -> Tensor:
    """Unpickle: the value goes back to GT."""
    tensor = _uploaded(value).requires_grad_(requires_grad)
    if is_parameter:
        tensor._is_param = True
    return tensor  # type: ignore[return-value]


keep_dtensor_out(Tensor, dispatch)
hide_from_dynamo(dispatch)
torch.serialization.add_safe_globals([restore])
