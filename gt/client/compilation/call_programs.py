"""The instructions of a recorded call as programs: a skipped call sends one RunProgram for up to 128 instructions.

Programs are defined when a recorded call is first repeated. The recording tells which tensors die in each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias, get_args
from weakref import WeakKeyDictionary, finalize

from gt.client.program_matcher import MAX_TENSORS
from gt.client.program_templates import are_dense
from gt.client.session import Session
from gt.core.message_fields import id_fields
from gt.core.messages import MAX_STEPS, DefineProgram, ForgetOps, Instruction, ProgramStep, RunOp, RunProgram
from gt.core.program import capture, picker

MAX_PROGRAMS = 1 << 10  # of the recorded calls of a session; the dispatcher limits all programs of a session

Table: TypeAlias = tuple[int, ...]
"""The ids of a call's tensors, by slot."""

OpScalars: TypeAlias = Sequence[tuple[Any, ...]]
"""The scalars of each op of a call."""

_STEPS = get_args(ProgramStep)


class _CallProgram:
    """Instructions of a call that are sent together: as a RunProgram, or one by one if they are no steps of programs or
    fewer than `shortest`. `slots` are the slots of ids in the call, and `first_op` is the number of the first op."""

    def __init__(
        self, instructions: Sequence[Instruction], slots: Mapping[int, int], first_op: int, shortest: int | None
    ) -> None:
        captured = capture(instructions)
        self.program = captured.program
        self.named = captured.slots.keys()
        self._slots = captured.slots
        self._inputs = picker([slots[ident] for ident in captured.inputs])
        made = [slots[ident] for ident in captured.made]
        self._made = picker(made)
        self._ops = slice(first_op, first_op + len(self.program.ops))
        self._dead: tuple[int, ...] = ()
        self._frees: Mapping[int, tuple[int, ...]] = {}
        self._program_id = 0
        is_long = shortest is not None and len(self.program.ops) >= shortest and len(self.program.steps) > 1
        self.is_defined = is_long and are_dense(made)

    def set_dead(self, idents: Iterable[int]) -> None:
        """Let tensors die that no later instruction names."""
        self._dead = tuple(sorted(map(self._slots.__getitem__, idents)))
        self._frees = self.program.last_uses(self._dead)

    def define(self, program_id: int) -> DefineProgram:
        self._program_id = program_id
        return self.program.definition(program_id)

    def instructions(self, table: Table, scalars: OpScalars) -> Iterable[Instruction]:
        """The instructions of one call."""
        inputs, made = self._inputs(table), self._made(table)
        own = tuple(chain.from_iterable(scalars[self._ops]))
        if self.is_defined:
            return (RunProgram(self._program_id, made[0], inputs, own, self._dead),)
        return self.program.expand_range((*inputs, *own, *made), 0, len(self.program.steps), self._frees)


class CallPrograms:
    """The instructions of a call for any ids and scalars. `slots` are the slots of its ids; the tensors that are
    `dying` are freed after their last use. Without `shortest` all instructions are sent one by one."""

    def __init__(
        self,
        instructions: Sequence[Instruction],
        slots: Mapping[int, int],
        dying: Iterable[int],
        shortest: int | None,
    ) -> None:
        self._items: list[_CallProgram] = []
        ops = 0
        for run in _runs(instructions):
            self._items.append(_CallProgram(run, slots, ops, shortest))
            ops += len(self._items[-1].program.ops)
        self.defined = [item for item in self._items if item.is_defined]
        self._place_deaths(dying)
        self.op_count = sum(len(item.program.ops) for item in self.defined)

    def _place_deaths(self, dying: Iterable[int]) -> None:
        """Let each tensor die in the program that names it last."""
        last_use = {ident: item for item in self._items for ident in item.named}
        by_item: dict[_CallProgram, list[int]] = {}
        for ident in dying:
            by_item.setdefault(last_use[ident], []).append(ident)
        for item, dead in by_item.items():
            item.set_dead(dead)

    def instructions(self, table: Table, scalars: OpScalars) -> list[Instruction]:
        """The instructions of one call."""
        return [each for item in self._items for each in item.instructions(table, scalars)]


def _runs(instructions: Sequence[Instruction]) -> Iterator[Sequence[Instruction]]:
    """Splits instructions into those that may become a program, which begin with an op, and single ones."""
    run: list[Instruction] = []
    tensors = 0
    for instruction in instructions:
        is_op = isinstance(instruction, RunOp) and bool(instruction.outputs)
        is_step = is_op or (bool(run) and isinstance(instruction, _STEPS) and not isinstance(instruction, RunOp))
        size = len(id_fields(type(instruction)).tensors(instruction))
        if run and (not is_step or len(run) == MAX_STEPS or tensors + size > MAX_TENSORS):
            yield run
            run, tensors = [], 0
            is_step = is_op
        if is_step:
            run.append(instruction)
            tensors += size
        else:
            yield (instruction,)
    if run:
        yield run


class DefinedPrograms:
    """The programs of the recorded calls of one session, as long as it knows the same ops."""

    def __init__(self, session: Session) -> None:
        self.signatures = session.signatures
        self._programs = session.programs = {}
        self._unused: deque[int] = deque()  # programs of calls that were collected

    def define(self, session: Session, call: CallPrograms) -> list[Instruction] | None:
        """The instructions that define the programs of a call; None if there are too many."""
        unused = [self._unused.popleft() for _ in range(len(self._unused))]
        for program_id in unused:
            self._programs.pop(program_id, None)
        if len(self._programs) + len(call.defined) > MAX_PROGRAMS:
            self._unused.extend(unused)
            return None
        definitions = [each.define(session.new_op_id()) for each in call.defined]
        ids = [definition.program_id for definition in definitions]
        self._programs.update(zip(ids, [each.program for each in call.defined], strict=True))
        finalize(call, self._unused.extend, ids)
        return [*([ForgetOps(tuple(unused))] if unused else []), *definitions]


_defined: WeakKeyDictionary[Session, DefinedPrograms] = WeakKeyDictionary()


def defined_programs(session: Session) -> DefinedPrograms:
    """The programs of a session; a new table if the session has forgotten its ops."""
    found = _defined.get(session)
    if found is None or found.signatures is not session.signatures:
        found = _defined[session] = DefinedPrograms(session)
    return found
