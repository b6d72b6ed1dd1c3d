"""The numbers of an optimizer's step, computed by the optimizer's own code.

A step's ops have numbers that change: Adam's depend on the count of steps, and every optimizer's on the learning rate.
`gt.compile` does not run the step, so it runs the same code on a stand-in: an optimizer of the same class, with the same
settings and the same counts, whose parameters are plain tensors with one element. The numbers that the stand-in passes
to torch's ops are, bit for bit, those that the optimizer would pass. Parameters that agree in all that decides these
numbers (their group, counts and dims) share one parameter of the stand-in.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from gt.client.op_schema import ArgumentKind, OpSchema
from gt.client.optimizer_step_hooks import State, copy_of
from gt.client.special_ops import SPECIAL
from gt.client.torch_patches.pytree import tree_leaves
from gt.core.errors import GTError

OpNumbers: TypeAlias = tuple[str, tuple[Any, ...]]  # the name of an op, and its numbers
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_version = attrgetter("_version")


class StandIn:
    """`parameters` are those that the optimizer would step on: all that have gradients when it steps, in its order."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        self.optimizer = optimizer
        self.kinds: list[_ParameterKind] = []
        self.kind_of: list[int] = []
        stepped = {id(parameter) for parameter in parameters}
        found: dict[Any, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in stepped:
                    continue
                entries = optimizer.state.get(parameter, {})
                key = (number, parameter.dim(), parameter.dtype, _described(entries))
                if key not in found:
                    found[key] = len(self.kinds)
                    self.kinds.append(_ParameterKind(optimizer, number))
                self.kinds[found[key]].add(parameter)
                self.kind_of.append(found[key])
        self.sequences: list[list[OpNumbers]] = []

    def advance(self) -> list[list[OpNumbers]]:
        """The ops and numbers of the next step, for each kind of parameter."""
        self.sequences = [kind.step() for kind in self.kinds]
        return self.sequences

    def is_in_step(self) -> bool:
        """Whether all parameters of a kind still have the same counts."""
        return all(kind.is_in_step() for kind in self.kinds)

    def commit(self) -> State:
        """Give the optimizer the counts that its stand-in has after the step. Returns its state before, as
        `optimizer_step_hooks.snapshot` does."""
        before: State = {}
        for kind in self.kinds:
            before.update(kind.commit())
        return before


class _ParameterKind:
    """Parameters of one group with the same counts, and the stand-in for all of them."""

    def __init__(self, optimizer: Optimizer, group: int) -> None:
        self.parameters: list[torch.Tensor] = []
        self._optimizer = optimizer
        self._group = group
        self._plain: dict[str, list[torch.Tensor]] = {}  # tensors of the optimizer's state in this process, by name
        self._versions: dict[str, list[int]] = {}
        stand_in = object.__new__(type(optimizer))
        attributes = {key: value for key, value in vars(optimizer).items() if key != "step"}
        stand_in.__dict__.update(attributes, **{hooks: OrderedDict() for hooks in _HOOKS})
        self._stand_in: Any = stand_in
        self._parameter = torch.zeros(())

    def add(self, parameter: torch.Tensor) -> None:
        if not self.parameters:
            self._parameter = torch.zeros((1,) * parameter.dim(), dtype=parameter.dtype, requires_grad=True)
            self._parameter.grad = torch.ones_like(self._parameter)
        self.parameters.append(parameter)
        for name, value in self._optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and not hasattr(value, "_ref"):
                self._plain.setdefault(name, []).append(value)
                self._versions.setdefault(name, []).append(value._version)

    def is_in_step(self) -> bool:
        return all(list(map(_version, tensors)) == self._versions[name] for name, tensors in self._plain.items())

    def step(self) -> list[OpNumbers]:
        optimizer = self._optimizer
        entries = optimizer.state.get(self.parameters[0], {})
        self._stand_in.state = defaultdict(dict)
        remote = [self._parameter, self._parameter.grad]
        for name, value in entries.items():
            copy = value
            if isinstance(value, torch.Tensor):
                is_remote = hasattr(value, "_ref")
                copy = torch.ones((1,) * value.dim(), dtype=value.dtype) if is_remote else value.clone()
                remote.extend([copy] if is_remote else [])
            self._stand_in.state[self._parameter][name] = copy
        group = {**optimizer.param_groups[self._group], "params": [self._parameter]}
        self._stand_in.param_groups = [group]
        step = type(optimizer).step
        with _OpList(remote) as ops:
            getattr(step, "__wrapped__", step)(self._stand_in)
        return ops.found

    def commit(self) -> State:
        after = self._stand_in.state[self._parameter]
        entries = self._optimizer.state
        before = {name: copy_of(value) for name, value in entries[self.parameters[0]].items()}
        with torch.no_grad():
            for name, tensors in self._plain.items():
                torch._foreach_copy_(tensors, [after[name]] * len(tensors))  # type: ignore[attr-defined]
                self._versions[name] = list(map(_version, tensors))
        numbers = {name: value for name, value in after.items() if isinstance(value, int | float)}
        if numbers:
            for parameter in self.parameters:
                entries[parameter].update(numbers)
        return dict.fromkeys(self.parameters, before)


class _OpList(TorchDispatchMode):
    """Notes the ops on the tensors that stand for GT tensors, with those of their numbers that are no constants of
    GT's calls."""

    _schemas: dict[Any, OpSchema] = {}

    def __init__(self, remote: Sequence[torch.Tensor | None]) -> None:
        super().__init__()
        self.found: list[OpNumbers] = []
        self._remote = {id(tensor): tensor for tensor in remote}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(id(value) in self._remote for value in tree_leaves((args, kwargs))):
            self._remote.update((id(value), value) for value in tree_leaves(result) if isinstance(value, torch.Tensor))
            schema = self._schemas.get(func)
            if schema is None:
                schema = self._schemas[func] = OpSchema(func, special=str(func) in SPECIAL)
            if not (schema.is_special or schema.aliases):
                self.found.append((schema.name, numbers_of(schema, args, kwargs or {})))
        return result


def numbers_of(schema: OpSchema, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The numbers of a call that `dispatch` sends with it."""
    numbers: list[Any] = []
    given = [*zip(schema.kinds, args, strict=False), *[(schema.kwarg_kinds[name], value) for name, value in kwargs.items()]]
    for kind, value in given:
        if kind in (ArgumentKind.TENSOR, ArgumentKind.SCALAR) and type(value) in (int, float, bool):
            numbers.append(value)
        elif kind is ArgumentKind.SCALARS and value is not None:
            numbers.extend(value)
        elif kind is ArgumentKind.TENSORS and value is not None:
            numbers.extend(item for item in value if type(item) in (int, float, bool))
    return tuple(numbers)


def _described(entries: Any) -> Any:
    """What decides the numbers of a parameter's step, of its state."""
    if not isinstance(entries, dict):
        raise NoStandIn
    return tuple((name, _description(value)) for name, value in entries.items())


def _description(value: Any) -> Any:
    if hasattr(value, "_ref"):
        return value.dim(), value.dtype
    if isinstance(value, torch.Tensor):
        if value.numel() > 16:
            raise NoStandIn
        return tuple(value.shape), value.dtype, *value.flatten().tolist()
    if value is None or isinstance(value, int | float | str):
        return value
    raise NoStandIn


class NoStandIn(GTError):
    """The numbers of an optimizer depend on something else than its settings and counts."""
