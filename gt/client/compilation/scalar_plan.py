"""Plans the scalars of repeated calls: constants, random keys, functions of float arguments, scalars of optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from operator import neg
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from gt.client.compilation.call_programs import Table
from gt.client.compilation.call_recorder import Recording
from gt.client.compilation.optimizer_scalars import NoStandIn, ScalarPlace, StandIn, Stepping, described
from gt.client.compilation.random_keys import KeyPlan
from gt.client.compilation.recorded_call import RecordedCall
from gt.client.compilation.traced_floats import FloatTrace
from gt.client.compilation.watched_values import same_constant
from gt.client.optimizer_step_hooks import OptimizerState, note_step, optimizer_of_step, snapshot
from gt.client.session import Session
from gt.client.tensor import Tensor
from gt.core.messages import BeginStep, EndStep, RunOp
from gt.core.signatures import random_key, with_random_key


class VaryingScalar(Exception):
    """A scalar of an op differs between calls, and is neither a random key nor computed from floats that GT knows."""


class StepPlace(NamedTuple):
    """A step of an optimizer in a recorded call: the positions of its first and last instruction, the slots of the
    step's begin and end, and its parameters."""

    first: int
    last: int
    begin: int
    end: int
    parameters: list[Tensor]


class StepScalars:
    """The scalars of one optimizer in one recorded call. Made before the call from the state of the optimizer, for the
    parameters that it has `stepped` on in the call before, or for all. After the call, `align` sets `place` if the call
    has one step of the optimizer, and `scalar_places` if a stand-in gives all scalars of this step: for each
    instruction, by position, the place of its scalars in the stand-in."""

    def __init__(self, optimizer: Optimizer, stepped: Sequence[Tensor] | None) -> None:
        self.optimizer = optimizer
        self.place: StepPlace | None = None
        self.scalar_places: dict[int, ScalarPlace] = {}
        self._stepping = Stepping.EACH
        self.is_stepped = False
        self._assigned = [_mark_settings(group) for group in optimizer.param_groups]
        self.settings = settings_of(optimizer)
        self.members = members_of(optimizer)
        self._counts_before = _counts(optimizer)
        self._attributes = _attributes(optimizer)
        everything = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        parameters = everything if stepped is None else stepped
        self._stand_ins: dict[Stepping, StandIn] = {}
        for stepping in Stepping:
            with contextlib.suppress(NoStandIn):
                stand_in = StandIn(optimizer, parameters, stepping)
                stand_in.advance()
                self._stand_ins[stepping] = stand_in

    def changed_setting(self) -> str | None:
        """A setting of the optimizer that the call has assigned, even if it has the same value, or filled."""
        for group, assigned, before in zip(self.optimizer.param_groups, self._assigned, self.settings, strict=False):
            for (name, value), setting in zip(assigned.items(), before, strict=True):
                if group.get(name) is not value or not same_constant((name, described(value)), setting):
                    return name
        return None

    def has_changed_counts(self) -> bool:
        """Whether the call has changed attributes of the optimizer, or numbers of its state that no stand-in counts."""
        is_counted = bool(self.scalar_places) or _counts(self.optimizer) == self._counts_before
        return not is_counted or not same_constant(_attributes(self.optimizer), self._attributes)

    def counts(self) -> list[torch.Tensor]:
        """The tensors of this process that the step changes."""
        return self._stand_ins[self._stepping].counts() if self.scalar_places else []

    def align(self, recorded: RecordedCall, tensors: Sequence[Tensor]) -> None:
        """Find the step of the optimizer in a recorded call, and the stand-in that gives its scalars."""
        self.place = self._find(recorded, tensors)
        if self.place is None:
            return
        signatures = recorded.recording.session.signatures
        found = [
            (position, signatures[instruction.op_id].op, instruction.scalars)
            for position, instruction in enumerate(recorded.recording.instructions)
            if self.place.first < position < self.place.last and isinstance(instruction, RunOp)
        ]
        for stepping, stand_in in self._stand_ins.items():
            places = stand_in.expected(self.place.parameters)
            names = [stand_in.sequences[kind][number].name for kind, number, _ in places]
            if [name for _, name, _ in found] == names and all(
                same_scalars(scalars, stand_in.scalars(place))
                for (_, _, scalars), place in zip(found, places, strict=True)
            ):
                self.scalar_places = {position: place for (position, _, _), place in zip(found, places, strict=True)}
                self._stepping = stepping
                return

    def repeated(self) -> StandIn:
        """A stand-in for the next steps, on the same parameters."""
        assert self.place is not None
        return StandIn(self.optimizer, self.place.parameters, self._stepping)

    def kinds(self, later: StandIn) -> dict[int, int]:
        """For each kind of parameter of this call, the number of the same kind in a later stand-in."""
        assert self.place is not None
        now = self._stand_ins[self._stepping]
        return {now.kind_of(parameter): later.kind_of(parameter) for parameter in self.place.parameters}

    def ops(self) -> list[tuple[Any, ...]]:
        return self._stand_ins[self._stepping].ops()

    def _find(self, recorded: RecordedCall, tensors: Sequence[Tensor]) -> StepPlace | None:
        """The only step of the optimizer in the call; None if it has none or several, or steps on unknown tensors."""
        found: list[StepPlace] = []
        slots, instructions = recorded.slots, recorded.recording.instructions
        for first, begun in enumerate(instructions):
            if not isinstance(begun, BeginStep) or optimizer_of_step(begun.step) is not self.optimizer:
                continue
            self.is_stepped = True
            last = next(n for n, each in enumerate(instructions) if n > first and isinstance(each, EndStep))
            sources = [
                recorded.sources[slot] for ident in begun.parameters if (slot := slots[ident]) < len(recorded.sources)
            ]
            if len(sources) < len(begun.parameters) or any(source.kind != "handle" for source in sources):
                return None
            parameters = self._with_tied([tensors[source.positions[0]] for source in sources])
            end = instructions[last]
            assert isinstance(end, EndStep)
            found.append(StepPlace(first, last, slots[begun.step], slots[end.end], parameters))
        return found[0] if len(found) == 1 else None

    def _with_tied(self, stepped: Sequence[Tensor]) -> list[Tensor]:
        """The parameters of a step, of which the call knows one for each storage: those that share a storage are
        stepped on in the order of the optimizer."""
        left: dict[int, list[Tensor]] = {}
        for parameter in (each for group in self.optimizer.param_groups for each in group["params"]):
            if isinstance(parameter, Tensor):
                left.setdefault(id(parameter._ref.storage), []).append(parameter)
        return [tied.pop(0) if (tied := left.get(id(each._ref.storage))) else each for each in stepped]


class _ArgumentScalars(NamedTuple):
    """Scalars of an op, some of which are computed from the floats among the call's arguments."""

    group: int
    scalars: tuple[Any, ...]


class ScalarPlan:
    """Computes the scalars of each repetition of a call. `scalars` are the distinct tuples of an op's scalars; `groups`
    has, for each RunOp in order, the position of its tuple in `scalars`."""

    def __init__(
        self,
        groups: list[int],
        scalars: list[tuple[Any, ...]],
        keys: KeyPlan,
        op_keys: list[int | None],
        random: list[tuple[int, int]],
        steps: list[_RepeatedStep],
        arguments: list[_ArgumentScalars],
        pinned: dict[int, float],
        fixed: list[StepScalars],
        members: list[tuple[Optimizer, list[int]]],
    ) -> None:
        self.groups = groups
        self._arguments = arguments
        self._pinned = list(pinned.items())
        self._members = members
        self._fixed = [(each.optimizer, each.settings) for each in fixed]
        self.scalars = scalars
        self._keys = keys
        self._op_keys = op_keys  # the number of the key that each op takes
        self._random = random
        self._steps = steps

    def prepare(self, arguments: Sequence[float]) -> bool:
        """Prepare the scalars of the next call; False if the call would have other ops. `arguments` are its floats."""
        return (
            all(same_scalar(arguments[position], value) for position, value in self._pinned)
            and all(members_of(optimizer) == members for optimizer, members in self._members)
            and all(has_settings(optimizer, settings) for optimizer, settings in self._fixed)
            and all(step.prepare() for step in self._steps)
        )

    def draw(self, arguments: Sequence[float]) -> tuple[tuple[Any, ...], ...]:
        """The scalars of the prepared call. Draws its random keys and advances the counts of optimizers."""
        for step in self._steps:
            step.count()
        scalars = self._compute(arguments)
        if self._random:
            keys = self._keys.draw()
            for group, key in self._random:
                scalars[group] = with_random_key(scalars[group], keys[key])
        return tuple(scalars)

    def _compute(self, arguments: Sequence[float]) -> list[tuple[Any, ...]]:
        """The scalars of the prepared call, with random keys of the recorded one."""
        scalars = self.scalars.copy()
        for group, found in self._arguments:
            scalars[group] = tuple([each(arguments) if callable(each) else each for each in found])
        for step in self._steps:
            step.fill(scalars)
        return scalars

    def difference(self, recording: Recording, keys: KeyPlan, arguments: Sequence[float]) -> str | None:
        """The first scalar of a call that differs from that of the prepared call, with its line; None if none does."""
        key_of = dict(keys.places)
        runs = [(n, each) for n, each in enumerate(recording.instructions) if isinstance(each, RunOp)]
        if [key_of.get(position) for position, _ in runs] != self._op_keys:
            return "its random ops come in another order"
        computed = self._compute(arguments)
        for group, (position, run) in zip(self.groups, runs, strict=True):
            for now, then in list(zip(run.scalars, computed[group], strict=True))[: -1 if position in key_of else None]:
                if not same_scalar(now, then):
                    op = recording.session.signatures[run.op_id].op
                    return f"{recording.line(position)}: {op} gets the number {now} in place of {then}"
        return None

    def commit(self, session: Session, table: Table) -> None:
        """Add the call's steps to the histories of their optimizers."""
        for step in self._steps:
            step.commit(session, table)


class _RepeatedStep:
    """A step of an optimizer in a repeated call. `groups` are the positions in the plan's scalars of those that
    the stand-in has at each place. Without a stand-in, the settings of the optimizer must stay as they are."""

    def __init__(self, steps: StepScalars, groups: dict[ScalarPlace, int]) -> None:
        assert steps.place is not None
        self._optimizer = steps.optimizer
        self._place = steps.place
        self._settings = steps.settings
        self._groups: list[tuple[ScalarPlace, int]] = []
        self._stand_in: StandIn | None = None
        self._state: OptimizerState = {}
        if steps.scalar_places:
            self._stand_in = steps.repeated()
            kinds = steps.kinds(self._stand_in)
            self._groups = [((kinds[kind], number, size), group) for (kind, number, size), group in groups.items()]
            ops = steps.ops()
            self._ops = tuple([ops[kind] for kind in sorted(kinds, key=kinds.__getitem__)])

    def prepare(self) -> bool:
        """Compute the scalars of the next step; False if the step would have other ops."""
        if self._stand_in is None:
            return has_settings(self._optimizer, self._settings)
        if not self._stand_in.is_current() and not self._follow():
            return False
        try:
            self._stand_in.advance()
        except NoStandIn:
            return False
        return same_constant(self._ops, tuple(self._stand_in.ops()))

    def _follow(self) -> bool:
        """Take the counts of an optimizer that has made steps elsewhere, if its parameters are still of the same
        kinds."""
        assert self._stand_in is not None
        try:
            later = StandIn(self._optimizer, self._place.parameters, self._stand_in.stepping)
        except NoStandIn:
            return False
        if any(later.kind_of(each) != self._stand_in.kind_of(each) for each in self._place.parameters):
            return False
        self._stand_in = later
        return True

    def count(self) -> None:
        """Advance the counts of the optimizer."""
        self._state = self._stand_in.commit() if self._stand_in is not None else snapshot(self._optimizer)

    def fill(self, scalars: list[tuple[Any, ...]]) -> None:
        """Set those of the step in `scalars`."""
        if self._stand_in is not None:
            for place, group in self._groups:
                scalars[group] = self._stand_in.scalars(place)

    def commit(self, session: Session, table: Table) -> None:
        note_step(session, self._optimizer, table[self._place.begin], table[self._place.end], self._state)


def plan_scalars(
    calls: Sequence[RecordedCall],
    keys: KeyPlan,
    steps: Sequence[Sequence[StepScalars]],
    traces: Sequence[FloatTrace],
) -> ScalarPlan:
    """Find, by comparing calls, which scalars are constants and how to compute the others. `steps` are those of the
    optimizers in the last calls, `traces` the floats that were computed from the arguments of each call."""
    last = calls[-1].recording
    key_of = dict(keys.places)
    aligned = [each for each in zip(*steps, strict=True) if all(step.place is not None for step in each)]
    by_position: dict[int, tuple[int, int, int, int]] = {}
    for number, each in enumerate(aligned):
        if each[-1].scalar_places and all(step.scalar_places.keys() == each[-1].scalar_places.keys() for step in each):
            by_position.update((position, (number, *found)) for position, found in each[-1].scalar_places.items())
    groups: list[int] = []
    scalars: list[tuple[Any, ...]] = []
    random: list[tuple[int, int]] = []
    arguments: list[_ArgumentScalars] = []
    known: dict[Any, int] = {}
    for position, instruction in enumerate(last.instructions):
        if not isinstance(instruction, RunOp):
            continue
        identity: Any = by_position.get(position)
        if identity is None:
            found = _explained(calls, position, position in key_of, traces)
            identity = tuple(map(_bits, instruction.scalars))
            if position in key_of:
                identity = ("random", position)
                random.append((len(scalars), key_of[position]))
            if any(map(callable, found)):
                identity = ("argument", position)
                arguments.append(_ArgumentScalars(len(scalars), found))
        if identity not in known:
            known[identity] = len(scalars)
            scalars.append(instruction.scalars)
        groups.append(known[identity])
    repeated = []
    for number, each in enumerate(aligned):
        own = {identity[1:]: group for identity, group in known.items() if _is_of_step(identity, number)}
        repeated.append(_RepeatedStep(each[-1], own))
    fixed = [each[-1] for each in zip(*steps, strict=True) if each not in aligned and each[-1].is_stepped]
    members = [(each.optimizer, each.members) for each in steps[-1]]
    op_keys = [key_of.get(n) for n, each in enumerate(last.instructions) if isinstance(each, RunOp)]
    return ScalarPlan(groups, scalars, keys, op_keys, random, repeated, arguments, _pinned(traces), fixed, members)


def _pinned(traces: Sequence[FloatTrace]) -> dict[int, float]:
    """The float arguments whose values must stay as they were: those that did not change from call to call, and those
    that the function compares or converts."""
    last = traces[-1]
    return {
        position: value
        for position, value in enumerate(last.arguments)
        if any(position in trace.pinned for trace in traces)
        or all(same_scalar(trace.arguments[position], value) for trace in traces)
    }


def _is_of_step(identity: Any, number: int) -> bool:
    return len(identity) == 4 and isinstance(identity[0], int) and identity[0] == number


def _explained(
    calls: Sequence[RecordedCall], position: int, is_random: bool, traces: Sequence[FloatTrace]
) -> tuple[Any, ...]:
    """The scalars of an op: a constant as itself, a scalar that changes as a function of the call's floats."""
    scalars = [each.recording.instructions[position].scalars for each in calls]  # type: ignore[union-attr]
    if is_random:  # keys are drawn for each call
        scalars = [with_random_key(each, random_key(scalars[-1])) for each in scalars]
    found: list[Any] = []
    for values in zip(*scalars, strict=True):
        if all(same_scalar(values[0], other) for other in values[1:]):
            found.append(values[-1])
        else:
            found.append(_expression(values, traces) or _refuse(calls[-1].recording, position, values))
    return tuple(found)


def _expression(values: Sequence[Any], traces: Sequence[FloatTrace]) -> Any:
    """The function of the float arguments that gives these values, one in each call; None if none was traced."""
    counts = {len(trace.values) for trace in traces}
    if len(counts) > 1:
        return None
    for number, traced in enumerate(zip(*[trace.values for trace in traces], strict=True)):
        if same_scalars(traced, values):
            return traces[-1].expressions[number]
    return None


def _refuse(recording: Recording, position: int, values: Sequence[Any]) -> Any:
    op = recording.session.signatures[recording.instructions[position].op_id].op  # type: ignore[union-attr]
    raise VaryingScalar(
        f"{recording.line(position)}: {op} gets a number that changes from call to call "
        f"({', '.join(map(str, values))}) and is not computed from a float argument; pass it as an argument, use a "
        "tensor (capturable=True), or, if an optimizer computes it, pass that optimizer in state="
    )


def same_scalars(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether scalars are equal bit for bit."""
    return len(first) == len(second) and all(map(same_scalar, first, second))


def same_scalar(first: Any, second: Any) -> bool:
    return bool(_bits(first) == _bits(second))


def _bits(scalar: Any) -> Any:
    return (type(scalar), scalar.hex() if isinstance(scalar, float) else scalar)


def has_settings(optimizer: Optimizer, settings: tuple[Any, ...]) -> bool:
    return same_constant(settings_of(optimizer), settings)


def members_of(optimizer: Optimizer) -> list[int]:
    """The id()s of the parameters of an optimizer, group by group. The watched state keeps those of a recording."""
    return [ident for group in optimizer.param_groups for ident in (len(group["params"]), *map(id, group["params"]))]


def settings_of(optimizer: Optimizer) -> tuple[Any, ...]:
    """The names and values of the settings of each group of parameters, plain tensors by content."""
    return tuple([described(_settings(group)) for group in optimizer.param_groups])


def _counts(optimizer: Optimizer) -> list[Any]:
    """The numbers in the state of an optimizer."""
    entries = [each for each in optimizer.state.values() if isinstance(each, dict)]
    return [(key, value) for each in entries for key, value in each.items() if isinstance(value, int | float)]


def _attributes(optimizer: Optimizer) -> tuple[Any, ...]:
    """The attributes of an optimizer, of which a step changes none but its state."""
    return tuple(vars(optimizer).items())


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _mark_settings(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group of parameters. Floats are replaced by new objects, so that an assignment is noticed even
    if it assigns an equal value."""
    for name, value in group.items():
        if type(value) is float:
            group[name] = neg(neg(value))
    return _settings(group)
