"""Programs prepared for replay: the ops of a repeated run on one worker, called in order on a list of registers.

A replay does what the commands of the program would do one by one, without looking up ids, records and ops for each:
values stay in registers, and only those that outlive the program are stored under their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from gt.core.messages import RunOp
from gt.core.program import Program, picker, scalar_slots
from gt.worker.bound_op_programs import BoundOpProgram
from gt.worker.bound_ops import BoundOp, UnavailableOp
from gt.worker.direct_calls import DirectCall
from gt.worker.engines.engine import Value
from gt.worker.failed_value import FailedValue

AnyBoundOp: TypeAlias = BoundOp | UnavailableOp | BoundOpProgram
Tensors: TypeAlias = MutableMapping[int, Value | FailedValue]
Pick: TypeAlias = Callable[[list[Any]], Sequence[Any]]

MAX_VARIANTS = 8  # variants of a program: sets of slots that die in it


class DirectStep(NamedTuple):
    """A direct call: `pick` takes its arguments from the registers, `clear` are the registers to clear after it, and
    `position` is that of its op in the program."""

    call: DirectCall
    pick: Pick
    clear: tuple[int, ...]
    position: int


class OtherStep(NamedTuple):
    """An op that is no direct call: it has several results, takes views of its inputs, or is a program. `clear` and
    `position` as in DirectStep."""

    op: RunOp
    bound: AnyBoundOp
    clear: tuple[int, ...]
    position: int


class BlockRunner(Protocol):
    """A block that runs itself: it takes the registers, to which it adds the results of its ops, and a function that
    runs blocks on them."""

    def run(self, registers: list[Any], run_blocks: Callable[[Sequence[Block]], None]) -> None: ...


Block: TypeAlias = "list[DirectStep] | OtherStep | BlockRunner"


class Variant(NamedTuple):
    """A program prepared for a set of slots that die in it. `blocks` are direct steps that follow each other, and other
    steps between them. `taken` are the inputs that the program frees or writes to; `live` are the slots of the results
    that outlive it, each with its place among the new ids."""

    blocks: tuple[Block, ...]
    taken: tuple[int, ...]
    live: tuple[tuple[int, int], ...]


class BoundProgram:
    """A program with its ops bound to an engine. `writes` are the slots of tensors that it writes to and that existed
    before it, each with the slot of the new version, in order. `has_program_writes`: an op that is a program writes.
    `compilations` has the state of the compiler for each set of dead slots."""

    def __init__(self, program: Program, ops: Mapping[int, AnyBoundOp]) -> None:
        self.program = program
        self.ops = program.ops
        self.bound = [ops[op.op_id] for op in self.ops]
        self.compilations: dict[tuple[int, ...], Any] = {}
        self._variants: dict[tuple[int, ...], Variant] = {}
        self._renamed = {old: new for op, bound in self._pairs() for old, new in _renamed(op, bound)}
        self.has_program_writes = any(isinstance(bound, BoundOpProgram) and bound.writes for bound in self.bound)
        old_versions = set(range(program.inputs))
        self.writes: list[tuple[int, int]] = []
        for op, bound in self._pairs():
            for old, new in _renamed(op, bound):
                if old in old_versions:
                    self.writes.append((old, new))
                    old_versions.add(new)

    def _pairs(self) -> list[tuple[RunOp, AnyBoundOp]]:
        return list(zip(self.ops, self.bound, strict=True))

    def variant(self, dead: tuple[int, ...]) -> Variant:
        found = self._variants.get(dead)
        if found is None:
            if len(self._variants) >= MAX_VARIANTS:
                self._variants.clear()
                self.compilations.clear()
            found = self._variants[dead] = self._prepare(frozenset(dead))
        return found

    def _prepare(self, dead: frozenset[int]) -> Variant:
        program = self.program
        ends = dead | self._renamed.keys()
        clears = program.last_uses(ends)
        blocks: list[Block] = []
        for position, (op, bound) in enumerate(self._pairs()):
            clear = clears.get(position, ())
            if not is_direct(op, bound):
                blocks.append(OtherStep(op, bound, clear, position))
                continue
            assert bound.direct is not None
            step = DirectStep(bound.direct, picker((*op.inputs, *scalar_slots(op))), clear, position)
            if blocks and isinstance(blocks[-1], list):
                blocks[-1].append(step)
            else:
                blocks.append([step])
        first = program.first_new
        live = [(slot, slot - first) for slot in range(first, program.slots) if slot not in ends]
        taken = tuple([slot for slot in range(program.inputs) if slot in ends])
        return Variant(tuple(blocks), taken, tuple(live))

    def positions(self, before: int, after: int) -> range:
        """The positions of the ops that have added registers from `before` to `after`."""
        first, end = (sum([op.outputs[-1] < count for op in self.ops]) for count in (before, after))
        return range(first, end)


def is_direct(op: RunOp, bound: AnyBoundOp) -> bool:
    return bound.direct is not None and len(op.outputs) == 1


def _renamed(op: RunOp, bound: AnyBoundOp) -> list[tuple[int, int]]:
    """The slots of the tensors that an op writes to, before and after it."""
    writes = bound.writes
    before = [op.inputs[position] for position in writes]
    return list(zip(before, op.outputs[len(op.outputs) - len(writes) :], strict=True))
