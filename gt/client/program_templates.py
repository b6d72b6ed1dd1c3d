"""Templates of programs, which are compared with the instructions of a batch by a few calls for a whole run of them.

Comparing one by one in Python would cost as much as planning the ops. So a template compares sequences: those of kinds,
lines and scopes, then those of tensor ids relative to the first new id of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from msgspec.structs import astuple

from gt.core.message_fields import IdFields, id_fields
from gt.core.messages import ProgramStep, RunOp, RunProgram
from gt.core.program import capture, picker
from gt.core.signatures import Number

Kind: TypeAlias = int | tuple[object, ...]
"""The id of an op, or another instruction without its ids."""


class StepRun:
    """Consecutive instructions that may be steps of a program, with each field of all of them in one tuple."""

    __slots__ = ("inputs", "kinds", "outputs", "scalars", "scopes", "sites", "steps")

    def __init__(self, steps: list[ProgramStep], *, only_ops: bool) -> None:
        self.steps = steps
        rows = map(astuple if only_ops else _row_of, steps)
        self.kinds, self.inputs, self.outputs, self.scalars, self.scopes, self.sites = zip(*rows, strict=True)


def _row_of(step: ProgramStep) -> tuple[Any, ...]:
    """The fields of a RunOp, or those of another instruction in their places."""
    if type(step) is RunOp:
        return astuple(step)
    fields = id_fields(type(step))
    others = [_without_ids(step, name, fields) for name in step.__struct_fields__ if name != "site"]
    return (type(step), *others), fields.tensors(step), (), (), 0, getattr(step, "site", 0)


def _without_ids(step: ProgramStep, name: str, fields: IdFields) -> object:
    """The value of a field, or the number of its ids."""
    value = getattr(step, name)
    if name not in fields.tensor_names:
        return value
    return len(value) if isinstance(value, tuple) else None


class Tokens:
    """The instructions of a run without their tensors and scalars: their kinds, sites and scopes. Repetitions have
    equal tokens."""

    __slots__ = ("count", "kinds", "op_ids", "scopes", "sites")

    def __init__(self, run: StepRun, start: int, end: int) -> None:
        self.count = end - start
        self.kinds, self.sites, self.scopes = run.kinds[start:end], run.sites[start:end], run.scopes[start:end]
        self.op_ids = [kind for kind in self.kinds if isinstance(kind, int)]

    def match(self, run: StepRun, start: int) -> bool:
        """Whether a run, from `start` on, has these tokens."""
        end = start + self.count
        return (
            run.kinds[start:end] == self.kinds
            and run.sites[start:end] == self.sites
            and run.scopes[start:end] == self.scopes
        )

    def match_beginning(self, run: StepRun, start: int) -> bool:
        """Whether a run ends too early for all of these tokens, and agrees with them as far as it goes."""
        count = len(run.kinds) - start
        return (
            count < self.count
            and run.kinds[start:] == self.kinds[:count]
            and run.sites[start:] == self.sites[:count]
            and run.scopes[start:] == self.scopes[:count]
        )

    def first_difference(self, run: StepRun, start: int) -> tuple[int, str]:
        """The position of the first instruction of a run that differs from these, and the kind of the difference."""
        for position in range(start, min(start + self.count, len(run.kinds))):
            if run.kinds[position] != self.kinds[position - start]:
                return position, "another op, shape or constant"
            if run.sites[position] != self.sites[position - start]:
                return position, "another line"
            if run.scopes[position] != self.scopes[position - start]:
                return position, "another scope"
        if start + self.count > len(run.kinds):
            return len(run.kinds) - 1, "a read or another instruction"
        return start, "another operand"


class Match(NamedTuple):
    """A repetition of a program at `start` to `end` of a run: the first id that it gives, its inputs, the ids that it
    gives, and its scalars."""

    template: Template
    start: int
    end: int
    first: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scalars: tuple[Number, ...]

    def instruction(self, dead: set[int]) -> RunProgram:
        """The RunProgram of this repetition. `dead` are ids that no later instruction uses."""
        slots = self.template.dead_slots(self, dead) if dead else ()
        return RunProgram(self.template.definition.program_id, self.first, self.inputs, self.scalars, slots)


class Template:
    """The definition of a program, and the functions that compare later instructions with it. `successor` is the
    program that followed last time."""

    def __init__(self, program_id: int, tokens: Tokens, steps: Sequence[ProgramStep]) -> None:
        self.tokens = tokens
        self.successor: Template | None = None
        captured = capture(steps)
        self._program = captured.program
        self.definition = captured.program.definition(program_id)
        own = {ident: place for place, ident in enumerate(captured.made)}
        input_of = {ident: place for place, ident in enumerate(captured.inputs)}
        named = [ident for step in steps for ident in named_ids(step)]
        self._pick_own_inputs = picker([place for place, ident in enumerate(named) if ident in own])
        self._pick_own_outputs = picker([own[ident] for ident in named if ident in own])
        self._pick_input_uses = picker([place for place, ident in enumerate(named) if ident in input_of])
        self._pick_inputs = picker([named.index(ident) for ident in captured.inputs])
        self._repeat = picker([input_of[ident] for ident in named if ident in input_of])
        self._dead: tuple[int, ...] = ()
        self._pick_dead = picker(())

    def match(self, run: StepRun, start: int) -> Match | None:
        """The repetition of this program at `start`, where the tokens match; None if other tensors are used. Hot
        path."""
        end = start + self.tokens.count
        outputs = tuple(chain.from_iterable(run.outputs[start:end]))
        if not are_dense(outputs):
            return None
        named = tuple(chain.from_iterable(run.inputs[start:end]))
        if self._pick_own_inputs(named) != self._pick_own_outputs(outputs):
            return None
        inputs = self._pick_inputs(named)
        if self._pick_input_uses(named) != self._repeat(inputs):
            return None
        if len(set(inputs)) != len(inputs):
            return None
        if inputs and max(inputs) >= outputs[0] and not set(inputs).isdisjoint(outputs):
            return None
        scalars = tuple(chain.from_iterable(run.scalars[start:end]))
        return Match(self, start, end, outputs[0], inputs, outputs, scalars)

    def dead_slots(self, match: Match, dead: set[int]) -> tuple[int, ...]:
        """The slots of ids that die in a repetition: mostly those that died in the last one."""
        ids = (*match.inputs, *match.outputs)
        if len(dead) != len(self._dead) or not dead.issuperset(self._pick_dead(ids)):
            places = [place for place, ident in enumerate(ids) if ident in dead]
            self._pick_dead = picker(places)
            count, scalars = self._program.inputs, self._program.scalars
            self._dead = tuple([place if place < count else place + scalars for place in places])
        return self._dead


def named_ids(step: ProgramStep) -> Sequence[int]:
    """The tensors that a step names and does not make."""
    return step.inputs if isinstance(step, RunOp) else id_fields(type(step)).tensors(step)


def are_dense(outputs: Sequence[int]) -> bool:
    """Whether the new ids of a run follow one another, as those of a program do. Requests take ids between those of
    ops, and ops of several threads may have ids in another order, because an id is taken before its op is queued."""
    return bool(outputs) and list(outputs) == list(range(outputs[0], outputs[0] + len(outputs)))
