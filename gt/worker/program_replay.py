"""Replays programs: all their ops on registers, or command by command where a replay is not possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gt.core.messages import RunOp, RunProgram
from gt.core.program import scalar_slots
from gt.worker.bound_op_programs import BoundOpProgram
from gt.worker.bound_programs import Block, BoundProgram, OtherStep, Variant, is_direct
from gt.worker.compilation.compiled_blocks import CompiledCodeError
from gt.worker.compilation.program_compiler import ProgramCompiler
from gt.worker.failed_value import FailedValue
from gt.worker.op_runner import OpRunner
from gt.worker.timeline_recorder import TimelineRecorder

_NoneType = type(None)


class ProgramReplay:
    """Runs programs with the tensors, ops and optimizer steps of a runner. `ops_replayed` counts the ops of complete
    replays."""

    def __init__(self, runner: OpRunner, compiler: ProgramCompiler | None, timeline: TimelineRecorder) -> None:
        self._runner = runner
        self._timeline = timeline
        self._compiler = compiler
        self.ops_replayed = 0

    def run(self, run: RunProgram, bound: BoundProgram) -> None:
        """Hot path. `progress` shows the program and the position in it. The inputs that the program frees are taken
        out of the tensors first, so that each is freed after its last use."""
        runner = self._runner
        tensors, progress = runner.tensors, runner.progress
        if runner.overlapped:
            runner.overlapped.finish(run.inputs)
        registers: list[Any] = [*map(tensors.get, run.inputs)]
        kinds = set(map(type, registers))
        if FailedValue in kinds or _NoneType in kinds or not self._may_write(run, bound):
            self._run_commands(run, bound, 0)
            return
        variant = bound.variant(run.dead)
        registers += run.scalars
        for position in variant.taken:
            del tensors[run.inputs[position]]
        progress[0] = run.program_id
        try:
            blocks = variant.blocks if self._compiler is None else self._compiler.blocks(run, bound, variant)
            self._run_blocks(run, bound, blocks, registers)
        except CompiledCodeError as error:
            self._go_on_unwritten(run, bound, variant, registers, error)
            return
        except Exception as error:
            self._go_on(run, bound, variant, registers, error)
            return
        first = run.first
        for slot, place in variant.live:
            tensors[first + place] = registers[slot]
        self._forget_dead(run, bound)
        self.ops_replayed += len(bound.ops)

    def _run_blocks(self, run: RunProgram, bound: BoundProgram, blocks: Sequence[Block], registers: list[Any]) -> None:
        """Hot path."""
        progress, append, timeline = self._runner.progress, registers.append, self._timeline
        for block in blocks:
            if type(block) is list:
                for call, pick, clear, position in timeline.timed_steps(block) if timeline.is_on else block:
                    progress[1] = position
                    append(call(*pick(registers)))
                    for register in clear:
                        registers[register] = None
            elif type(block) is OtherStep:
                for step in timeline.timed_steps((block,)) if timeline.is_on else (block,):
                    self._run_other(run, bound, step, registers)
            else:
                start = timeline.clock() if timeline.is_on else 0
                before = len(registers)
                block.run(registers, lambda inner: self._run_blocks(run, bound, inner, registers))  # type: ignore[union-attr]
                if start:
                    timeline.note_code(bound.positions(before, len(registers)), start)

    def _may_write(self, run: RunProgram, bound: BoundProgram) -> bool:
        """Whether the optimizer steps let a replay write to the tensors that the program writes to. If so, tells the
        steps of the writes that they follow."""
        steps = self._runner.steps
        if not bound.writes or not steps.sessions:
            return True
        written = [run.inputs[old] for old, _ in bound.writes if old < bound.program.inputs]
        if not any(map(steps.follows, written)):
            return True
        if bound.has_program_writes or steps.skip_reason(written) is not None:
            return False
        ids = bound.program.values(run)
        try:
            for old, new in bound.writes:
                steps.before_write([ids[old]], [ids[new]], self._runner.tensors.get)
        except Exception:  # there is no memory to keep a value in: the command that writes it fails
            return False
        return True

    def _run_other(self, run: RunProgram, program: BoundProgram, step: OtherStep, registers: list[Any]) -> None:
        """Run an op that is no direct call."""
        op, bound, clear, position = step
        self._runner.progress[1] = position
        if isinstance(bound, BoundOpProgram):
            self._run_program(run, program, step, registers)
        else:
            values = [registers[slot] for slot in op.inputs]
            results = bound.call(values, tuple([registers[slot] for slot in scalar_slots(op)]))[: bound.output_count]
            if any(result is None for result in results):
                missing = self._runner.missing(_command(program, run, position), bound)
                results = [missing if result is None else result for result in results]
            registers += results
            registers += [values[written] for written in bound.writes]
        for slot in clear:
            registers[slot] = None

    def _run_program(self, run: RunProgram, program: BoundProgram, step: OtherStep, registers: list[Any]) -> None:
        """Run an op of several steps as a command. Its inputs and outputs are stored under their ids meanwhile."""
        tensors = self._runner.tensors
        command = _command(program, run, step.position)
        lent = []
        for slot, ident in zip(step.op.inputs, command.inputs, strict=True):
            if ident not in tensors:
                lent.append(ident)
                tensors[ident] = registers[slot]
        self._runner.run(command)
        registers += [tensors.pop(ident, None) for ident in command.outputs]
        for ident in lent:
            tensors.pop(ident, None)
        self._runner.progress[0] = run.program_id

    # Failures

    def _go_on(
        self, run: RunProgram, program: BoundProgram, variant: Variant, registers: list[Any], error: Exception
    ) -> None:
        """Report the error that an op has raised, and run the ops after it command by command."""
        position = next(number for number, op in enumerate(program.ops) if op.outputs[-1] >= len(registers))
        program.restore(run, variant, registers, position, self._runner.tensors)
        registers.clear()
        op, bound, command = program.ops[position], program.bound[position], _command(program, run, position)
        if is_direct(op, bound):
            self._runner.run_after_error(command, bound, error)
        else:
            assert not isinstance(bound, BoundOpProgram), "a program never raises"
            self._runner.fail(command, bound, error)
        frees = program.program.last_uses(run.dead)
        if position in frees:
            self._runner.free([program.program.id(run, slot) for slot in frees[position]])
        self._run_commands(run, program, position + 1)

    def _go_on_unwritten(
        self, run: RunProgram, program: BoundProgram, variant: Variant, registers: list[Any], error: CompiledCodeError
    ) -> None:
        """Compiled code has failed: mark the tensors that it writes to as failed, and run its ops and all later ones
        command by command."""
        command = _command(program, run, error.position)
        failed = self._runner.report_failure(command, program.bound[error.position].op, error.error)
        for slot in error.written:
            registers[slot] = failed
        program.restore(run, variant, registers, error.position, self._runner.tensors)
        registers.clear()
        self._run_commands(run, program, error.position)

    def _run_commands(self, run: RunProgram, bound: BoundProgram, start: int) -> None:
        program = bound.program
        frees = program.last_uses(run.dead)
        for command in program.expand_range(program.values(run), start, len(program.steps), frees):
            if isinstance(command, RunOp):
                self._runner.run(command)
            else:
                self._runner.free(command.ids)  # type: ignore[union-attr]

    def _forget_dead(self, run: RunProgram, bound: BoundProgram) -> None:
        steps = self._runner.steps
        if steps.kept or steps.unwritten:
            steps.free([bound.program.id(run, slot) for slot in run.dead])


def _command(bound: BoundProgram, run: RunProgram, position: int) -> RunOp:
    """The command of one op of a run."""
    return bound.program.step(position, bound.program.values(run))  # type: ignore[return-value]
