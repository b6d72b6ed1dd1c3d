"""Compiles the ops of programs in the background. Ops run eagerly until their code is ready, or if it does not fit."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from gt.core.ids import session_of
from gt.core.messages import RunOp, RunProgram
from gt.core.meta import TensorMeta
from gt.core.signatures import Number
from gt.worker.bound_programs import Block, BoundProgram, Variant
from gt.worker.compilation.code_log import note_eager
from gt.worker.compilation.compilable_spans import PlacedUnit, find_spans, make_unit
from gt.worker.compilation.compiled_blocks import CompileCounts, CompiledBlock, RunBlocks, joined_steps, split_steps
from gt.worker.compilation.server_connection import CompileServerConnection
from gt.worker.compilation.server_process import COMPILERS, find_compiler
from gt.worker.engines.engine import Engine
from gt.worker.failed_value import FailedValue

log = logging.getLogger("gt.compile")
RUNS_IN_A_SCOPE = 2  # runs of a program before it is compiled
RUNS_BY_ITSELF = 16  # the same, without a signal that asks for it
POLL_SECONDS = 0.02

TellFailure: TypeAlias = Callable[[int, int, int, str], None]
"""Takes the session, scope and site of ops that are not compiled, and the reason."""


class ProgramCompiler:
    """Decides which programs of a worker are compiled, and when. `compiles` tells whether the ops of a session's scope
    are to be compiled; with `is_automatic` all ops that run often are."""

    def __init__(
        self,
        engine: Engine,
        server: CompileServerConnection,
        compiles: Callable[[int, int], bool],
        tell: TellFailure,
        *,
        is_automatic: bool,
    ) -> None:
        self._engine = engine
        self.server = server
        self._compiles = compiles
        self._tell = tell
        self._is_automatic = is_automatic
        self._next_poll = 0.0
        self._told: set[tuple[int, str]] = set()
        self.counts = CompileCounts()

    def blocks(self, run: RunProgram, program: BoundProgram, variant: Variant) -> Sequence[Block]:
        """The blocks to run a program with. Hot path."""
        compilation = program.compilations.get(run.dead)
        if compilation is None:
            compilation = program.compilations[run.dead] = ProgramCompilation(self, run, program, variant)
        if self.server.is_waiting and time.monotonic() > self._next_poll:
            self.server.poll()
            self._next_poll = time.monotonic() + POLL_SECONDS
        if compilation.is_settled:
            return compilation.blocks
        try:
            return compilation.next_blocks(run)
        except Exception as error:  # an internal error: the ops must not fail because of it
            log.warning("a program is not compiled: %s", error, exc_info=True)
            compilation.is_settled = True
            return variant.blocks

    def wanted_ops(self, session: int, program: BoundProgram) -> Callable[[RunOp], bool]:
        scopes = {op.scope for op in program.ops}
        chosen = {scope for scope in scopes if self._is_automatic or self._compiles(session, scope)}
        return lambda op: op.scope in chosen

    def runs_before(self, session: int, program: BoundProgram) -> int:
        """How often a program runs before it is compiled."""
        asked = any(self._compiles(session, op.scope) for op in program.ops)
        return RUNS_IN_A_SCOPE if asked else RUNS_BY_ITSELF

    def obstacle(self) -> str | None:
        """Why this worker cannot compile anything; None if it can."""
        if not self._engine.is_torch_cpu:
            return (
                f"compile: true works on CPU workers of the engine pytorch, not on {self._engine.device}; runs eagerly"
            )
        if self._engine.checks_geometry:
            return "compile: true compares no strides after each op, which GT_CHECK_GEOMETRY asks for; runs eagerly"
        if find_compiler() is None:
            return (
                f"compile: true needs a C++ compiler on the worker: none found ({', '.join(COMPILERS)}, $CXX); "
                f"runs eagerly"
            )
        return None

    def meta(self, value: Any) -> TensorMeta | None:
        return self._engine.meta(value) if self._engine.is_tensor(value) else None

    def tell(self, session: int, op: RunOp, reason: str) -> None:
        """Report once for each session and reason."""
        if (session, reason) not in self._told:
            self._told.add((session, reason))
            self._tell(session, op.scope, op.site, reason)

    def forget(self, session: int) -> None:
        self._told = {told for told in self._told if told[0] != session}


class ProgramCompilation:
    """The compilation of a program for one set of dead slots, in stages: a few runs that are only counted, one run that
    notes the metas of all tensors, and then runs of compiled blocks. Once it `is_settled`, every run has the same
    `blocks`."""

    def __init__(self, compiler: ProgramCompiler, run: RunProgram, program: BoundProgram, variant: Variant) -> None:
        self._compiler = compiler
        self._program = program
        self._variant = variant
        self._session = session_of(run.program_id)
        self._wanted = compiler.wanted_ops(self._session, program)
        self._runs_left = compiler.runs_before(self._session, program)
        self.blocks: Sequence[Block] = variant.blocks
        self._metas: dict[int, TensorMeta] = {}
        self._noted = -1
        self._refused: dict[int, str] = {}
        self.is_settled = not any(map(self._wanted, program.ops))

    def next_blocks(self, run: RunProgram) -> Sequence[Block]:
        if self._runs_left:
            self._runs_left -= 1
            return self._variant.blocks
        if self._noted < len(self._program.ops):
            self._metas.clear()
            self._noted = 0
            return [NotingBlock(self, step) for step in split_steps(self._variant.blocks)]
        self._prepare(run.scalars)
        return self.blocks

    def note_inputs(self, registers: Sequence[Any]) -> None:
        """Note the metas of the inputs, before the first op."""
        if not self._noted:
            self._note(registers, range(self._program.program.inputs))

    def note_results(self, registers: Sequence[Any], start: int) -> None:
        """Note the metas of registers from `start` on, the results of an op. If it has failed, the next run notes
        them."""
        self._note(registers, range(start, len(registers)))
        self._noted += not any(isinstance(value, FailedValue) for value in registers[start:])

    def _note(self, registers: Sequence[Any], places: range) -> None:
        for register in places:
            meta = self._compiler.meta(registers[register])
            if meta is not None:
                self._metas[register] = meta

    def _prepare(self, scalars: Sequence[Number]) -> None:
        self.is_settled = True
        ops = self._program.ops
        first = next(op for op in ops if self._wanted(op))
        obstacle = self._compiler.obstacle()
        if obstacle is not None:
            note_eager([bound.op for bound in self._program.bound], obstacle)
            self._compiler.tell(self._session, first, obstacle)
            return
        spans, eager = find_spans(self._program, self._wanted, self._metas, self._refused)
        for op, reason in Counter((found.op, found.reason) for found in eager):
            note_eager([op], reason)
        steps = split_steps(self._variant.blocks)
        blocks: list[Block] = []
        position = 0
        for place in spans:
            blocks += joined_steps(steps[position : place.start])
            placed, own = self._unit(place, scalars), joined_steps(steps[place.start : place.stop])
            blocks.append(CompiledBlock(self, self._compiler.server, self._compiler.counts, placed, own))
            position = place.stop
        self.blocks = [*blocks, *joined_steps(steps[position:])]
        for block in self.blocks:
            if isinstance(block, CompiledBlock):
                block.submit()

    def _unit(self, place: range, scalars: Sequence[Number]) -> PlacedUnit:
        later = {slot for op in self._program.ops[place.stop :] for slot in op.inputs}
        kept = {slot for slot, _ in self._variant.live}
        return make_unit(self._program, place, self._metas, frozenset(later | kept), scalars, torch.get_num_threads())

    def refuse(self, position: int, reason: str) -> None:
        """Leave an op uncompiled that cannot be traced: the next run finds units before and after it."""
        self._refused[position] = reason
        self.blocks = self._variant.blocks
        self.is_settled = False

    # For compiled blocks

    @property
    def program(self) -> BoundProgram:
        return self._program

    def tell(self, position: int, reason: str) -> None:
        self._compiler.tell(self._session, self._program.ops[position], reason)


class NotingBlock:
    """Runs a step of a program, and notes the metas of its results."""

    def __init__(self, compilation: ProgramCompilation, step: Block) -> None:
        self._compilation = compilation
        self._step = step

    def run(self, registers: list[Any], run_blocks: RunBlocks) -> None:
        start = len(registers)
        self._compilation.note_inputs(registers)
        run_blocks([self._step])
        self._compilation.note_results(registers, start)
