"""The scalars of an optimizer's step, computed by the optimizer's own code.

The ops of a step have scalars that change: Adam's depend on the count of steps, and every optimizer's on the learning
rate. `gt.compile` does not run the step on the GT tensors; it runs the same code on a stand-in: an optimizer of the
same class, with the same settings and counts, whose parameters are plain tensors with one element. The scalars that the
stand-in passes to torch's ops are, bit for bit, those that the optimizer would pass. Parameters of the same group and
with the same counts are of one kind, and share one parameter of the stand-in. Recorded calls show whether the scalars
of a kind are indeed equal.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from enum import Enum
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch.optim.optimizer import Optimizer

from gt.client import active_session
from gt.client.op_schema import ArgumentKind, OpSchema
from gt.client.optimizer_step_hooks import OptimizerState, copy_of
from gt.client.special_ops import SPECIAL
from gt.client.torch_patches.dispatch import UntracedMode
from gt.client.torch_patches.optimizer_defaults import bucket_sizes, share_memory, standing_for
from gt.client.transfers import payload
from gt.core.errors import GTError

ScalarPlace: TypeAlias = tuple[int, int, int]
"""The place of an op's scalars in a stand-in: the kind of parameter, the position among the ops of this kind, and the
number of parameters that the op takes together."""
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_WRITTEN = (ArgumentKind.TARGET, ArgumentKind.TARGETS, ArgumentKind.TARGETS_OR_COPIES)
_version = attrgetter("_version")


class Stepping(Enum):
    """The order in which an optimizer steps on its parameters."""

    EACH = "parameter by parameter"
    LISTS = "all parameters of a group together, in buckets; those of a group are of one kind"
    WHOLE = "any order: the stand-in has a parameter for each of the optimizer's, and takes longer"


class StepOp(NamedTuple):
    """The scalars of one op of a step. `has_list`: they are a list with one scalar for each parameter. `constants` are
    its other arguments, without tensors on GT and counts: plain tensors by content, scalars by type."""

    name: str
    scalars: tuple[Any, ...]
    has_list: bool
    constants: tuple[Any, ...]

    def of(self, parameters: int) -> tuple[Any, ...]:
        """The scalars of an op on several parameters of the same kind."""
        return self.scalars * parameters if self.has_list else self.scalars


class StandIn:
    """Stands in for an optimizer: computes the scalars of its steps. `parameters` are those that it would step on."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], stepping: Stepping) -> None:
        is_whole = stepping is Stepping.WHOLE
        self.optimizer = optimizer
        self.sequences: list[list[StepOp]] = []
        self.stepping = stepping
        self._kind_of: dict[int, int] = {}  # by id() of a parameter
        stepped = {id(parameter) for parameter in parameters}
        members: dict[Any, _StandInParameter] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in stepped:
                    continue
                entries = optimizer.state.get(parameter, {})
                key = (number, parameter.dtype, _described(entries), is_whole and id(parameter))
                if key not in members:
                    members[key] = _StandInParameter(optimizer, number, parameter)
                members[key].add(parameter)
                self._kind_of[id(parameter)] = list(members).index(key) if not is_whole else 0
        found = list(members.values())
        self._steppers = [_Stepper(optimizer, each) for each in ([found] if is_whole else [[one] for one in found])]

    def advance(self) -> list[list[StepOp]]:
        """The ops and scalars of the next step, for each kind of parameter."""
        self.sequences = [stepper.step() for stepper in self._steppers]
        return self.sequences

    def expected(self, parameters: Sequence[torch.Tensor]) -> list[ScalarPlace]:
        """The places of the scalars of a step on some parameters, op by op; empty for unknown parameters. Called after
        `advance`."""
        if any(id(parameter) not in self._kind_of for parameter in parameters):
            return []
        if self.stepping is Stepping.WHOLE:
            runs = [(0, 1)]
        elif self.stepping is Stepping.EACH:
            runs = [(self._kind_of[id(parameter)], 1) for parameter in parameters]
        else:
            runs = self._buckets({id(parameter) for parameter in parameters})
        return [(kind, number, count) for kind, count in runs for number in range(len(self.sequences[kind]))]

    def _buckets(self, stepped: set[int]) -> list[tuple[int, int]]:
        """The kinds and the sizes of the lists that the optimizer steps on together; empty if kinds are mixed."""
        found: list[tuple[int, int]] = []
        for group in self.optimizer.param_groups:
            members = [parameter for parameter in group["params"] if id(parameter) in stepped]
            kinds = {self._kind_of[id(parameter)] for parameter in members}
            if len(kinds) > 1:
                return []
            found.extend((kind, size) for kind in kinds for size in bucket_sizes(members))
        return found

    def ops(self) -> list[tuple[Any, ...]]:
        """The ops of a step with their constants, for each kind of parameter."""
        return [tuple([(op.name, *op.constants) for op in sequence]) for sequence in self.sequences]

    def scalars(self, place: ScalarPlace) -> tuple[Any, ...]:
        kind, number, count = place
        return self.sequences[kind][number].of(count)

    def kind_of(self, parameter: torch.Tensor) -> int:
        return self._kind_of[id(parameter)]

    def is_current(self) -> bool:
        """Whether the counts of the optimizer are those that this stand-in has read or set last."""
        return all(member.is_current() for stepper in self._steppers for member in stepper.members)

    def counts(self) -> list[torch.Tensor]:
        """The tensors of the optimizer's state in this process."""
        plain = [member.plain for stepper in self._steppers for member in stepper.members]
        return [tensor for tensors in plain for each in tensors.values() for tensor in each]

    def commit(self) -> OptimizerState:
        """Give the optimizer the counts that its stand-in has after the step. Returns its state before, as
        `optimizer_step_hooks.snapshot` does."""
        before: OptimizerState = {}
        for stepper in self._steppers:
            for member in stepper.members:
                before.update(member.commit())
        return before


class _StandInParameter:
    """A parameter of a stand-in, which stands for all parameters of one kind."""

    def __init__(self, optimizer: Optimizer, group: int, parameter: torch.Tensor) -> None:
        self.parameter = torch.zeros((1,) * parameter.dim(), dtype=parameter.dtype, requires_grad=True)
        self.parameter.grad = torch.ones_like(self.parameter)
        self.group = group
        self.plain: dict[str, list[torch.Tensor]] = {}  # tensors of the optimizer's state in this process, by name
        self._originals: list[torch.Tensor] = []
        self._versions: dict[str, list[int]] = {}
        self._state = optimizer.state
        self._after: dict[str, Any] = {}

    def add(self, parameter: torch.Tensor) -> None:
        self._originals.append(parameter)
        for name, value in self._state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and not hasattr(value, "_ref"):
                self.plain.setdefault(name, []).append(value)
                self._versions.setdefault(name, []).append(value._version)

    @property
    def original(self) -> torch.Tensor:
        return self._originals[0]

    def is_current(self) -> bool:
        return all(list(map(_version, tensors)) == self._versions[name] for name, tensors in self.plain.items())

    def state(self, remote: list[torch.Tensor]) -> dict[str, Any]:
        """The state of the parameter before a step. `remote` gets the tensors in it that stand for GT tensors."""
        self._after = {}
        for name, value in self._state.get(self._originals[0], {}).items():
            self._after[name] = value
            if hasattr(value, "_ref"):
                self._after[name] = torch.ones((1,) * value.dim(), dtype=value.dtype)
                remote.append(self._after[name])
            elif isinstance(value, torch.Tensor):
                self._after[name] = value.clone()
        return self._after

    def commit(self) -> OptimizerState:
        """Give the optimizer the counts after the step, and return its state before."""
        before = {name: copy_of(value) for name, value in self._state.get(self._originals[0], {}).items()}
        with torch.no_grad():
            for name, tensors in self.plain.items():
                torch.ops.aten._foreach_copy_.default(tensors, [self._after[name]] * len(tensors))
                self._versions[name] = list(map(_version, tensors))
        counts = {name: value for name, value in self._after.items() if isinstance(value, int | float)}
        if counts:
            for parameter in self._originals:
                self._state[parameter].update(counts)
        return dict.fromkeys(self._originals, before) if before else {}


class _Stepper:
    """Runs the code of an optimizer's step on other parameters."""

    def __init__(self, optimizer: Optimizer, members: list[_StandInParameter]) -> None:
        self.members = members
        self._optimizer = optimizer
        self._stand_in: Any = object.__new__(type(optimizer))
        attributes = {key: _own_copy(value) for key, value in vars(optimizer).items() if key != "step"}
        self._stand_in.__dict__.update(attributes, **{hooks: OrderedDict() for hooks in _HOOKS})

    def step(self) -> list[StepOp]:
        """Run the code of the step, and return the scalars of its ops."""
        remote: list[torch.Tensor] = []
        own: list[torch.Tensor] = []
        self._stand_in.state = defaultdict(dict)
        for member in self.members:
            remote.extend([member.parameter, member.parameter.grad])  # type: ignore[list-item]
            if state := member.state(remote):
                self._stand_in.state[member.parameter] = state
                own.extend(value for value in state.values() if isinstance(value, torch.Tensor))
        self._stand_in.param_groups = [
            {**group, "params": [member.parameter for member in self.members if member.group == number]}
            for number, group in enumerate(map(_with_implementation, self._optimizer.param_groups))
        ]
        step = type(self._optimizer).step
        try:
            with (
                standing_for({id(each.parameter): each.original for each in self.members}),
                _OpList(remote, own) as ops,
            ):
                getattr(step, "__wrapped__", step)(self._stand_in)
        except Exception as error:  # of the optimizer's code, which has never seen such parameters
            raise NoStandIn from error
        return ops.found


class _OpList(UntracedMode):
    """Notes the ops on tensors that stand for GT tensors, and the scalars that GT sends with such ops. `remote` are
    these tensors, `own` the others that the stand-in may write to."""

    _schemas: ClassVar[dict[Any, OpSchema]] = {}

    def __init__(self, remote: Sequence[torch.Tensor | None], own: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.found: list[StepOp] = []
        self._remote = {id(tensor): tensor for tensor in remote}
        self._counts = {id(tensor) for tensor in own}
        self._own = {**self._remote, **{id(tensor): tensor for tensor in own}}
        self._splits = active_session.active is not None and not active_session.active.alone

    def _is_remote(self, value: Any) -> bool:
        if isinstance(value, list | tuple):
            return any(map(self._is_remote, value))
        return id(value) in self._remote

    def _require_own(self, schema: OpSchema, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Refuse an op on the optimizer's own tensors: the step of a stand-in must not change anything."""
        for kind, value in _with_kinds(schema, args, kwargs):
            for tensor in value if isinstance(value, list | tuple) else (value,):
                is_foreign = isinstance(tensor, torch.Tensor) and id(tensor) not in self._own
                if is_foreign and (kind in _WRITTEN or hasattr(tensor, "_ref")):
                    raise NoStandIn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_remote = any(map(self._is_remote, args)) or (bool(kwargs) and any(map(self._is_remote, kwargs.values())))
        schema = self._schemas.get(func)
        if schema is None:
            schema = self._schemas[func] = OpSchema(func, special=str(func) in SPECIAL)
        self._require_own(schema, args, kwargs or {})
        if is_remote and self._splits and schema.split is not None and not schema.joins:  # as `dispatch` does
            with self:
                return schema.split(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else (result,)
        self._own.update((id(value), value) for value in results if isinstance(value, torch.Tensor))
        if is_remote:
            self._remote.update((id(value), value) for value in results if isinstance(value, torch.Tensor))
            if schema.split is not None or not (schema.is_special or schema.aliases):
                self.found.append(self._step_op(schema, args, kwargs or {}))
        return result

    def _step_op(self, schema: OpSchema, args: Sequence[Any], kwargs: dict[str, Any]) -> StepOp:
        """The scalars that `dispatch` sends with an op, and the op's other arguments."""
        scalars: list[Any] = []
        constants: list[Any] = []
        has_list = False
        for kind, value in _with_kinds(schema, args, kwargs):
            if kind in (ArgumentKind.TENSOR, ArgumentKind.SCALAR) and type(value) in (int, float, bool):
                scalars.append(value)
                constants.append(type(value))
            elif kind is ArgumentKind.SCALARS and value is not None:
                scalars.extend(value)
                has_list = True
                constants.append(tuple(map(type, value)))
            else:
                constants.append(self._constant(value))
        return StepOp(schema.name, tuple(scalars), has_list, (*constants, *kwargs))

    def _constant(self, value: Any) -> Any:
        """An argument as it is compared between steps. The values of tensors on GT and of counts may differ."""
        if isinstance(value, list | tuple):
            return tuple(map(self._constant, value))
        if id(value) in self._remote:
            return "on GT"
        return "a count" if id(value) in self._counts else described(value)


def _with_kinds(schema: OpSchema, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[ArgumentKind, Any]]:
    """The arguments of an op, with their kinds."""
    given = zip(schema.kinds, args, strict=False)
    return [*given, *[(schema.kwarg_kinds[name], value) for name, value in kwargs.items()]]


def described(value: Any) -> Any:
    """A setting of an optimizer or an argument of its ops, for `same_constant`: plain tensors by content, since they
    may be filled in place."""
    if isinstance(value, torch.Tensor) and not hasattr(value, "_ref"):
        return value.dtype, value.shape, bytes(payload(value.detach(), value.stride()))
    if isinstance(value, dict):
        return tuple([(key, described(each)) for key, each in value.items()])
    return tuple(map(described, value)) if isinstance(value, list | tuple) else value


def _with_implementation(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group whose parameters may share memory, which those of a stand-in do not."""
    is_default = "foreach" in group and group["foreach"] is None
    return {**group, "foreach": False} if is_default and share_memory(group["params"]) else group


def _own_copy(value: Any) -> Any:
    """An attribute of an optimizer for its stand-in, which must not change the optimizer's containers."""
    return copy.copy(value) if type(value) in (list, dict, set, deque) else value


def _described(entries: Any) -> Any:
    """The part of a parameter's state that decides the scalars of its step."""
    if not isinstance(entries, dict):
        raise NoStandIn
    return tuple((name, _description(value)) for name, value in entries.items())


def _description(value: Any) -> Any:
    if hasattr(value, "_ref"):
        return value.dtype
    if isinstance(value, torch.Tensor):
        if value.numel() > 16:
            raise NoStandIn
        return tuple(value.shape), value.dtype, *value.flatten().tolist()
    if value is None or isinstance(value, int | float | str):
        return value
    raise NoStandIn


class NoStandIn(GTError):
    """A stand-in cannot compute the scalars of an optimizer, which depend on more than its settings and counts."""
