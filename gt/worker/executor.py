"""Runs commands against the tensors a worker holds. No sockets: commands in, reports out."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from functools import partial
from typing import Any, TypeAlias

from msgspec.structs import replace

from gt.core.ids import MAX_RESULTS, session_of
from gt.core.messages import (
    Command,
    DefineOp,
    Failed,
    Failure,
    Fetched,
    ForgetOps,
    FreeTensors,
    OpFailed,
    Progress,
    Queried,
    QueryOp,
    ReadStats,
    ReadTimeline,
    ReadVersions,
    Report,
    Result,
    RunOp,
    Segment,
    Stats,
    StoreReady,
    Synchronize,
    Synchronized,
    TimelineReport,
    Traffic,
    Versions,
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
    WorkerReadTraffic,
    WorkerReportProgress,
    WorkerReviveTensor,
    WorkerStats,
)
from gt.core.meta import TensorMeta
from gt.worker.engines.engine import Buffer, Engine, Value
from gt.worker.exchange.interface import Exchange, Received, Swap, Swapping
from gt.worker.exchange.prefetch import ReceivePrefetch
from gt.worker.failed_value import FailedValue
from gt.worker.kernels import Kernel, UnavailableKernel
from gt.worker.optimizer_steps import Steps
from gt.worker.programs import ProgramKernel
from gt.worker.recorder import Recorder

log = logging.getLogger("gt.worker")
Outgoing: TypeAlias = tuple[Report, Buffer | None]
Fallible: TypeAlias = RunOp | QueryOp | WorkerCreateTensor | WorkerFetchTensor
Fill: TypeAlias = Callable[[memoryview], None]
Export: TypeAlias = Callable[[int, bool, Fill], tuple[str, memoryview]]
"""The bytes of a tensor that leaves the worker: from their number, whether the reader shares memory with us, and what
writes them. Gives the name of the segment they are in, if any, and the bytes."""


class Executor:
    """`store` holds tensors by id, `kernels` ops by code; `progress` shows the code and the site of the last op begun;
    `traffic` counts payload bytes received, by sender; `recorder` keeps what was run when, for who asks. A command that
    fails leaves `FailedValue` in place of its results, so whatever was asked after it goes on."""

    def __init__(self, worker: int, engine: Engine, exchange: Exchange, export: Export, *, owns_buffers: bool) -> None:
        self.worker = worker
        self.engine = engine
        self.exchange = exchange
        self.export = export
        self.owns_buffers = owns_buffers
        self.progress: MutableSequence[int] = [0, 0]
        self.store: dict[int, Value | FailedValue] = {}
        self.kernels: dict[int, Kernel | UnavailableKernel | ProgramKernel] = {}
        self.scopes: dict[tuple[int, int], WorkerDefineScope] = {}
        self.steps = Steps(engine)
        self.traffic: dict[int, int] = {}
        self.ops = 0
        self.recorder = Recorder()
        self._reports: list[Outgoing] = []
        self._buffers: Iterator[Buffer] = iter(())
        self._ahead = ReceivePrefetch()
        self._marked = 0
        self._actions: dict[type, Callable[[Any], None]] = {
            RunOp: self._run_op,
            FreeTensors: self._free,
            DefineOp: self._define,
            WorkerDefineProgram: self._define_program,
            WorkerDefineScope: self._define_scope,
            ForgetOps: self._forget,
            WorkerCreateTensor: self._create,
            QueryOp: self._query,
            WorkerFetchTensor: self._fetch,
            WorkerReviveTensor: self._revive,
            ReadVersions: self._read_versions,
            WorkerBeginStep: lambda command: self.steps.begin(command, self.store),
            WorkerAgreeOnStep: lambda command: self.steps.agree(command, self.store.pop(command.tokens, None)),
            WorkerEndStep: self.steps.end,
            Synchronize: self._synchronize,
            WorkerReadTraffic: lambda command: self._report(Traffic(command.request, dict(self.traffic))),
            ReadStats: self._read_stats,
            ReadTimeline: self._read_timeline,
            WorkerReportProgress: self._report_progress,
            WorkerEndSession: self._end_session,
            WorkerHostStore: self._host_store,
            WorkerJoinStore: self._join_store,
        }

    def run(self, commands: Sequence[Command], buffers: Iterable[Buffer]) -> list[Outgoing]:
        """Run a batch in order. Buffers belong to the commands that create tensors, in order; one is asked for when its
        command is run, and where that raises, the tensor is what fails. The thread has to be isolated by the engine."""
        log.debug("worker %d: %d commands, %d tensors held", self.worker, len(commands), len(self.store))
        self._reports = []
        self._buffers = iter(buffers)
        self._marked = self.recorder.clock()
        self.ops += [*map(type, commands)].count(RunOp)
        actions = self._actions
        following = self._ahead.follow(commands)
        if self.recorder.is_on:
            self._run_recorded(following)
            return self._reports
        store, kernels, progress = self.store, self.kernels, self.progress
        for command in following:
            direct = kernels[command.op_id].direct if type(command) is RunOp else None
            if direct is None:
                actions[type(command)](command)
                continue
            progress[0], progress[1] = command.op_id, command.site  # type: ignore[union-attr]
            try:  # most ops; what a small one costs here is mostly this loop
                inputs, output = command.inputs, command.outputs[0]  # type: ignore[union-attr]
                if len(inputs) == 2:  # nothing but the store may hold the result, or it would outlive its end
                    store[output] = direct(store[inputs[0]], store[inputs[1]])
                else:
                    store[output] = direct(*[store[ident] for ident in inputs])
            except Exception:  # once more, where failures are dealt with
                actions[RunOp](command)
        return self._reports

    def start(self, command: RunOp) -> Swapping:
        """Begin a command that other workers run at the same time; whoever drives it passes on what they exchange, and
        takes the reports afterwards."""
        self.ops += 1
        self._reports = []
        kernel = self.kernels[command.op_id]
        assert isinstance(kernel, ProgramKernel), "only programs exchange tensors"
        work = self._run_program(command, kernel)
        return self._recorded(command, work) if self.recorder.is_on else work

    def take_reports(self) -> list[Outgoing]:
        reports, self._reports = self._reports, []
        return reports

    # Recording

    def _run_recorded(self, commands: Iterator[Command]) -> None:
        for command in commands:
            with self.recorder.noting(command, self._describe):
                self._actions[type(command)](command)

    def _recorded(self, command: RunOp, work: Swapping) -> Swapping:
        with self.recorder.noting(command, self._describe):
            return (yield from work)

    def _describe(self, command: RunOp | QueryOp) -> tuple[str, str]:
        """The op and the scope of a command."""
        kernel = self.kernels[command.op_id]
        scope = self.scopes.get((session_of(command.op_id), command.scope))
        op = kernel.op if isinstance(kernel, ProgramKernel) else kernel.signature.op
        return op, scope.name if scope is not None else ""

    def _read_stats(self, command: ReadStats) -> None:
        held = [value for value in self.store.values() if not isinstance(value, FailedValue)]
        held_bytes = sum([int(value.nbytes) for value in held])
        stats = WorkerStats(self.ops, len(held), held_bytes, dict(self.traffic), self.engine.restrided)
        self._report(Stats(command.request, stats))

    def _read_timeline(self, command: ReadTimeline) -> None:
        ran, dropped = self.recorder.take(session_of(command.request), command.limit)
        self._report(TimelineReport(command.request, ran, dropped))

    def _report(self, report: Report, buffer: Buffer | None = None) -> None:
        self._reports.append((report, buffer))

    # Ops

    def _run_op(self, command: RunOp) -> None:
        store, progress = self.store, self.progress
        progress[0], progress[1] = command.op_id, command.site
        kernel = self.kernels[command.op_id]
        if isinstance(kernel, ProgramKernel):
            self._drive(command, self._run_program(command, kernel))
            return
        outputs = command.outputs
        if kernel.writes and self.steps.sessions and self._holds_back(command, kernel):
            return
        values: list[Value | FailedValue] = []
        try:
            values += map(store.__getitem__, command.inputs)
            results = kernel.call(values, command.scalars)
        except Exception as error:
            self._fail(command, kernel, values, error)
            return
        if kernel.gives:
            for ident, result in zip(outputs, results, strict=False):
                store[ident] = result if result is not None else self._absent(command, kernel)
        if kernel.writes:
            self._renew(kernel, command.inputs, values, outputs[kernel.gives :])

    def _holds_back(self, command: RunOp, kernel: Kernel | UnavailableKernel) -> bool:
        """Before a write. Whether the op must not begin, because it is of a step whose gradients have no value."""
        written = [command.inputs[place] for place in kernel.writes]
        renewed = command.outputs[len(command.outputs) - len(written) :]
        cause = self.steps.cause(written)
        self.steps.renew(written, renewed, self.store.get)
        if cause is None:
            return False
        values = [self.store.pop(ident) for ident in written]
        self.store.update(dict.fromkeys(command.outputs, cause))
        for old, new, value in zip(written, renewed, values, strict=True):
            self.store[new] = cause.instead_of(value, old, new)
        return True

    def _run_program(self, command: RunOp, kernel: ProgramKernel) -> Swapping:
        """The steps of a program. A worker may hold none of an input, or get none of an output."""
        inputs = [self.store.get(ident) for ident in command.inputs]
        cause: FailedValue | None = None
        written = [command.inputs[place] for place in kernel.program.consumes]
        if written and self.steps.sessions:
            cause = self.steps.cause(written)
            self.steps.renew(written, command.outputs[len(command.outputs) - len(written) :], self.store.get)

        def fail(op: str, values: Sequence[Value], error: Exception) -> FailedValue:
            shapes = tuple([str(self.engine.meta(value)) for value in values if self.engine.is_tensor(value)])
            failing = FailedValue(self._failure(op, shapes, command, error))
            self._report(OpFailed(session_of(command.op_id), failing.failure))
            return failing

        results, untouched = yield from self._counted(command, kernel.run(inputs, command.scalars, fail, cause))
        results = kernel.with_former(results, untouched, command)
        for place in kernel.program.consumes:
            self.store.pop(command.inputs[place], None)
        for ident, result in zip(command.outputs, results, strict=True):
            if result is not None:
                self.store[ident] = result

    def _counted(self, command: RunOp, work: Swapping) -> Swapping:
        """Pass swaps on, counting what comes. Tokens of steps are no payload."""
        is_payload = self.steps.tokens.isdisjoint(command.inputs)
        received: Received | None = None
        while True:
            try:
                swap: Swap = next(work) if received is None else work.send(received)
            except StopIteration as done:
                return done.value
            began = self.recorder.clock() if self.recorder.is_on else 0
            received = yield swap
            if began:
                self.recorder.note_swap(swap, began)
            for peer, meta in swap.receives.items() if is_payload else ():
                self.traffic[peer] = self.traffic.get(peer, 0) + meta.nbytes

    def _drive(self, command: RunOp, work: Swapping) -> None:
        """Run a program to its end, exchanging with other processes."""
        try:
            swap = next(work)
        except StopIteration:
            return
        try:
            while True:
                swap = work.send(self._swap(command, swap))
        except StopIteration:
            self._expect()

    def _expect(self) -> None:
        """Begin to receive what a later command of the batch needs."""
        if not self.exchange.is_expecting:
            swap = self._ahead.next_receive(self.kernels)
            if swap is not None:
                self.exchange.expect(swap)

    def _swap(self, command: RunOp, swap: Swap) -> Received:
        try:
            return self.exchange.swap(swap, self.engine)
        except Exception as error:  # a peer is gone, or the network between
            log.warning("an exchange among workers %s failed: %s", swap.members, error)
            failure = replace(self._failure("exchange", (), command, error), peers=self.exchange.needs(swap))
            self._report(OpFailed(session_of(command.op_id), failure))
            return dict.fromkeys(swap.receives, FailedValue(failure))

    def _absent(self, command: RunOp, kernel: Kernel | UnavailableKernel) -> FailedValue:
        """The op gave no tensor where the client holds a handle; only reading it is a failure."""
        message = "the op gives no tensor here (a gradient that was not asked for)"
        site, origin = command.site, _origin(command)
        return FailedValue(Failure(self.worker, kernel.signature.op, (), site, origin, "RuntimeError", message, ""))

    def _renew(
        self,
        kernel: Kernel | UnavailableKernel,
        inputs: Sequence[int],
        values: Sequence[Value | FailedValue],
        renewed: Sequence[int],
    ) -> None:
        """Written storages go on under their new ids."""
        for place in kernel.writes:
            self.store.pop(inputs[place], None)
        for place, ident in zip(kernel.writes, renewed, strict=True):
            self.store[ident] = values[place]

    def _query(self, command: QueryOp) -> None:
        self.progress[0], self.progress[1] = command.op_id, command.site
        kernel = self.kernels[command.op_id]
        assert not isinstance(kernel, ProgramKernel), "queries run on whole tensors"
        values: list[Value | FailedValue] = []
        before: list[TensorMeta | None] = []
        written = [command.inputs[place] for place in kernel.writes] if self.steps.sessions else []
        since = [self.steps.unwritten.get(ident, ident) for ident in written]
        if written:
            self.steps.renew(written, command.written, self.store.get)
        try:
            self._make_resizable([command.inputs[place] for place in kernel.writes])
            values += map(self.store.__getitem__, command.inputs)
            before += [self._meta(values[place]) for place in kernel.writes]
            results = kernel.call(values, command.scalars)
            if len(results) > MAX_RESULTS:
                raise RuntimeError(f"{len(results)} results of one op are over the limit of {MAX_RESULTS}")
            answers = [self._keep(command.first, results, place) for place in range(len(results))]
        except Exception as error:
            failing = self._cause(command, kernel, values, error)
            own = not any(value is failing for value in values)
            self._report(Failed(command.request, failing.failure, own))
            still = [self._meta(values[place]) for place in kernel.writes] if before else []
            lost: list[Value | FailedValue] = [failing.passed_on()] * len(command.inputs)
            left = values if still == before else lost  # as torch leaves its arguments
            self._renew(kernel, command.inputs, left, command.written)
            if not own and left is values:  # the op did not begin
                self.steps.unwritten.update(zip(command.written, since, strict=False))
            return
        self._renew(kernel, command.inputs, values, command.written)
        metas = tuple([self.engine.meta(values[place]) for place in kernel.writes])
        self._report(Queried(command.request, tuple(answers), metas))

    def _make_resizable(self, written: Sequence[int]) -> None:
        for ident in written:
            value = self.store[ident]
            if not isinstance(value, FailedValue):
                self.store[ident] = self.engine.resizable(value)

    def _keep(self, first: int, results: list[Any], place: int) -> Result:
        """Store one result of a query, if it is a tensor, and describe it."""
        result = results[place]
        if not self.engine.is_tensor(result):
            return result  # type: ignore[no-any-return]
        settled = self.engine.settle(result)
        self.store[first + sum(map(self.engine.is_tensor, results[:place]))] = settled
        return self.engine.meta(settled)

    def _meta(self, value: Value | FailedValue) -> TensorMeta | None:
        return None if isinstance(value, FailedValue) else self.engine.meta(value)

    def _fail(
        self,
        command: RunOp,
        kernel: Kernel | UnavailableKernel,
        values: list[Value | FailedValue],
        error: Exception,
    ) -> None:
        """An op gave nothing, and nobody waits for it: whoever reads what it should have given or written is told."""
        failing = self._cause(command, kernel, values, error)
        if not any(value is failing for value in values):
            self._report(OpFailed(session_of(command.op_id), failing.failure))
        for place in kernel.writes:
            self.store.pop(command.inputs[place], None)
        for ident in command.outputs:
            self.store[ident] = failing.passed_on()
        if any(value is failing for value in values):  # the op did not begin
            renewed = command.outputs[len(command.outputs) - len(kernel.writes) :]
            for place, ident in zip(kernel.writes, renewed, strict=True):
                self.store[ident] = failing.instead_of(values[place], command.inputs[place], ident)

    def _cause(
        self,
        command: RunOp | QueryOp,
        kernel: Kernel | UnavailableKernel,
        values: list[Value | FailedValue],
        error: Exception,
    ) -> FailedValue:
        """Why an op gave nothing: because of what it depends on, or by itself."""
        cause = next((value for value in values if isinstance(value, FailedValue)), None)
        return cause or FailedValue(self._failure(kernel.signature.op, self._inputs(kernel, values), command, error))

    def _inputs(self, kernel: Kernel | UnavailableKernel, values: list[Value]) -> tuple[str, ...]:
        try:
            return kernel.describe(values)
        except Exception:  # the op may have failed because a view of its input is not possible
            return tuple([str(self.engine.meta(value)) for value in values])

    def _failure(
        self,
        op: str,
        inputs: tuple[str, ...],
        command: Fallible,
        error: Exception,
    ) -> Failure:
        text = "".join(traceback.format_exception(error))[-(1 << 16) :]
        kind, message = type(error).__name__, str(error)[: 1 << 16]
        site = 0 if isinstance(command, WorkerFetchTensor) else command.site
        return Failure(self.worker, op, inputs, site, _origin(command), kind, message, text)

    def _define(self, command: DefineOp) -> None:
        try:
            self.kernels[command.op_id] = Kernel(self.engine, command.signature)
        except Exception as error:
            self.kernels[command.op_id] = UnavailableKernel(command.signature, error)

    def _define_program(self, command: WorkerDefineProgram) -> None:
        self.kernels[command.op_id] = ProgramKernel(self.engine, self.worker, command.op, command.program)

    def _define_scope(self, command: WorkerDefineScope) -> None:
        self.scopes[command.session, command.scope_id] = command

    def _forget(self, command: ForgetOps) -> None:
        for op_id in command.op_ids:
            self.kernels.pop(op_id, None)

    # Tensors

    def _create(self, command: WorkerCreateTensor) -> None:
        try:
            buffer = next(self._buffers)
            self.store[command.id] = self.engine.from_buffer(buffer, command.meta, self.owns_buffers)
        except Exception as error:
            failure = self._failure("upload", (str(command.meta),), command, error)
            self.store[command.id] = FailedValue(failure)
            self._report(OpFailed(session_of(command.id), failure))

    def _free(self, command: FreeTensors) -> None:
        for ident in command.ids:
            self.store.pop(ident, None)
        if self.steps.kept or self.steps.unwritten:
            self.steps.free(command.ids)

    def _revive(self, command: WorkerReviveTensor) -> None:
        if command.id in self.store:
            version = self.steps.version(command.id, self.store[command.id], command.version)
            self.store[command.output] = version.passed_on() if isinstance(version, FailedValue) else version

    def _read_versions(self, command: ReadVersions) -> None:
        held = [ident for ident in command.ids if ident in self.store]
        spans = tuple([(ident, self.steps.span(ident, self.store[ident])) for ident in held])
        self._report(Versions(command.request, spans))

    def _fetch(self, command: WorkerFetchTensor) -> None:
        try:
            value = self.steps.version(command.id, self.store[command.id], command.version)
            if isinstance(value, FailedValue):
                self._report(Failed(command.request, value.failure))
                return
            fill = partial(self.engine.read_into, value)
            name, data = self.export(self.engine.nbytes(value), command.shared, fill)
        except Exception as error:
            self._report(Failed(command.request, self._failure("fetch", (), command, error), own=True))
            return
        self._report(Fetched(command.request, Segment(name, len(data))), data)

    def _synchronize(self, command: Synchronize) -> None:
        self.engine.synchronize()
        self._report(Synchronized(command.request))

    def _report_progress(self, command: WorkerReportProgress) -> None:
        self.engine.synchronize()
        before, self._marked = self._marked, self.recorder.clock()
        self._report(Progress(command.mark, self._marked - before))

    def _end_session(self, command: WorkerEndSession) -> None:
        for table in (self.store, self.kernels):
            for ident in [ident for ident in table if session_of(ident) == command.session]:
                del table[ident]  # type: ignore[attr-defined]
        for session, code in [key for key in self.scopes if key[0] == command.session]:
            del self.scopes[session, code]
        self.recorder.forget(command.session)
        self.steps.forget(command.session)

    # Meeting others

    def _host_store(self, command: WorkerHostStore) -> None:
        try:
            self._report(StoreReady(self.exchange.host_store()))
        except Exception as error:
            log.warning("worker %d cannot host the store that process groups meet at: %s", self.worker, error)

    def _join_store(self, command: WorkerJoinStore) -> None:
        """Its host may have died since. What needs no other worker goes on; an exchange fails with its own error."""
        try:
            self.exchange.join_store(command.host, command.port, command.worker)
        except Exception as error:
            log.warning("worker %d cannot join the store at port %d: %s", self.worker, command.port, error)


def _origin(command: Fallible) -> int:
    """What a failure of this command is known by, whichever worker tells of it; 0 for one that fills nothing."""
    if isinstance(command, QueryOp | WorkerFetchTensor):
        return command.request
    return command.id if isinstance(command, WorkerCreateTensor) else next(iter(command.outputs), 0)
