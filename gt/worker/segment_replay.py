"""Replays segments: all their ops on registers, or command by command where a replay is not possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gt.core.messages import RunOp, RunSegment
from gt.worker.bound_op_programs import BoundOpProgram
from gt.worker.bound_segments import Block, BoundSegment, OtherStep, Variant, is_direct
from gt.worker.compilation.compiled_blocks import CompiledCodeError
from gt.worker.compilation.segment_compiler import SegmentCompiler
from gt.worker.failed_value import FailedValue
from gt.worker.op_runner import OpRunner
from gt.worker.timeline_recorder import TimelineRecorder

_NoneType = type(None)


class SegmentReplay:
    """Runs segments with the tensors, ops and optimizer steps of a runner. `ops_replayed` counts the ops of complete
    replays."""

    def __init__(self, runner: OpRunner, compiler: SegmentCompiler | None, timeline: TimelineRecorder) -> None:
        self._runner = runner
        self._timeline = timeline
        self._compiler = compiler
        self.ops_replayed = 0

    def run(self, run: RunSegment, segment: BoundSegment) -> None:
        """Hot path. `progress` shows the segment and the position in it. The externals that the segment frees are taken
        out of the tensors first, so that each is freed after its last use."""
        runner = self._runner
        tensors, progress = runner.tensors, runner.progress
        if runner.overlapped:
            runner.overlapped.finish(run.externals)
        registers: list[Any] = [*map(tensors.get, run.externals)]
        kinds = set(map(type, registers))
        if FailedValue in kinds or _NoneType in kinds or not self._may_write(run, segment):
            self._run_commands(run, segment, 0)
            return
        variant = segment.variant(run.dead)
        registers += run.scalars
        for position in variant.taken:
            del tensors[run.externals[position]]
        progress[0] = run.segment_id
        try:
            blocks = variant.blocks if self._compiler is None else self._compiler.blocks(run, segment, variant)
            self._run_blocks(run, segment, blocks, registers)
        except CompiledCodeError as error:
            self._go_on_unwritten(run, segment, variant, registers, error)
            return
        except Exception as error:
            self._go_on(run, segment, variant, registers, error)
            return
        first = run.first
        for register, offset in variant.live:
            tensors[first + offset] = registers[register]
        self._forget_dead(run, segment)
        self.ops_replayed += len(segment.body.ops)

    def _run_blocks(
        self, run: RunSegment, segment: BoundSegment, blocks: Sequence[Block], registers: list[Any]
    ) -> None:
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
                    self._run_other(run, segment, step, registers)
            else:
                start = timeline.clock() if timeline.is_on else 0
                before = len(registers)
                block.run(registers, lambda inner: self._run_blocks(run, segment, inner, registers))  # type: ignore[union-attr]
                if start:
                    timeline.note_code(segment.positions(before, len(registers)), start)

    def _may_write(self, run: RunSegment, segment: BoundSegment) -> bool:
        """Whether the optimizer steps let a replay write to the tensors that the segment writes to. If so, tells the
        steps of the writes that they follow."""
        steps = self._runner.steps
        if not segment.writes or not steps.sessions:
            return True
        written = [run.externals[old] for old, _ in segment.writes if old < segment.body.external_count]
        if not any(map(steps.follows, written)):
            return True
        if segment.has_program_writes or steps.skip_reason(written) is not None:
            return False
        ids = segment.body.ids(run.first, run.externals)
        try:
            for old, new in segment.writes:
                steps.before_write([ids[old]], [ids[new]], self._runner.tensors.get)
        except Exception:  # there is no memory to keep a value in: the command that writes it fails
            return False
        return True

    def _run_other(self, run: RunSegment, segment: BoundSegment, step: OtherStep, registers: list[Any]) -> None:
        """Run an op that is no direct call."""
        op, bound, clear, position = step
        self._runner.progress[1] = position
        if isinstance(bound, BoundOpProgram):
            self._run_program(run, segment, step, registers)
        else:
            values = [registers[segment.register(slot)] for slot in op.inputs]
            results = bound.call(values, run.scalars[op.first_scalar : op.end_scalar])[: bound.output_count]
            if any(result is None for result in results):
                ids = segment.body.ids(run.first, run.externals)
                missing = self._runner.missing(segment.body.command(op, ids, run.scalars), bound)
                results = [missing if result is None else result for result in results]
            registers += results
            registers += [values[written] for written in bound.writes]
        for register in clear:
            registers[register] = None

    def _run_program(self, run: RunSegment, segment: BoundSegment, step: OtherStep, registers: list[Any]) -> None:
        """Run a program of several steps as a command. Its inputs and outputs are stored under their ids meanwhile."""
        tensors, body = self._runner.tensors, segment.body
        ids = body.ids(run.first, run.externals)
        command = body.command(step.op, ids, run.scalars)
        lent = []
        for slot, ident in zip(step.op.inputs, command.inputs, strict=True):
            if ident not in tensors:
                lent.append(ident)
                tensors[ident] = registers[segment.register(slot)]
        self._runner.run(command)
        registers += [tensors.pop(ident, None) for ident in command.outputs]
        for ident in lent:
            tensors.pop(ident, None)
        self._runner.progress[0] = run.segment_id

    # Failures

    def _go_on(
        self, run: RunSegment, segment: BoundSegment, variant: Variant, registers: list[Any], error: Exception
    ) -> None:
        """Report the error that an op has raised, and run the ops after it command by command."""
        position = segment.position(registers)
        segment.restore(run, variant, registers, position, self._runner.tensors)
        registers.clear()
        op, bound = segment.body.ops[position], segment.bound[position]
        command = segment.body.command(op, segment.body.ids(run.first, run.externals), run.scalars)
        if is_direct(op, bound):
            self._runner.run_after_error(command, bound, error)
        else:
            assert not isinstance(bound, BoundOpProgram), "a program never raises"
            self._runner.fail(command, bound, error)
        frees = segment.body.last_uses(run.dead)
        if position in frees:
            self._runner.free([segment.body.id(run, slot) for slot in frees[position]])
        self._run_commands(run, segment, position + 1)

    def _go_on_unwritten(
        self, run: RunSegment, segment: BoundSegment, variant: Variant, registers: list[Any], error: CompiledCodeError
    ) -> None:
        """Compiled code has failed: mark the tensors that it writes to as failed, and run its ops and all later ones
        command by command."""
        op, ids = segment.body.ops[error.position], segment.body.ids(run.first, run.externals)
        command = segment.body.command(op, ids, run.scalars)
        failed = self._runner.report_failure(command, segment.bound[error.position].op, error.error)
        for register in error.written:
            registers[register] = failed
        segment.restore(run, variant, registers, error.position, self._runner.tensors)
        registers.clear()
        self._run_commands(run, segment, error.position)

    def _run_commands(self, run: RunSegment, segment: BoundSegment, start: int) -> None:
        body = segment.body
        for command in body.expand_ops(run, start, len(body.ops), body.last_uses(run.dead)):
            if isinstance(command, RunOp):
                self._runner.run(command)
            else:
                self._runner.free(command.ids)

    def _forget_dead(self, run: RunSegment, segment: BoundSegment) -> None:
        steps = self._runner.steps
        if steps.kept or steps.unwritten:
            steps.free([segment.body.id(run, slot) for slot in run.dead])
