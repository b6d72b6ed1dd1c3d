"""Programs: instructions that are described once and then run by one message, with slots in place of ids and scalars.

The instructions that a client repeats, those of a recorded call of `gt.compile` and those that workers replay are all a
`Program`. A run of it stands for its steps, each with the ids and scalars of the run: `Program.expand`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from msgspec.structs import replace

from gt.core.message_fields import IdFields, id_fields
from gt.core.messages import DefineProgram, FreeTensors, Instruction, RunOp, RunProgram

Values: TypeAlias = Sequence[Any]
"""The ids and scalars of a run by slot: its inputs, its scalars, and then the ids that it gives."""


class Program:
    """Instructions with slots in place of the ids of tensors and of scalars: first the `inputs`, which exist before a
    run, then the `scalars` of all steps, in order, then the ids that the steps give, in order: `first_new` and on, to
    `slots`. The ids that a run gives follow one another too, from `RunProgram.first` on."""

    __slots__ = ("_builders", "_uses", "first_new", "inputs", "scalars", "slots", "steps")

    def __init__(self, steps: Sequence[Instruction], inputs: int, scalars: int) -> None:
        self.steps = tuple(steps)
        self.inputs = inputs
        self.scalars = scalars
        self.first_new = inputs + scalars
        self.slots = self.first_new + sum([len(_fields(step).new(step)) for step in self.steps])
        self._builders: list[Callable[[Values], Instruction] | None] = [None] * len(self.steps)
        self._uses: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, definition: DefineProgram) -> Program:
        return cls(definition.steps, definition.input_count, definition.scalar_count)

    def definition(self, program_id: int) -> DefineProgram:
        return DefineProgram(program_id, self.inputs, self.scalars, self.steps)  # type: ignore[arg-type]

    @property
    def made(self) -> int:
        """The number of ids that a run gives."""
        return self.slots - self.first_new

    @property
    def ops(self) -> list[RunOp]:
        return [step for step in self.steps if type(step) is RunOp]

    # Runs

    def values(self, run: RunProgram) -> list[Any]:
        """The ids and scalars of a run, by slot."""
        return [*run.inputs, *run.scalars, *range(run.first, run.first + self.made)]

    def id(self, run: RunProgram, slot: int) -> int:
        """The id of one slot in a run."""
        return run.inputs[slot] if slot < self.inputs else run.first + slot - self.first_new

    def step(self, position: int, values: Values) -> Instruction:
        """One instruction of a run. Hot path."""
        build = self._builders[position]
        if build is None:
            build = self._builders[position] = _builder(self.steps[position])
        return build(values)

    def expand(self, run: RunProgram) -> list[Instruction]:
        """The instructions for which a run stands: its steps, and FreeTensors after the last uses of dead slots."""
        return list(self.expand_range(self.values(run), 0, len(self.steps), self.last_uses(run.dead)))

    def expand_range(
        self, values: Values, start: int, end: int, frees: Mapping[int, Sequence[int]]
    ) -> Iterator[Instruction]:
        """The same for a range of steps. `frees` are the slots to free after a step, by its position."""
        for position in range(start, end):
            yield self.step(position, values)
            if position in frees:
                yield FreeTensors(tuple([values[slot] for slot in frees[position]]))

    # Slots

    def uses(self, position: int) -> tuple[int, ...]:
        """The slots of tensors that a step names."""
        if not self._uses:
            self._uses = tuple([tuple(dict.fromkeys(_fields(step).tensors(step))) for step in self.steps])
        return self._uses[position]

    def last_uses(self, slots: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """For each step, by position, those of the slots that no later step names."""
        wanted = set(slots)
        found: dict[int, tuple[int, ...]] = {}
        for position in reversed(range(len(self.steps))):
            if not wanted:
                break
            used = tuple([slot for slot in self.uses(position) if slot in wanted])
            if used:
                found[position] = used
                wanted.difference_update(used)
        return found


class Capture(NamedTuple):
    """Instructions as a program: the ids of its inputs, the ids that its instructions give, in order, and the slot of
    each id."""

    program: Program
    inputs: tuple[int, ...]
    made: tuple[int, ...]
    slots: Mapping[int, int]


def capture(instructions: Sequence[Instruction]) -> Capture:
    """The program that instructions are a run of."""
    made = tuple([ident for each in instructions for ident in _fields(each).new(each)])
    given = set(made)
    named = chain.from_iterable([_fields(each).tensors(each) for each in instructions])
    inputs = tuple(dict.fromkeys([ident for ident in named if ident not in given]))
    count = sum([len(each.scalars) for each in instructions if type(each) is RunOp])
    first_new = len(inputs) + count
    slots = dict(zip((*inputs, *made), (*range(len(inputs)), *range(first_new, first_new + len(made))), strict=True))
    steps, scalar = [], len(inputs)
    for instruction in instructions:
        step = _with_ids(instruction, slots.__getitem__)
        if type(step) is RunOp:
            step = replace(step, scalars=tuple(range(scalar, scalar + len(step.scalars))))
            scalar += len(step.scalars)
        steps.append(step)
    return Capture(Program(steps, len(inputs), count), inputs, made, slots)


def _fields(instruction: Instruction) -> IdFields:
    return id_fields(type(instruction))


def _with_ids(instruction: Instruction, substitute: Callable[[int], int]) -> Instruction:
    """An instruction with other ids of tensors."""
    changed: dict[str, Any] = {}
    for name in _fields(instruction).tensor_names:
        value = getattr(instruction, name)
        changed[name] = substitute(value) if isinstance(value, int) else tuple(map(substitute, value))
    return replace(instruction, **changed)


def _builder(step: Instruction) -> Callable[[Values], Instruction]:
    """A function that makes the instruction of a run of a step, from the ids and scalars of the run."""
    if type(step) is RunOp:
        op_id, scope, site = step.op_id, step.scope, step.site
        inputs, outputs, scalars = picker(step.inputs), picker(step.outputs), picker(scalar_slots(step))
        return lambda values: RunOp(op_id, inputs(values), outputs(values), scalars(values), scope, site)
    return lambda values: _with_ids(step, values.__getitem__)


def scalar_slots(step: RunOp) -> tuple[int, ...]:
    """The slots of an op's scalars, which a step has in place of numbers."""
    return step.scalars  # type: ignore[return-value]


def picker(places: Sequence[int]) -> Callable[[Values], tuple[Any, ...]]:
    """A function that picks the items of a sequence at some places, as a tuple: `itemgetter` of one place would give
    the bare item."""
    if len(places) > 1:
        return itemgetter(*places)  # type: ignore[return-value]
    if not places:
        return lambda values: ()
    place = places[0]
    return lambda values: (values[place],)
