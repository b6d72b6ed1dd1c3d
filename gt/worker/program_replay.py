"""Replays programs: their ops on registers, or command by command where an optimizer step forbids some writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gt.core.messages import RunOp, RunProgram
from gt.core.program import scalar_slots
from gt.worker.bound_op_programs import BoundOpProgram
from gt.worker.bound_programs import Block, BlockRunner, BoundProgram, OtherStep, is_direct
from gt.worker.compilation.compiled_blocks import CompiledCodeError
from gt.worker.compilation.program_compiler import ProgramCompiler
from gt.worker.op_runner import OpRunner
from gt.worker.timeline_recorder import TimelineRecorder


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
        if not self._may_write(run, bound):
            self._run_commands(run, bound)
            return
        variant = bound.variant(run.dead)
        registers: list[Any] = [*map(tensors.get, run.inputs), *run.scalars]
        for position in variant.taken:
            tensors.pop(run.inputs[position], None)
        progress[0] = run.program_id
        blocks = variant.blocks if self._compiler is None else self._compiler.blocks(run, bound, variant)
        self._run_blocks(run, bound, blocks, registers)
        first = run.first
        for slot, place in variant.live:
            tensors[first + place] = registers[slot]
        self._forget_dead(run, bound)
        self.ops_replayed += len(bound.ops)

    def _run_blocks(self, run: RunProgram, bound: BoundProgram, blocks: Sequence[Block], registers: list[Any]) -> None:
        """Hot path. An op that fails leaves failures in place of its results, and the next ops run."""
        progress, append, timeline = self._runner.progress, registers.append, self._timeline
        for block in blocks:
            if type(block) is list:
                for call, pick, clear, position in timeline.timed_steps(block) if timeline.is_on else block:
                    progress[1] = position
                    try:
                        append(call(*pick(registers)))
                    except Exception as error:
                        self._run_command(run, bound, position, registers, error)
                    for register in clear:
                        registers[register] = None
            elif type(block) is OtherStep:
                for step in timeline.timed_steps((block,)) if timeline.is_on else (block,):
                    self._run_other(run, bound, step, registers)
            else:
                self._run_block(run, bound, block, registers)  # type: ignore[arg-type]

    def _run_block(self, run: RunProgram, bound: BoundProgram, block: BlockRunner, registers: list[Any]) -> None:
        """Run a block that runs itself. Where compiled code has failed, its ops run after all: those that need a tensor
        to which the code may have written fail."""
        timeline = self._timeline
        start = timeline.clock() if timeline.is_on else 0
        before = len(registers)
        try:
            block.run(registers, lambda inner: self._run_blocks(run, bound, inner, registers))
        except CompiledCodeError as error:
            command, op = _command(bound, run, error.position), bound.bound[error.position].op
            failed = self._runner.report_failure(command, op, error.error)
            for slot in error.written:
                registers[slot] = failed
            self._run_blocks(run, bound, error.blocks, registers)
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
        values = [registers[slot] for slot in op.inputs]
        if isinstance(bound, BoundOpProgram) or any(value is None for value in values):
            self._run_command(run, program, position, registers)
            self._runner.progress[0] = run.program_id
        else:
            scalars = tuple([registers[slot] for slot in scalar_slots(op)])
            try:
                results = bound.call(values, scalars)[: bound.output_count]
            except Exception as error:
                self._run_command(run, program, position, registers, error)
            else:
                if any(result is None for result in results):
                    missing = self._runner.missing(_command(program, run, position), bound)
                    results = [missing if result is None else result for result in results]
                registers += results
                registers += [values[written] for written in bound.writes]
        for slot in clear:
            registers[slot] = None

    def _run_command(
        self,
        run: RunProgram,
        program: BoundProgram,
        position: int,
        registers: list[Any],
        error: Exception | None = None,
    ) -> None:
        """Run an op as a command, or deal with the `error` that it has raised. Its inputs and outputs are stored under
        their ids meanwhile."""
        runner, bound = self._runner, program.bound[position]
        tensors, command = runner.tensors, _command(program, run, position)
        lent = []
        for slot, ident in zip(program.ops[position].inputs, command.inputs, strict=True):
            if ident not in tensors and registers[slot] is not None:
                lent.append(ident)
                tensors[ident] = registers[slot]
        if error is None:
            runner.run(command)
        elif is_direct(command, bound):
            runner.run_after_error(command, bound, error)
        else:
            assert not isinstance(bound, BoundOpProgram), "a program never raises"
            runner.fail(command, bound, error)
        registers += [tensors.pop(ident, None) for ident in command.outputs]
        for ident in lent:
            tensors.pop(ident, None)

    def _run_commands(self, run: RunProgram, bound: BoundProgram) -> None:
        for command in bound.program.expand(run):
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
