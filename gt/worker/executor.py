"""Runs the commands of a batch against the tensors that a worker holds, and returns reports. No sockets."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from typing import Any, TypeAlias

from gt.core.errors import LimitError
from gt.core.ids import session_of
from gt.core.message_fields import owner_of
from gt.core.messages import (
    Command,
    DefineOp,
    DefineProgram,
    ForgetOps,
    FreeTensors,
    NotCompiled,
    OpFailed,
    Progress,
    QueryOp,
    ReadMemory,
    ReadNonFinite,
    ReadStats,
    ReadTimeline,
    ReadVersions,
    Report,
    RunOp,
    RunProgram,
    StoreReady,
    Synchronize,
    Synchronized,
    WorkerAgreeOnStep,
    WorkerBeginStep,
    WorkerCreateTensor,
    WorkerDefineProgram,
    WorkerDefineScope,
    WorkerEndSession,
    WorkerEndStep,
    WorkerFetchTensor,
    WorkerHostStore,
    WorkerJoinStore,
    WorkerLosePeer,
    WorkerReadTraffic,
    WorkerReportProgress,
    WorkerShareTensor,
    WorkerUnshareTensor,
)
from gt.core.program import Program
from gt.core.worker_progress import (
    BUSY,
    BYTES,
    COUNTERS,
    IDLE,
    LENGTH,
    OPS,
    RECEIVED,
    RUNNING,
    SENT,
    SINCE,
    STATE,
    WAITED,
)
from gt.wire.codec import Buffer
from gt.wire.held_frames import HeldBytes
from gt.worker.bound_op_programs import BoundOpProgram
from gt.worker.bound_ops import BoundOp, UnavailableOp
from gt.worker.bound_programs import BoundProgram
from gt.worker.command_log import open_command_log
from gt.worker.compilation.program_compiler import ProgramCompiler
from gt.worker.compilation.server_connection import CompileServerConnection
from gt.worker.engines.engine import Engine
from gt.worker.exchange import Exchange
from gt.worker.exchange.interface import Exchanging
from gt.worker.failed_value import FailedValue
from gt.worker.finiteness import FinitenessWatch
from gt.worker.late_failures import LateFailures
from gt.worker.memory_guard import LARGE_BYTES, TINY_BYTES
from gt.worker.memory_recorder import MemoryRecorder
from gt.worker.op_descriptions import OpDescription, describe_bound
from gt.worker.op_runner import OpRunner
from gt.worker.program_replay import ProgramReplay
from gt.worker.scope_table import ScopeTable
from gt.worker.skipped_commands import SkippedCommands
from gt.worker.status_reports import StatusReports
from gt.worker.tensor_transfers import Export, TensorTransfers
from gt.worker.timeline_recorder import TimelineRecorder

log = logging.getLogger("gt.worker")
SAMPLE_NANOSECONDS = 20_000_000  # shortest time between two measurements of the bytes that are held
SAMPLE_SHARE = 50  # that time is also at least this multiple of a measurement's duration
ReportAndBytes: TypeAlias = tuple[Report, Buffer | None]


class Executor:
    """The state of a worker: `tensors`, `ops` and `programs` by id, scopes, optimizer steps and recordings. A command
    that fails leaves `FailedValue` in place of its results, and the commands after it go on. `progress` is memory in
    which others can see what the worker does, as in `core/worker_progress.py`. `memory` are the bytes of tensors that
    the worker may hold (0: as many as its device has memory for)."""

    def __init__(
        self,
        worker: int,
        engine: Engine,
        exchange: Exchange,
        export: Export,
        *,
        owns_buffers: bool,
        progress: MutableSequence[int] | None = None,
        compile_server: CompileServerConnection | None = None,
        compiles_all: bool = False,
        memory: int = 0,
    ) -> None:
        self.worker = worker
        self.engine = engine
        self.exchange = exchange
        self.programs: dict[int, BoundProgram] = {}
        self._reports: list[ReportAndBytes] = []
        self._progress_time = 0
        self.scopes = ScopeTable()
        self.name_site: Callable[[int], str] = lambda site: ""  # only a client in this process knows lines
        self._timeline = TimelineRecorder(self)
        self.progress = progress if progress is not None else [0] * LENGTH
        self._next_sample = 0
        self._runner = OpRunner(worker, engine, exchange, self._timeline, self._report, self.progress, memory)
        self.tensors = self._runner.tensors
        self._guard = self._runner.guard
        self.ops = self._runner.ops
        self._steps = self._runner.steps
        self._memory = MemoryRecorder(engine, self.tensors)
        self._finiteness = FinitenessWatch(engine, self.tensors, self.ops)
        self._compiler = self._make_compiler(compile_server, compiles_all) if compile_server is not None else None
        self.skipped = SkippedCommands(self._runner, self._expand)
        self._replay = ProgramReplay(self._runner, self._compiler, self._timeline)
        flags = exchange.flags
        self._late = LateFailures(self.tensors, flags, self._expand) if flags is not None else None
        self._transfers = TensorTransfers(
            self._runner, engine, export, self._settle, self._report, owns_buffers=owns_buffers
        )
        self._status = StatusReports(
            engine,
            exchange,
            self._runner,
            self.programs,
            self._replay,
            self._compiler,
            self._memory,
            self._finiteness,
            self._timeline,
            self._report,
        )
        self._actions = self._make_actions()
        command_log = open_command_log(worker, engine, self.tensors, self, self._held_bytes)
        if command_log is not None:
            self._timeline.listen(command_log)

    def _make_compiler(self, server: CompileServerConnection, is_automatic: bool) -> ProgramCompiler:
        compiles, tell = self.scopes.compiles, self._tell_not_compiled
        return ProgramCompiler(self.engine, server, compiles, tell, is_automatic=is_automatic)

    def _make_actions(self) -> dict[type, Callable[[Any], None]]:
        """The function that carries out a command, by the kind of the command."""
        return {
            RunOp: self._runner.run,
            RunProgram: self._run_program,
            FreeTensors: lambda command: self._runner.free(command.ids),
            DefineOp: self._define,
            DefineProgram: self._define_replayed,
            WorkerDefineProgram: self._define_program,
            WorkerDefineScope: self.scopes.define,
            ForgetOps: self._forget,
            WorkerCreateTensor: self._transfers.create,
            WorkerShareTensor: self._share,
            WorkerUnshareTensor: self._unshare,
            QueryOp: self._query,
            WorkerFetchTensor: self._transfers.fetch,
            ReadVersions: self._transfers.read_versions,
            WorkerBeginStep: self._begin_step,
            WorkerAgreeOnStep: lambda command: self._steps.agree(command, self.tensors.pop(command.tokens, None)),
            WorkerEndStep: self._steps.end,
            Synchronize: self._synchronize,
            WorkerReadTraffic: self._status.read_traffic,
            ReadStats: self._status.read_stats,
            ReadMemory: self._status.read_memory,
            ReadNonFinite: self._status.read_non_finite,
            ReadTimeline: self._status.read_timeline,
            WorkerReportProgress: self._report_progress,
            WorkerEndSession: self._end_session,
            WorkerHostStore: self._host_store,
            WorkerJoinStore: self._join_store,
            WorkerLosePeer: lambda command: self.exchange.lose_worker(command.worker),
        }

    def run(self, commands: Sequence[Command], buffers: Iterable[Buffer | HeldBytes]) -> list[ReportAndBytes]:
        """Run a batch in order, in a thread that the engine has isolated. `buffers` are the bytes of the commands that
        create tensors, in order; each is read when its command runs, so that an error of it fails that tensor only."""
        self._reports = []
        self._transfers.buffers = iter(buffers)
        start = self._progress_time = self._timeline.clock()
        progress = self.progress
        progress[STATE], progress[SINCE] = RUNNING, start
        waited = progress[WAITED]
        if self._late is not None:
            self._late.follow(commands, goes_on=bool(self._runner.overlapped))
        self._status.ops_run += [*map(type, commands)].count(RunOp)
        return self._run_all(self._runner.prefetch.follow(commands), start, waited)

    def _run_all(self, batch: Iterator[Command], start: int, waited: int) -> list[ReportAndBytes]:
        """Run the commands of a batch that began at `start`, when the worker had waited for `waited` nanoseconds."""
        if self.skipped.sessions:
            batch = self.skipped.left_out(batch)
        unread = batch
        if self.engine.is_profiled():
            batch = self._in_ranges(self._expanded(batch))
        if self._memory.is_on or self._finiteness.is_on:
            self._run_followed(self._expanded(batch))
        elif self._timeline.is_on:
            self._run_batch(self._timeline.timed(batch))
            self._timeline.sample_memory(self._held_bytes)
        else:
            self._run_batch(batch if not self._guard.is_full else self._those_with_room(self._expanded(batch)))
        self._run_batch(unread)  # nothing, unless a recording has failed between two commands
        self._show_progress(start, waited)
        return self._reports

    # Sessions that have ended

    def long_command(self, seconds: float) -> Command | None:
        """The command that runs, if the worker has computed for some time without an exchange; any thread may ask."""
        progress = self.progress
        is_long = self._timeline.clock() - progress[SINCE] >= seconds * 1e9
        return self._runner.prefetch.present if progress[STATE] == RUNNING and is_long else None

    def commands_ahead(self) -> Sequence[Command]:
        """The commands of the present batch that have not begun; any thread may ask."""
        return self._runner.prefetch.ahead()

    def resume(self) -> list[ReportAndBytes]:
        """Go on with a batch in another thread. The one that began it is in the middle of a command, which fails."""
        start = self._progress_time = self._timeline.clock()
        command = self._runner.prefetch.present
        if command is not None:
            self.skipped.skip(command, tuple(self._runner.exchanged))
        return self._run_all(self._runner.prefetch.rest, start, self.progress[WAITED])

    def _show_progress(self, start: int, waited: int) -> None:
        """Show what a batch has done that began at `start`, when the worker had waited for `waited` nanoseconds."""
        progress, end = self.progress, self._timeline.clock()
        progress[STATE], progress[SINCE] = IDLE, end
        progress[BUSY] += end - start - (progress[WAITED] - waited)
        progress[OPS] = self._status.ops_run
        if end >= self._next_sample:
            progress[BYTES] = held = self._held_bytes()
            self._guard.sample(held)
            self._show_traffic()
            now = self._timeline.clock()
            self._next_sample = now + max(SAMPLE_NANOSECONDS, SAMPLE_SHARE * (now - end))

    def _show_traffic(self) -> None:
        """Show the bytes received from each worker. The number of a worker is written after its bytes, for a reader
        that looks meanwhile."""
        progress, traffic = self.progress, self._runner.traffic
        received = traffic.by_peer()
        progress[RECEIVED], progress[SENT] = sum(received.values()), traffic.sent
        for position, (peer, nbytes) in zip(range(COUNTERS, LENGTH, 2), received.items(), strict=False):
            progress[position + 1] = nbytes
            progress[position] = peer + 1

    def _run_batch(self, batch: Iterator[Command]) -> None:
        """Run commands in order. An exception ends no worker: the command fails, and the next ones run. Hot path: most
        of the cost of a small op is this loop."""
        actions, runner = self._actions, self._runner
        tensors, ops, progress, steps = self.tensors, self.ops, runner.progress, runner.steps
        while True:
            command: Command | None = None
            try:
                for command in batch:
                    if type(command) is not RunOp:
                        actions[type(command)](command)
                        continue
                    bound, inputs, scalars = ops[command.op_id], command.inputs, command.scalars
                    direct, writes = bound.direct, bound.writes
                    if direct is None or (writes and steps.follows(inputs[writes[0]])):
                        runner.run(command)
                        continue
                    progress[0], progress[1] = command.op_id, command.site
                    try:
                        if scalars:  # no variable: the result must not outlive its id in the store
                            tensors[command.outputs[0]] = direct(*[tensors[ident] for ident in inputs], *scalars)
                        elif len(inputs) == 2:
                            tensors[command.outputs[0]] = direct(tensors[inputs[0]], tensors[inputs[1]])
                        else:
                            tensors[command.outputs[0]] = direct(*[tensors[ident] for ident in inputs])
                    except Exception as error:
                        runner.run_after_error(command, bound, error)
                        continue
                    if writes:
                        del tensors[inputs[writes[0]]]
                return
            except Exception as error:
                self._fail_command(command, error)

    def _fail_command(self, command: Command | None, error: Exception) -> None:
        """The one way out of a command that has raised what nothing inside it deals with. Of a program, the ops without
        results fail."""
        for single in self._expand(command) if command is not None else ():
            if isinstance(single, FreeTensors):
                self._runner.free(single.ids)
            elif not isinstance(single, RunOp) or single is command or not self.tensors.keys() >= {*single.outputs}:
                self._runner.fail_command(single, error)

    def _those_with_room(self, batch: Iterator[Command]) -> Iterator[Command]:
        """The commands of a batch without ops for whose results there is no memory, which fail. Ops with tiny results
        run, so that values can be read. Programs reserve memory themselves, because other workers wait for them."""
        for command in batch:
            bound = self.ops.get(command.op_id) if type(command) is RunOp else None
            if isinstance(bound, BoundOp) and TINY_BYTES < bound.nbytes < LARGE_BYTES:
                try:
                    self._guard.reserve(bound.nbytes)
                except LimitError as error:
                    self._runner.fail(command, bound, error)  # type: ignore[arg-type]
                    continue
            yield command

    def _run_program(self, command: RunProgram) -> None:
        program = self.programs[command.program_id]
        self._status.ops_run += len(program.ops)
        self._replay.run(command, program)

    def _expanded(self, batch: Iterator[Command]) -> Iterator[Command]:
        """The commands of a batch with those of its programs one by one, for recordings."""
        for command in batch:
            singles = self._expand(command)
            if type(command) is RunProgram:
                self._status.ops_run += [*map(type, singles)].count(RunOp)
            yield from singles

    def _expand(self, command: Command) -> Sequence[Command]:
        """The commands that a RunProgram stands for; any other command alone."""
        if type(command) is not RunProgram:
            return (command,)
        return self.programs[command.program_id].program.expand(command)  # type: ignore[return-value]

    def read(self, ident: int) -> Buffer | None:
        """The bytes of a tensor for a client in this process; None if it has none, or if commands are recorded."""
        value = self.tensors.get(ident)
        if value is None or self._timeline.is_on or self._memory.is_on:
            return None
        self._settle()
        return self._transfers.read(ident)

    def start(self, command: RunOp) -> Exchanging:
        """A command that several virtual workers run together, as a computation that yields its exchanges. Its reports
        are taken when it is done."""
        self._status.ops_run += 1
        self._reports = []
        bound = self.ops[command.op_id]
        assert isinstance(bound, BoundOpProgram), "only programs exchange tensors"
        computation = self._runner.run_program(command, bound)
        if self._memory.is_on or self._finiteness.is_on:
            computation = self._followed(command, computation)
        return self._recorded(command, computation) if self._timeline.is_on else computation

    def take_reports(self) -> list[ReportAndBytes]:
        reports, self._reports = self._reports, []
        return reports

    # Recording

    def _in_ranges(self, commands: Iterator[Command]) -> Iterator[Command]:
        """The same commands. The time until the next one is asked for is a range in the records of a profiler."""
        for command in commands:
            if isinstance(command, RunOp | QueryOp):
                name, line = self.ops[command.op_id].op, self.name_site(command.site)
                with self.engine.profiled(f"gt worker {self.worker}::{name} {line}".rstrip()):
                    yield command
            else:
                yield command

    def _recorded(self, command: RunOp, computation: Exchanging) -> Exchanging:
        start = self._timeline.begin()
        result = yield from computation
        self._timeline.end(command, start)
        return result

    def _run_followed(self, commands: Iterator[Command]) -> None:
        """Run commands one by one, so that recordings see the tensors before and after each."""
        for command in commands:
            self._watch(self._finiteness.begin, command)
            batch = iter((command,))
            self._run_batch(self._timeline.timed(batch) if self._timeline.is_on else batch)
            self._runner.overlapped.finish_all()
            self._memory.note(command)
            self._watch(self._finiteness.end, command)

    def _followed(self, command: RunOp, computation: Exchanging) -> Exchanging:
        self._watch(self._finiteness.begin, command)
        result = yield from computation
        self._memory.note(command)
        self._watch(self._finiteness.end, command)
        return result

    def _watch(self, check: Callable[[Command], None], command: Command) -> None:
        """Check the tensors of a command, which may need memory. An error is reported; the tensors keep their
        values."""
        try:
            check(command)
        except Exception as error:
            self._report(OpFailed(owner_of(command), self._runner.failure_of("check of NaN", (), command, error)))

    def _held_bytes(self) -> int:
        return sum([int(value.nbytes) for value in self.tensors.values() if not isinstance(value, FailedValue)])

    def describe_op(self, op_id: int) -> OpDescription:
        return describe_bound(self.ops[op_id])

    def describe_scope(self, session: int, scope: int) -> str:
        return self.scopes.name(session, scope)

    def describe_program(self, program_id: int) -> tuple[Program, Sequence[OpDescription]]:
        """A program, and its ops."""
        found = self.programs[program_id]
        return found.program, [describe_bound(bound) for bound in found.bound]

    def _report(self, report: Report, buffer: Buffer | None = None) -> None:
        self._reports.append((report, buffer))

    # Definitions

    def _define(self, command: DefineOp) -> None:
        try:
            self.ops[command.op_id] = BoundOp(self.engine, command.signature, guard=self._guard)
        except Exception as error:
            self.ops[command.op_id] = UnavailableOp(command.signature, error)

    def _define_replayed(self, command: DefineProgram) -> None:
        self.programs[command.program_id] = BoundProgram(Program.of(command), self.ops)

    def _define_program(self, command: WorkerDefineProgram) -> None:
        self.ops[command.op_id] = BoundOpProgram(self.engine, self.worker, command.op, command.program, self._guard)

    def _tell_not_compiled(self, session: int, scope_id: int, site: int, reason: str) -> None:
        self._report(NotCompiled(session, self.scopes.name(session, scope_id), site, reason))

    def _forget(self, command: ForgetOps) -> None:
        if self._late is not None:
            self._late.settle()  # it may need the definitions of programs that have run
        self._timeline.settle()  # likewise
        for op_id in command.op_ids:
            self.ops.pop(op_id, None)
            self.programs.pop(op_id, None)

    # Values

    def _settle(self) -> None:
        """Finish exchanges and read flags: before a value leaves the worker, it must be known whether it has failed."""
        self._runner.overlapped.finish_all()
        if self._late is not None:
            self._late.settle()

    def _share(self, command: WorkerShareTensor) -> None:
        self._settle()
        value = self.tensors.get(command.source)
        if value is not None:
            self.tensors[command.target] = value

    def _unshare(self, command: WorkerUnshareTensor) -> None:
        """The memory stays where others hold it. Values that were kept from before a step may share it too."""
        self._runner.overlapped.finish((command.id,))
        value = self.tensors.get(command.id)
        if value is not None and not isinstance(value, FailedValue):
            self.tensors[command.id] = self.engine.copy(value)

    def _query(self, command: QueryOp) -> None:
        self._settle()
        self._runner.query(command)

    def _begin_step(self, command: WorkerBeginStep) -> None:
        """Settle first: a step of an optimizer is skipped if a gradient has failed."""
        self._settle()
        self._steps.begin(command, self.tensors)

    def _synchronize(self, command: Synchronize) -> None:
        self._settle()
        self.engine.synchronize()
        self._report(Synchronized(command.request))

    def _report_progress(self, command: WorkerReportProgress) -> None:
        try:
            self.engine.synchronize()
        finally:
            before, self._progress_time = self._progress_time, self._timeline.clock()
            self._report(Progress(command.mark, self._progress_time - before))

    def _end_session(self, command: WorkerEndSession) -> None:
        self._runner.overlapped.finish_all()
        self._timeline.settle()
        self.skipped.sessions.discard(command.session)
        for table in (self.tensors, self.ops, self.programs):
            for ident in [ident for ident in table if session_of(ident) == command.session]:
                del table[ident]  # type: ignore[attr-defined]
        self.scopes.forget(command.session)
        self._timeline.forget(command.session)
        self._memory.forget(command.session)
        self._finiteness.forget(command.session)
        self._steps.forget(command.session)
        if self._compiler is not None:
            self._compiler.forget(command.session)

    # The store of the exchange

    def _host_store(self, command: WorkerHostStore) -> None:
        try:
            self._report(StoreReady(self.exchange.host_store(), secrets.token_hex(32)))
        except Exception as error:
            log.warning("worker %d cannot host the store of process groups: %s", self.worker, error)

    def _join_store(self, command: WorkerJoinStore) -> None:
        """The host of the store may have ended. Then exchanges fail with their own errors, and other ops go on."""
        try:
            self.exchange.join_store(command.host, command.port, command.worker, command.token)
        except Exception as error:
            log.warning("worker %d cannot join the store at %s:%d: %s", self.worker, command.host, command.port, error)
