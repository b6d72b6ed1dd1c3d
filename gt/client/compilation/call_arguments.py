"""The arguments of a call of a compiled function, and the key under which its recordings are found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from gt.client.compilation.call_recorder import ambient_state
from gt.client.compilation.object_state import digest
from gt.client.compilation.static_reads import is_instance
from gt.client.compilation.traced_floats import FloatTrace
from gt.client.session import Session
from gt.client.tensor import Tensor, to_gt
from gt.client.torch_patches.autograd_nodes import gradient_hooks
from gt.client.torch_patches.dispatch import tree_flatten, tree_unflatten

read_storage = attrgetter("_ref.storage")
_BY_CONTENT = (np.ndarray, set, bytearray)  # compared by content, which nothing else notices
_BY_VALUE = (int, float, bool, str, bytes, type(None), torch.dtype)


class CallArguments:
    """The arguments of one call, with plain tensors moved to GT. Calls with the same `key` may repeat the same
    recording if the state of the function is the same too. `original_args` and `original_kwargs` are
    the caller's, `moved` the plain tensors among them and their copies on GT; `instance` is that of a method."""

    __slots__ = (
        "args", "floats", "instance", "key", "kwargs", "leaves", "moved", "objects", "original_args", "original_kwargs",
        "session", "structure", "tensors",
    )  # fmt: skip

    def __init__(
        self, session: Session, args: tuple[Any, ...], kwargs: dict[str, Any], is_method: bool = False
    ) -> None:  # fmt: skip
        self.instance = args[0] if is_method and args else None
        leaves, structure = tree_flatten((args, kwargs))
        self.session = session
        self.objects: list[tuple[str, object]] = []
        self.original_args, self.original_kwargs = args, kwargs
        self.moved: list[tuple[torch.Tensor, Tensor]] = []
        if any(issubclass(type(leaf), torch.Tensor) and not isinstance(leaf, Tensor) for leaf in leaves):
            leaves = self._move(leaves)
            args, kwargs = tree_unflatten(leaves, structure)
        self.args, self.kwargs = args, kwargs
        self.leaves, self.structure = leaves, structure
        self.floats = [leaf for leaf in leaves if type(leaf) is float]
        self.tensors: list[Tensor] = [leaf for leaf in leaves if issubclass(type(leaf), Tensor)]
        self.key = (
            structure,
            tuple(map(self._described, leaves)),
            sharing_pattern(map(id, self.tensors)),
            sharing_pattern(map(id, map(read_storage, self.tensors))),
            ambient_state(),
        )

    def _move(self, leaves: list[Any]) -> list[Any]:
        """The leaves with plain tensors moved to GT, each once."""
        copies: dict[int, Tensor] = {}
        for leaf in leaves:
            if is_instance(leaf, torch.Tensor) and not isinstance(leaf, Tensor) and id(leaf) not in copies:
                copies[id(leaf)] = moved = to_gt(leaf)
                moved.__dict__.update(leaf.__dict__)
                self.moved.append((leaf, moved))
        return [copies.get(id(leaf), leaf) for leaf in leaves]

    def original_tensor(self, value: Any) -> Any:
        """The caller's plain tensor for its copy on GT; any other object as it is."""
        return next((original for original, moved in self.moved if moved is value), value)

    def traced(self, trace: FloatTrace) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with traced floats."""
        if not trace.traced:
            return self.args, self.kwargs
        traced = iter(trace.traced)
        leaves = [next(traced) if type(leaf) is float else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)  # type: ignore[no-any-return]

    def _described(self, leaf: Any) -> Any:
        """A leaf of the arguments as a part of the key, without values that may change: of tensors and floats."""
        if issubclass(type(leaf), Tensor):
            return leaf._ref.key, leaf.requires_grad, leaf.is_leaf, type(leaf), _marks(leaf)
        if type(leaf) is float:
            return float
        if is_instance(leaf, _BY_VALUE):
            return type(leaf), leaf
        self.objects.append((f"an argument of type {type(leaf).__name__}", leaf))
        return (_Identity(leaf), digest(leaf)) if is_instance(leaf, _BY_CONTENT) else _Identity(leaf)


def _marks(tensor: Tensor) -> Any:
    """The attributes and hooks of a tensor, on which the ops of a function may depend."""
    attributes = tensor.__dict__
    hooks = gradient_hooks(tensor)
    if not attributes and not hooks and not tensor.retains_grad:
        return None
    described = [(name, (type(v), v) if is_instance(v, _BY_VALUE) else _Identity(v)) for name, v in attributes.items()]
    return tensor.retains_grad, tuple(map(_Identity, hooks)), tuple(described)


class _Identity:
    """An object in a key, compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class _ObjectName(NamedTuple):
    """An object in a described key."""

    type_name: str
    id: int


def describe_key(key: Any) -> Any:
    """A key that keeps no object alive."""
    if isinstance(key, _Identity):
        return _ObjectName(type(key.value).__name__, id(key.value))
    return tuple(map(describe_key, key)) if type(key) is tuple else key


def key_difference(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    """The difference between two described keys, for a message."""
    if before[0] != now[0]:
        return "their structure"
    changed = next((leaf for old, leaf in zip(before[1], now[1], strict=True) if leaf != old), None)
    if changed is not None:
        return _leaf_difference(changed)
    if before[4] != now[4]:
        return "settings of torch, or the signal scope"
    return "which of them are the same object, or share memory"


def _leaf_difference(leaf: Any) -> str:
    """The difference between the descriptions of two leaves of the arguments, one of which is `leaf`."""
    content = leaf[0] if type(leaf) is tuple else leaf
    if isinstance(content, _ObjectName):
        return f"an object of type {content.type_name} is another one, or has another content"
    if isinstance(content, type) and type(leaf) is tuple:
        return f"a value of type {content.__name__}, such as {leaf[1]!r}"
    return "the shape, strides, offset, dtype, requires_grad or attributes of a tensor"


def sharing_pattern(idents: Iterable[int]) -> tuple[int, ...]:
    """For each object, given by its id, the first position at which it occurs."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(ident, position) for position, ident in enumerate(idents)])


def unique_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors, each once."""
    return list({id(tensor): tensor for tensor in tensors}.values()) if len(tensors) > 1 else list(tensors)
