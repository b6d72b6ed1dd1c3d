"""Runs ops against the tensors that a worker holds: on whole tensors, as programs on shards, and as queries."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from msgspec.structs import replace

from gt.core.ids import MAX_RESULTS, session_of
from gt.core.message_fields import id_fields, owner_of
from gt.core.messages import (
    Command,
    Failed,
    Failure,
    OpFailed,
    Queried,
    QueryOp,
    QueryResult,
    Report,
    RunOp,
    WorkerCreateTensor,
    WorkerUnshareTensor,
)
from gt.core.meta import TensorMeta
from gt.core.worker_progress import COUNTERS, EXCHANGING, MEMBERS, RUNNING, SINCE, STATE, WAITED, member_words
from gt.sharding.reshard import may_overlap
from gt.worker.bound_op_programs import BoundOpProgram
from gt.worker.bound_ops import BoundOp, UnavailableOp
from gt.worker.bound_programs import AnyBoundOp
from gt.worker.engines.engine import Engine, Value
from gt.worker.exchange import Exchange
from gt.worker.exchange.interface import EarlyTasks, Exchanging, MoveResult, MoveTask, Work, run_exchanges
from gt.worker.exchange.prefetch import ReceivePrefetch
from gt.worker.exchange.traffic import TrafficCount
from gt.worker.failed_value import FailedValue, make_failure, missing_output
from gt.worker.memory_guard import MemoryGuard
from gt.worker.optimizer_steps import OptimizerSteps
from gt.worker.overlapped_exchanges import BegunExchange, OverlappedExchanges
from gt.worker.timeline_recorder import TimelineRecorder

log = logging.getLogger("gt.worker")


class EarlyWork:
    """An exchange within a program that has begun; `finish` never raises."""

    def __init__(
        self, finish: Callable[[], Sequence[MoveResult]], waiting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._finish = finish
        self._waiting = waiting
        self.is_finished = False

    def finish(self) -> Sequence[MoveResult]:
        with self._waiting():
            results = self._finish()
            self.is_finished = True
        return results


class OpRunner:
    """`tensors` are held by id and `ops` by op id; `traffic` counts the payload bytes received, by sender.
    `progress` shows the op and the site of the last op begun. An op that fails leaves `FailedValue` in place of its
    results, and the ops after it go on. `guard` refuses those for whose results there is no memory. `exchanged` are the
    exchanges that the present program has begun, as works where they are finished later."""

    def __init__(
        self,
        worker: int,
        engine: Engine,
        exchange: Exchange,
        timeline_recorder: TimelineRecorder,
        report: Callable[[Report], None],
        progress: MutableSequence[int],
        memory: int = 0,
    ) -> None:
        self.worker = worker
        self.tensors: MutableMapping[int, Value | FailedValue] = {}
        self.guard = MemoryGuard(worker, engine, self.tensors, memory)
        engine.reserve = self.guard.reserve_large
        self.ops: dict[int, AnyBoundOp] = {}
        self.traffic = TrafficCount()
        self.steps = OptimizerSteps(engine)
        self.prefetch = ReceivePrefetch()
        self.overlapped = OverlappedExchanges(self._finish_begun)
        self.exchanged: list[EarlyWork | None] = []
        self.progress = progress
        self._engine = engine
        self._exchange = exchange
        self._timeline_recorder = timeline_recorder
        self._report = report

    def run(self, command: RunOp) -> None:
        """Hot path: one call for every op that `Executor.run` does not run itself."""
        tensors, progress = self.tensors, self.progress
        progress[0], progress[1] = command.op_id, command.site
        if self.overlapped:
            self.overlapped.finish(command.inputs)
        bound = self.ops[command.op_id]
        if isinstance(bound, BoundOpProgram):
            self._exchange_all(command, bound)
            return
        outputs = command.outputs
        values: list[Value | FailedValue] = []
        try:
            if bound.writes and self.steps.sessions and self._skips_write(command, bound):
                return
            if bound.fully_written:
                self._renew(command, dict(zip(bound.writes, bound.fully_written, strict=True)))
            values += map(tensors.__getitem__, command.inputs)
            results = bound.call(values, command.scalars)
        except Exception as error:
            self._fail(command, bound, values, error)
            return
        if bound.output_count:
            for ident, result in zip(outputs, results, strict=False):
                tensors[ident] = result if result is not None else self.missing(command, bound)
        if bound.writes:
            self._rename_written(bound, command.inputs, values, outputs[bound.output_count :])

    def run_after_error(self, command: RunOp, bound: AnyBoundOp, error: Exception) -> None:
        """Deal with the error of a direct call: run the op again by `run`, which reports failures, unless the op may
        have begun to write."""
        if self.overlapped.finish(command.inputs):  # an input was still being exchanged
            self.run(command)
            return
        values = [self.tensors.get(ident) for ident in command.inputs]
        if not bound.writes or any(value is None or isinstance(value, FailedValue) for value in values):
            self.run(command)
            return
        shapes = tuple(str(self._engine.meta(value)) for value in values)
        failed = FailedValue(self.failure_of(bound.op, shapes, command, error))
        self._report(OpFailed(session_of(command.op_id), failed.failure))
        for position in bound.writes:
            self.tensors.pop(command.inputs[position], None)
        self.tensors.update(dict.fromkeys(command.outputs, failed.for_dependents()))

    def fail(self, command: RunOp, bound: BoundOp | UnavailableOp, error: Exception) -> None:
        """Report the error of an op that is no direct call, which was not called by `run`."""
        self._fail(command, bound, [self.tensors[ident] for ident in command.inputs], error)

    def report_failure(self, command: RunOp, op: str, error: Exception) -> FailedValue:
        failed = FailedValue(self.failure_of(op, (), command, error))
        self._report(OpFailed(session_of(command.op_id), failed.failure))
        return failed.for_dependents()

    def _skips_write(self, command: RunOp, bound: BoundOp | UnavailableOp) -> bool:
        """Whether an op that writes is left out, because it belongs to an optimizer step with a failed gradient."""
        written = [command.inputs[position] for position in bound.writes]
        renamed = command.outputs[len(command.outputs) - len(written) :]
        reason = self.steps.skip_reason(written)
        self.steps.before_write(written, renamed, self.tensors.get)
        if reason is None:
            return False
        values = [self.tensors.pop(ident) for ident in written]
        self.tensors.update(dict.fromkeys(command.outputs, reason))
        for old, new, value in zip(written, renamed, values, strict=True):
            self.tensors[new] = reason.in_place_of(value, old, new)
        return True

    def _renew(self, command: RunOp, targets: Mapping[int, TensorMeta]) -> bool:
        """Give memory to targets without a value, by their positions, which an op overwrites without reading them.
        Returns whether there were any. Where another input has no value either, nothing is written."""
        lacking = [position for position in targets if not self._has_value(command.inputs[position])]
        others = [ident for position, ident in enumerate(command.inputs) if position not in targets]
        if not lacking or not all(map(self._has_value, others)):
            return False
        first = len(command.outputs) - len(targets)
        renamed = dict(zip(targets, command.outputs[first:], strict=True))
        made = [self._engine.empty(targets[position]) for position in lacking]  # all of them, or nothing changes
        for position, value in zip(lacking, made, strict=True):
            ident = command.inputs[position]
            self.steps.keep_previous(renamed[position], self.tensors.get(ident))
            self.tensors[ident] = value
        return True

    def _has_value(self, ident: int) -> bool:
        value = self.tensors.get(ident)
        return value is not None and not isinstance(value, FailedValue)

    def missing(self, command: RunOp, bound: BoundOp | UnavailableOp) -> FailedValue:
        """The value of an output for which the op returned no tensor, although the client has a handle for it: only
        reading it is a failure."""
        return FailedValue(missing_output(self.worker, bound.signature.op, command))

    def _rename_written(
        self,
        bound: BoundOp | UnavailableOp,
        inputs: Sequence[int],
        values: Sequence[Value | FailedValue],
        renamed: Sequence[int],
    ) -> None:
        """Store written tensors under their new ids."""
        for position in bound.writes:
            self.tensors.pop(inputs[position], None)
        for position, ident in zip(bound.writes, renamed, strict=True):
            self.tensors[ident] = values[position]

    def free(self, idents: Sequence[int]) -> None:
        if self.overlapped:
            self.overlapped.finish(idents)
        for ident in idents:
            self.tensors.pop(ident, None)
        if self.steps.kept or self.steps.unwritten:
            self.steps.free(idents)

    # Programs

    def run_program(self, command: RunOp, bound: BoundOpProgram) -> Exchanging:
        """Run the steps of a program. This worker may hold no part of an input, and get no part of an output. Whatever
        raises here, the exchanges of the program are done, with failures in place of tensors, because other workers
        wait for them."""

        def fail(op: str, values: Sequence[Value], error: Exception) -> FailedValue:
            shapes = tuple(str(self._engine.meta(value)) for value in values if self._engine.is_tensor(value))
            failed = FailedValue(self.failure_of(op, shapes, command, error))
            self._report(OpFailed(session_of(command.op_id), failed.failure))
            return failed

        reason: FailedValue | None = None
        is_renewed = False
        try:
            reason = self._skip_reason(command, bound)
            is_renewed = bool(bound.targets) and reason is None and self._renew(command, bound.targets)
        except Exception as error:
            reason = fail(bound.op, (), error)
        inputs = [self.tensors.get(ident) for ident in command.inputs]
        computation = bound.run(inputs, command.scalars, fail, reason)
        results, untouched = yield from computation if bound.is_local else self._counted(command, computation)
        results = bound.with_previous(results, {} if is_renewed else untouched, command)
        for position in bound.program.consumes:
            self.tensors.pop(command.inputs[position], None)
        for ident, result in zip(command.outputs, results, strict=True):
            if result is not None:
                self.tensors[ident] = result
        if self._exchange.flags is not None:
            self._exchange.flags.assign(command)

    def _skip_reason(self, command: RunOp, bound: BoundOpProgram) -> FailedValue | None:
        """The failed gradient because of which a program of an optimizer step must write nothing, or None."""
        written = [command.inputs[position] for position in bound.program.consumes]
        if not written or not self.steps.sessions:
            return None
        reason = self.steps.skip_reason(written)
        self.steps.before_write(written, command.outputs[len(command.outputs) - len(written) :], self.tensors.get)
        return reason

    def _counted(self, command: RunOp, computation: Exchanging) -> Exchanging:
        """Pass on the exchanges of a computation, and count the bytes received. Tokens of steps are no payload."""
        is_payload = self.steps.tokens.isdisjoint(command.inputs)
        results: Sequence[MoveResult] | Work | None = None
        while True:
            try:
                tasks = next(computation) if results is None else computation.send(results)
            except StopIteration as done:
                return done.value
            began = self._timeline_recorder.clock() if self._timeline_recorder.is_on else 0
            results = yield tasks
            steps = [task.step for task in tasks]
            if began:
                self._timeline_recorder.note_exchange(command, steps, began, is_payload=is_payload)
            if is_payload:
                self.traffic.add(steps)

    def _exchange_all(self, command: RunOp, bound: BoundOpProgram) -> None:
        """Run a program to its end, exchanging values with other processes. An exchange that may overlap with what
        follows is only begun. The tensor of a gather may be written before it is finished: the copy is then wrong, but
        the dispatcher has dropped it with the write, so no op uses it."""
        self.exchanged.clear()
        computation = self.run_program(command, bound)
        try:
            tasks = next(computation)
        except StopIteration:
            return
        if may_overlap(bound.collective, command.inputs, command.outputs) and self._exchange.overlaps(tasks):
            self._begin_exchange(command, computation, tasks)
        else:
            self._resume(command, computation, self.exchange_tasks(command, tasks))

    def _begin_exchange(self, command: RunOp, computation: Exchanging, tasks: Sequence[MoveTask]) -> None:
        try:
            with self._waiting(tasks):  # until the members agree on it, if it is large
                work = self._exchange.begin(tasks)
        except Exception as error:
            self._resume(command, computation, self._fail_exchange(command, tasks, error))
        else:
            for ident in command.outputs:  # a partial gradient must not be taken for the reduced one
                self.tensors.pop(ident, None)
            self.overlapped.add(BegunExchange(command, computation, tasks, work))

    def _finish_begun(self, begun: BegunExchange) -> None:
        command, computation, tasks, work = begun
        self._resume(command, computation, self._finish_early(command, tasks, work))

    def _resume(self, command: RunOp, computation: Exchanging, results: Sequence[MoveResult] | Work) -> None:
        """Run the rest of a program, after an exchange."""
        run_exchanges(computation, partial(self.exchange_tasks, command), results)
        self._prefetch_next()

    def _prefetch_next(self) -> None:
        """Begin to receive the next tensor that a later command of the batch needs."""
        if self._exchange.can_prefetch:
            step = self.prefetch.next_receive(self.ops)
            if step is not None:
                self._exchange.prefetch(step)

    def exchange_tasks(self, command: RunOp, tasks: Sequence[MoveTask]) -> Sequence[MoveResult] | Work:
        with self._waiting(tasks):  # `exchanged` is wrong meanwhile
            results = self._exchange_or_begin(command, tasks)
            self.exchanged.append(results if isinstance(results, EarlyWork) else None)
        return results

    def _exchange_or_begin(self, command: RunOp, tasks: Sequence[MoveTask]) -> Sequence[MoveResult] | EarlyWork:
        try:
            work = self._exchange.begin(tasks)
        except Exception as error:
            return self._fail_exchange(command, tasks, error)
        if isinstance(tasks, EarlyTasks) and self._exchange.begins_early(tasks):
            return EarlyWork(partial(self._finish_exchange, command, tasks, work), partial(self._waiting, tasks))
        return self._finish_exchange(command, tasks, work)

    def _finish_early(self, command: RunOp, tasks: Sequence[MoveTask], work: Work) -> Sequence[MoveResult]:
        with self._waiting(tasks):
            return self._finish_exchange(command, tasks, work)

    @contextmanager
    def _waiting(self, tasks: Sequence[MoveTask]) -> Iterator[None]:
        """Show that this worker exchanges tensors, and with whom, and count the time."""
        progress, clock = self.progress, self._timeline_recorder.clock
        progress[MEMBERS:COUNTERS] = member_words(tuple(tasks[0].step.members))
        start = clock()
        progress[STATE], progress[SINCE] = EXCHANGING, start
        try:
            yield
        finally:
            end = clock()
            progress[STATE], progress[SINCE] = RUNNING, end
            progress[WAITED] += end - start

    def _finish_exchange(self, command: RunOp, tasks: Sequence[MoveTask], work: Work) -> Sequence[MoveResult]:
        try:
            return work.finish()
        except Exception as error:
            return self._fail_exchange(command, tasks, error)

    def _fail_exchange(self, command: RunOp, tasks: Sequence[MoveTask], error: Exception) -> Sequence[MoveResult]:
        """Report an exchange that failed as a whole, such as by the end of a peer; returns the failed results."""
        members = tasks[0].step.members
        log.warning("an exchange among workers %s failed: %s", members, error)
        failure = self.failure_of("exchange", (), command, error)
        failure = replace(failure, peers=self._exchange.required_workers(members))
        self._report(OpFailed(session_of(command.op_id), failure))
        failed = FailedValue(failure)
        return [failed if task.step.after is not None else None for task in tasks]

    # Queries

    def query(self, command: QueryOp) -> None:
        """Run an op whose results the client has to be told of, such as `nonzero`. Where it fails without having
        touched the tensors that it writes to, these keep their values, as in torch."""
        self.progress[0], self.progress[1] = command.op_id, command.site
        bound = self.ops[command.op_id]
        assert not isinstance(bound, BoundOpProgram), "queries run on whole tensors"
        values: list[Value | FailedValue] = []
        before: list[TensorMeta | None] = []
        written = [command.inputs[position] for position in bound.writes] if self.steps.sessions else []
        since = [self.steps.unwritten.get(ident, ident) for ident in written]
        try:
            if written:
                self.steps.before_write(written, command.written, self.tensors.get)
            values += map(self.tensors.__getitem__, command.inputs)
            self._make_resizable([command.inputs[position] for position in bound.writes])
            values[:] = map(self.tensors.__getitem__, command.inputs)
            before += [self._meta(values[position]) for position in bound.writes]
            results = bound.call(values, command.scalars)
            if len(results) > MAX_RESULTS:
                raise RuntimeError(f"{len(results)} results of one op are over the limit of {MAX_RESULTS}")
            answers = [self._keep_result(command.first, results, position) for position in range(len(results))]
        except Exception as error:
            failed = self._cause(command, bound, values, error)
            has_begun = not any(value is failed for value in values)
            after = [self._meta(values[position]) for position in bound.writes] if before else []
            lost: list[Value | FailedValue] = [failed.for_dependents()] * len(command.inputs)
            kept = values if after == before else lost
            self._rename_written(bound, command.inputs, kept, command.written)
            if not has_begun and kept is values:
                self.steps.note_unwritten(zip(command.written, since, strict=False))
            self._report(Failed(command.request, failed.failure, has_begun))  # last: an error is one more answer
            return
        self._rename_written(bound, command.inputs, values, command.written)
        metas = tuple(self._engine.meta(values[position]) for position in bound.writes)
        self._report(Queried(command.request, tuple(answers), metas))

    def _make_resizable(self, written: Sequence[int]) -> None:
        for ident in written:
            value = self.tensors[ident]
            if not isinstance(value, FailedValue):
                self.tensors[ident] = self._engine.resizable(value)

    def _keep_result(self, first: int, results: list[Any], position: int) -> QueryResult:
        """Store one result of a query, if it is a tensor; returns its meta, or the plain value."""
        result = results[position]
        if not self._engine.is_tensor(result):
            return result  # type: ignore[no-any-return]
        plain = self._engine.without_lazy_bits(result)
        self.tensors[first + sum(map(self._engine.is_tensor, results[:position]))] = plain
        return self._engine.meta(plain)

    def _meta(self, value: Value | FailedValue) -> TensorMeta | None:
        return None if isinstance(value, FailedValue) else self._engine.meta(value)

    # Failures

    def fail_command(self, command: Command, error: Exception) -> None:
        """Fail a command that has raised, whatever it was: the tensors that it makes, writes or was to copy have no
        value, and whoever waits for an answer, or else its session, is told why."""
        bound = self.ops.get(getattr(command, "op_id", 0))
        name = bound.op if bound is not None else getattr(command, "timeline_name", None) or type(command).__name__
        metas = (str(command.meta),) if isinstance(command, WorkerCreateTensor) else ()
        failure = self.failure_of(name, metas, command, error)
        failed = FailedValue(failure)
        inputs: Sequence[int] = getattr(command, "inputs", ())
        for position in bound.writes if bound is not None else ():
            self.tensors.pop(inputs[position], None)
        made = (command.id,) if isinstance(command, WorkerUnshareTensor) else id_fields(type(command)).new(command)
        self.tensors.update(dict.fromkeys(made, failed))
        if hasattr(command, "request"):
            self._report(Failed(command.request, failure, is_own_failure=True))
        elif session := owner_of(command):
            self._report(OpFailed(session, failure))
        else:
            log.error("%s failed", type(command).__name__, exc_info=error)

    def failure_of(self, op: str, inputs: tuple[str, ...], command: Command, error: Exception) -> Failure:
        """The failure of a command; `inputs` are the metas of the op's tensors, as text."""
        return make_failure(self.worker, op, inputs, command, self.guard.explained(error))

    def _fail(
        self,
        command: RunOp,
        bound: BoundOp | UnavailableOp,
        values: list[Value | FailedValue],
        error: Exception,
    ) -> None:
        """A non-query op failed: report it, and mark its outputs and written inputs as failed."""
        failed = self._cause(command, bound, values, error)
        has_begun = not any(value is failed for value in values)
        if has_begun:
            self._report(OpFailed(session_of(command.op_id), failed.failure))
        for position in bound.writes:
            self.tensors.pop(command.inputs[position], None)
        for ident in command.outputs:
            self.tensors[ident] = failed.for_dependents()
        if not has_begun:
            renamed = command.outputs[len(command.outputs) - len(bound.writes) :]
            for position, ident in zip(bound.writes, renamed, strict=True):
                self.tensors[ident] = failed.in_place_of(values[position], command.inputs[position], ident)

    def _cause(
        self,
        command: RunOp | QueryOp,
        bound: BoundOp | UnavailableOp,
        values: list[Value | FailedValue],
        error: Exception,
    ) -> FailedValue:
        """The failed input of an op, or else the failure of the op itself."""
        cause = next((value for value in values if isinstance(value, FailedValue)), None)
        if cause is not None:
            return cause
        inputs = self._describe_inputs(bound, values)
        return FailedValue(self.failure_of(bound.signature.op, inputs, command, error))

    def _describe_inputs(self, bound: BoundOp | UnavailableOp, values: list[Value]) -> tuple[str, ...]:
        try:
            return bound.describe(values)
        except Exception:  # the op may have failed because a view of its input is not possible
            return tuple(str(self._engine.meta(value)) for value in values)
