"""Answers requests about a worker: its traffic, its statistics, and the recordings of its memory and timeline."""

from __future__ import annotations

from collections.abc import Callable, Sized

from gt.core.ids import session_of
from gt.core.messages import (
    MemoryReport,
    NonFiniteReport,
    ReadMemory,
    ReadNonFinite,
    ReadStats,
    ReadTimeline,
    Report,
    Stats,
    TimelineReport,
    Traffic,
    WorkerMemory,
    WorkerReadTraffic,
    WorkerStats,
)
from gt.core.worker_progress import BUSY, WAITED
from gt.worker.compilation.compiled_blocks import CompileCounts
from gt.worker.compilation.program_compiler import ProgramCompiler
from gt.worker.engines.engine import Engine
from gt.worker.exchange import Exchange
from gt.worker.failed_value import FailedValue
from gt.worker.finiteness import FinitenessWatch
from gt.worker.memory_recorder import MemoryRecorder
from gt.worker.op_runner import OpRunner
from gt.worker.program_replay import ProgramReplay
from gt.worker.timeline_recorder import TimelineRecorder


class StatusReports:
    """Answers requests about a worker. `ops_run` counts the ops of all commands, those of programs included."""

    def __init__(
        self,
        engine: Engine,
        exchange: Exchange,
        runner: OpRunner,
        programs: Sized,
        replay: ProgramReplay,
        compiler: ProgramCompiler | None,
        memory_recorder: MemoryRecorder,
        finiteness: FinitenessWatch,
        timeline_recorder: TimelineRecorder,
        report: Callable[[Report], None],
    ) -> None:
        self.ops_run = 0
        self._engine = engine
        self._exchange = exchange
        self._runner = runner
        self._programs = programs
        self._replay = replay
        self._compiler = compiler
        self._memory_recorder = memory_recorder
        self._finiteness = finiteness
        self._timeline_recorder = timeline_recorder
        self._report = report

    def read_traffic(self, command: WorkerReadTraffic) -> None:
        self._runner.overlapped.finish_all()
        traffic = self._runner.traffic
        self._report(Traffic(command.request, traffic.by_peer(), traffic.ways(self._exchange)))

    def read_stats(self, command: ReadStats) -> None:
        self._runner.overlapped.finish_all()
        values = [value for value in self._runner.tensors.values() if not isinstance(value, FailedValue)]
        compiled = self._compiler.counts if self._compiler is not None else CompileCounts()
        stats = WorkerStats(
            self.ops_run,
            len(values),
            sum(int(value.nbytes) for value in values),
            self._runner.traffic.by_peer(),
            self._engine.restrided,
            self._exchange.ways(),
            len(self._programs),
            self._replay.ops_replayed,
            len(compiled.codes),
            compiled.runs,
            self._runner.progress[BUSY],
            self._runner.progress[WAITED],
            self._compiler.server.waiting if self._compiler is not None else 0,
        )
        self._report(Stats(command.request, stats))

    def read_memory(self, command: ReadMemory) -> None:
        self._runner.overlapped.finish_all()
        uses, most_copies = self._memory_recorder.take(session_of(command.request), goes_on=command.watch)
        self._report(MemoryReport(command.request, WorkerMemory(uses, most_copies)))

    def read_non_finite(self, command: ReadNonFinite) -> None:
        calls = self._finiteness.read(session_of(command.request), goes_on=command.watch, infinity=command.infinity)
        self._report(NonFiniteReport(command.request, calls))

    def read_timeline(self, command: ReadTimeline) -> None:
        taken = self._timeline_recorder.take(session_of(command.request), command.limit)
        self._report(TimelineReport(command.request, *taken))
