"""The changes that a recorded call makes to its arguments, besides new values, storages and gradients of GT tensors.

A skipped call would not make these changes, so a call that makes one is not repeated. A recorded call may get copies of
the caller's arguments: plain tensors are moved to GT, floats are traced, and containers of either are made anew. The
changes to such copies are made to the caller's objects, the originals, after the call.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

from gt.client.compilation.call_arguments import CallArguments
from gt.client.compilation.object_state import ObjectState
from gt.client.compilation.static_reads import is_instance
from gt.client.compilation.traced_floats import FloatTrace, TracedFloat
from gt.client.tensor import Tensor
from gt.client.torch_patches.autograd_nodes import gradient_hooks
from gt.client.torch_patches.dispatch import tree_flatten, tree_map
from gt.core.errors import CompileError

MUTABLE = (dict, list, deque)


class Container(NamedTuple):
    """A container among the arguments: the caller's (`original`), the one that the function gets (`given`),
    and its content before the call."""

    name: str
    original: Any
    given: Any
    items: list[Any]
    structure: Any

    def is_changed(self) -> bool:
        items, structure = _opened(self.given)
        return len(items) != len(self.items) or not all(map(is_, items, self.items)) or structure != self.structure


class TensorProperties:
    """The properties of a tensor besides its value, before a call. Holds the tensor's node of the autograd graph."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self._attributes = dict(tensor.__dict__)
        self._node = tensor.grad_fn
        self._others = self._read()

    def _read(self) -> list[Any]:
        tensor = self.tensor
        retained = tensor.grad if tensor.retains_grad else None
        if not isinstance(tensor, Tensor):  # gradients of leaves on GT are effects that a skipped call repeats
            retained = tensor.grad if tensor.is_leaf else retained
        version = (id(retained), retained._version) if retained is not None else None
        return [tensor.requires_grad, tensor.is_leaf, tensor.retains_grad, list(gradient_hooks(tensor)), version]

    def is_changed(self) -> bool:
        """Whether the tensor has other attributes, hooks or another place in the autograd graph than before."""
        now = self.tensor.__dict__
        return (
            self._read() != self._others
            or self.tensor.grad_fn is not self._node
            or now.keys() != self._attributes.keys()
            or not all(map(is_, now.values(), map(self._attributes.__getitem__, now)))
        )


class PlainArgument(NamedTuple):
    """A plain tensor of the caller, its copy on GT, and the versions of both before the call."""

    name: str
    original: torch.Tensor
    moved: Tensor
    original_version: int
    moved_version: int

    def is_written(self) -> bool:
        return self.moved._version != self.moved_version


class ArgumentChanges:
    """The arguments of a call as the function gets them (`args`, `kwargs`), and their state before the call.
    `containers` are those among them, by id() of the container that the function gets."""

    def __init__(
        self, function: Callable[..., Any], call: CallArguments, trace: FloatTrace, others: Sequence[Tensor]
    ) -> None:
        self._call = call
        self.args, self.kwargs = call.traced(trace)
        names = _names_of(function, len(self.args))
        arguments = [*zip(names, call.original_args, self.args, strict=True)]
        arguments += [(f"{name!r}", call.original_kwargs[name], given) for name, given in self.kwargs.items()]
        found = [each for argument in arguments for each in _containers(*argument)]
        self.containers = {id(each.given): each for each in reversed(found)}
        self.container_numbers = {id(each.given): number for number, each in reversed(list(enumerate(found)))}
        name_of = {id(leaf): name for name, _, given in arguments for leaf in tree_flatten(given)[0]}
        self._plain = [
            PlainArgument(name_of.get(id(moved), ""), original, moved, original._version, moved._version)
            for original, moved in call.moved
            if not original.is_inference() and not moved.is_inference()
        ]
        self._objects = [(name, ObjectState(value)) for name, value in call.objects if value is not call.instance]
        self._properties = [
            *[TensorProperties(f"the argument {name_of.get(id(each), '')}", each) for each in call.tensors],
            *[TensorProperties(f"the plain argument {each.name}", each.original) for each in self._plain],
            *[TensorProperties("a tensor that it uses", each) for each in others],
        ]

    def original_of(self, value: Any) -> Any:
        """The caller's object for an object that the function got; another object as it is."""
        if id(value) in self.containers:
            return self.containers[id(value)].original
        if is_instance(value, TracedFloat):
            return value.pin()
        return self._call.original_tensor(value)

    def restored(self, output: Any) -> Any:
        """An output with the caller's objects in place of those that the function got."""
        given = [self._call.original_tensor(each) is not each for each in self._call.tensors]
        if not any(given) and all(each.original is each.given for each in self.containers.values()):
            return output
        return tree_map(self.original_of, output, is_leaf=lambda each: id(each) in self.containers)

    def apply(self) -> str:
        """Make the changes to the copies that the function got to the caller's objects. Returns the first change, or an
        empty text."""
        changed = [each for each in self._properties if each.is_changed()]
        filled = [each for each in self.containers.values() if each.is_changed()]
        written = [each for each in self._plain if each.is_written()]
        rewritten = [each for each in self._plain if each.original._version != each.original_version]
        for each in written:
            self._copy_back(each)
        for container in filled:
            if container.original is not container.given:
                self._refill(container)
        for original, moved in self._call.moved:
            _give_properties(original, moved)
        if filled:
            return f"it changes the argument {filled[0].name}, which a skipped call would not; return the new values"
        if written or rewritten:
            name = (written or rewritten)[0].name
            return f"it writes to the plain tensor {name}, which a skipped call would not; have that tensor on GT"
        for name, state in self._objects:
            if state.is_changed() or state.is_unknown():
                return f"it changes {name}, which a skipped call would not; change it outside of the function"
        if changed:
            return (
                f"it changes attributes, hooks, gradients or requires_grad of {changed[0].name}, which a skipped call "
                "would not; change them outside of the function"
            )
        return ""

    def _copy_back(self, argument: PlainArgument) -> None:
        memory = argument.original.untyped_storage().data_ptr()
        others = [each for each in self._plain if each.original is not argument.original]
        if any(each.original.untyped_storage().data_ptr() == memory for each in others):
            raise CompileError(
                f"a function of gt.compile writes to the plain tensor {argument.name}, which shares memory with "
                "another argument; have these tensors on GT"
            )
        with torch.no_grad():
            argument.original.copy_(argument.moved.detach().cpu())

    def _refill(self, container: Container) -> None:
        items = [self.original_of(item) for item in _opened(container.given)[0]]
        if isinstance(container.original, dict):
            container.original.clear()
            container.original.update(zip(container.given, items, strict=True))
        elif isinstance(container.original, list | deque):
            container.original.clear()
            container.original.extend(items)
        else:
            vars(container.original).update(
                (key, self.original_of(value)) for key, value in vars(container.given).items()
            )


def _give_properties(original: torch.Tensor, moved: Tensor) -> None:
    """Give a plain tensor the properties that a function has given to its copy on GT."""
    if moved.is_leaf and moved.requires_grad and original.is_leaf:
        original.requires_grad_()
        original.grad = moved.grad.cpu() if moved.grad is not None else original.grad
    original.__dict__.update(moved.__dict__)


def _opened(value: Any) -> tuple[list[Any], Any]:
    """The items of a container, and its structure without them."""
    return tree_flatten(value, is_leaf=lambda each: each is not value)


def _containers(name: str, original: Any, given: Any) -> Iterator[Container]:
    items, structure = _opened(given)
    if len(items) == 1 and items[0] is given:  # not a container
        return
    yield Container(name, original, given, items, structure)
    for original_item, item in zip(_opened(original)[0], items, strict=True):
        yield from _containers(name, original_item, item)


def containers_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The containers among arguments, in the order in which ArgumentChanges numbers them."""
    return [each.given for value in (*args, *kwargs.values()) for each in _containers("", value, value)]


def _names_of(function: Callable[..., Any], count: int) -> list[str]:
    """The names of positional arguments, for messages."""
    try:
        names = [f"{name!r}" for name in inspect.signature(function).parameters]
    except (TypeError, ValueError):
        names = []
    return [*names, *map(str, range(len(names), count))][:count]
