"""Blocks of a program whose ops are replaced by compiled code."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from gt.core.signatures import Number
from gt.worker.bound_programs import Block, BoundProgram
from gt.worker.compilation.code_log import note_asked, note_compiled, note_eager, note_used
from gt.worker.compilation.compilable_spans import PlacedUnit
from gt.worker.compilation.compile_units import CompileAnswer, CompileFailed
from gt.worker.compilation.compiled_code import CompiledCode
from gt.worker.compilation.server_connection import CompileServerConnection
from gt.worker.engines.torch_private import load_code
from gt.worker.failed_value import FailedValue

MAX_CONSTANTS = 4  # sets of constants that one span of ops is compiled for

RunBlocks: TypeAlias = Callable[[Sequence[Block]], None]


@dataclass
class CompileCounts:
    """What was compiled: `codes` has the code of units by their keys, once it has given the same results as the ops,
    and `runs` is how often code ran in place of ops."""

    codes: dict[str, CompiledCode] = field(default_factory=dict)
    runs: int = 0


class BlockOwner(Protocol):
    """The compilation that a block belongs to. `refuse` leaves the op at a position uncompiled, and `tell` tells the
    client why an op is not compiled."""

    @property
    def program(self) -> BoundProgram: ...
    def refuse(self, position: int, reason: str) -> None: ...
    def tell(self, position: int, reason: str) -> None: ...


class CompiledCodeError(Exception):
    """Compiled code has failed, and may have begun to write to the tensors in these registers. `blocks` are those that
    the code stands for, from the op at `position` on."""

    def __init__(self, written: Sequence[int], position: int, blocks: Sequence[Block], error: Exception) -> None:
        super().__init__(str(error))
        self.written = written
        self.position = position
        self.blocks = blocks
        self.error = error


class CompiledBlock:
    """The ops of a compile unit in a program. Their code runs in their place once it was compiled and has given the
    same results as the ops."""

    def __init__(
        self,
        owner: BlockOwner,
        server: CompileServerConnection,
        counts: CompileCounts,
        placed: PlacedUnit,
        blocks: Sequence[Block],
    ) -> None:
        self._owner = owner
        self._server = server
        self._counts = counts
        self._placed = placed
        self._blocks = blocks
        self._inputs = placed.inputs
        self._scalars = slice(placed.scalars[0], placed.scalars[-1] + 1) if placed.scalars else slice(0)
        self._outputs = placed.outputs
        self._clear = [register for step in split_steps(blocks) for register in _clear_of(step)]
        self._code: CompiledCode | None = None
        self._trial: CompiledCode | None = None
        self._asked = 0
        self._is_asked = False

    def submit(self) -> None:
        """Ask for code, unless an equal span of ops has code already: cuts between programs move, so that programs with
        the same spans of ops come again and again."""
        self._code = self._counts.codes.get(self._placed.unit.key)
        if self._code is not None:
            return
        self._asked += 1
        self._is_asked = True
        note_asked(self._names())
        self._server.submit(self._placed.unit, self._take)

    def run(self, registers: list[Any], run_blocks: RunBlocks) -> None:
        """Hot path."""
        if self._code is None and self._trial is None:
            run_blocks(self._blocks)
            return
        values = [registers[register] for register in self._inputs]
        if FailedValue in map(type, values):
            run_blocks(self._blocks)
            return
        scalars = registers[self._scalars]
        code = self._code or self._trial
        assert code is not None
        if not code.has_constants(scalars):
            self._compile_again(scalars)
        elif code.fits(values):
            if self._code is None:
                self._try(values, scalars, registers, run_blocks)
                return
            outputs = self._call(code, values, scalars)
            if outputs is not None:
                self._counts.runs += 1
                registers += [None if place is None else outputs[place] for place in self._outputs]
                for register in self._clear:
                    registers[register] = None
                return
        run_blocks(self._blocks)

    def _call(
        self, code: CompiledCode, values: list[torch.Tensor], scalars: Sequence[Number]
    ) -> list[torch.Tensor] | None:
        """The results of the code; None if it has failed and the ops can run in its place. Failures are rare, such as a
        lack of memory: ops that check values are not compiled."""
        try:
            return code(values, scalars)
        except Exception as error:
            self._fail(f"{self._describe()} runs eagerly: its compiled code has failed: {error}")
            if code.writes:
                written = [self._inputs[position] for position in code.writes]
                raise CompiledCodeError(written, self._placed.ops.start, self._blocks, error) from error
            return None

    def _try(
        self, values: list[torch.Tensor], scalars: Sequence[Number], registers: list[Any], run_blocks: RunBlocks
    ) -> None:
        """Run the ops, and the code on copies; use the code from now on if both agree."""
        code, self._trial = self._trial, None
        assert code is not None
        copies = code.with_own_memory(values)
        start, began = len(registers), time.perf_counter()
        run_blocks(self._blocks)
        eager = time.perf_counter() - began
        made = registers[start:]
        expected = [made[number] for number, place in enumerate(self._outputs) if place is not None]
        if any(isinstance(value, FailedValue) for value in expected):
            self._trial = code  # an op has failed: nothing to compare with
            return
        try:
            reason = code.compare(copies, scalars, values, expected)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            self._fail(f"compiled code of {self._describe()} is not used: {reason}")
            return
        began = time.perf_counter()
        code(copies, scalars)
        compiled = time.perf_counter() - began
        note_used(self._names(), eager, compiled)
        self._code = code
        self._counts.codes[self._placed.unit.key] = code

    def _compile_again(self, scalars: Sequence[Number]) -> None:
        """Ask for code with other constants, because numbers that the code has as constants have changed."""
        if self._is_asked:
            return
        self._code = self._trial = None
        if self._asked >= MAX_CONSTANTS:
            self._is_asked = True
            self._fail(f"{self._describe()} runs eagerly: numbers change that compiled code has as constants")
            return
        unit = self._placed.unit
        kept = tuple(None if old is None else new for old, new in zip(unit.scalars, scalars, strict=True))
        self._placed = self._placed._replace(unit=type(unit)(unit.calls, unit.inputs, kept, unit.live, unit.threads))
        self.submit()

    def _take(self, answer: CompileAnswer) -> None:
        """Load the code that the compile server has made, or tell why there is none."""
        self._is_asked = False
        if isinstance(answer, CompileFailed):
            if answer.call >= 0:
                note_eager(self._names(), answer.reason)
                position = self._placed.op_of_call[answer.call]
                self._owner.refuse(position, answer.reason)
            else:
                self._fail(f"{self._describe()} runs eagerly: {answer.reason}")
            return
        try:
            self._trial = CompiledCode(self._placed.unit, answer, load_code(Path(answer.path)))
        except Exception as error:
            self._fail(f"{self._describe()} runs eagerly: its code cannot be loaded: {error}")
        else:
            note_compiled(self._names(), answer.seconds)

    def _fail(self, reason: str) -> None:
        self._code = self._trial = None
        self._counts.codes.pop(self._placed.unit.key, None)
        note_eager(self._names(), reason)
        self._owner.tell(self._placed.ops.start, reason)

    def _describe(self) -> str:
        names = self._names()
        return f"{len(names)} ops from {names[0]} to {names[-1]}"

    def _names(self) -> list[str]:
        return [self._owner.program.bound[position].op for position in self._placed.ops]


def split_steps(blocks: Sequence[Block]) -> list[Block]:
    """The steps of blocks, as blocks of one op each."""
    return [step for block in blocks for step in ([[one] for one in block] if isinstance(block, list) else [block])]


def joined_steps(steps: Sequence[Block]) -> list[Block]:
    """Direct steps that follow each other as one block."""
    joined: list[Block] = []
    for step in steps:
        if joined and isinstance(step, list) and isinstance(joined[-1], list):
            joined[-1] = [*joined[-1], *step]
        else:
            joined.append(step)
    return joined


def _clear_of(step: Block) -> Sequence[int]:
    return step[0].clear if isinstance(step, list) else step.clear  # type: ignore[union-attr]
