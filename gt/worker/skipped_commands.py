"""Commands that do not compute, because their sessions ended while the worker was in the middle of an op of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gt.core.message_fields import owner_of
from gt.core.messages import (
    Command,
    FreeTensors,
    QueryOp,
    RunOp,
    RunProgram,
    WorkerFetchTensor,
    WorkerUnshareTensor,
)
from gt.worker.bound_op_programs import BoundOpProgram
from gt.worker.exchange.interface import MoveResult, MoveTask, Work, run_exchanges
from gt.worker.failed_value import FailedValue
from gt.worker.op_runner import EarlyWork, OpRunner

_COMPUTING = (RunOp, RunProgram, QueryOp, WorkerFetchTensor, WorkerUnshareTensor)


class SkippedCommands:
    """Fails the commands of `sessions`, which take part in exchanges with failures, because other workers wait for
    them. `expand` gives the commands of a program."""

    def __init__(self, runner: OpRunner, expand: Callable[[Command], Sequence[Command]]) -> None:
        self.sessions: set[int] = set()
        self._runner = runner
        self._expand = expand

    def left_out(self, batch: Iterator[Command]) -> Iterator[Command]:
        """The other commands of a batch."""
        for command in batch:
            if isinstance(command, _COMPUTING) and owner_of(command) in self.sessions:
                self.skip(command)
            else:
                yield command

    def skip(self, command: Command, begun: Sequence[EarlyWork | None] = ()) -> None:
        """Fail a command. `begun` are the exchanges that it has begun already, as in `OpRunner`."""
        error = RuntimeError("the session has ended")
        for single in self._expand(command):
            if isinstance(single, FreeTensors):
                self._runner.free(single.ids)
                continue
            bound = self._runner.ops.get(single.op_id) if isinstance(single, RunOp) else None
            if isinstance(single, RunOp) and isinstance(bound, BoundOpProgram) and not bound.is_local:
                failed = FailedValue(self._runner.failure_of(bound.op, (), single, error))
                self._exchange(single, bound, failed, iter(begun))
            self._runner.fail_command(single, error)

    def _exchange(
        self, command: RunOp, bound: BoundOpProgram, failed: FailedValue, begun: Iterator[EarlyWork | None]
    ) -> None:
        def exchange(tasks: Sequence[MoveTask]) -> Sequence[MoveResult] | Work:
            try:
                work = next(begun)
            except StopIteration:
                return self._runner.exchange_tasks(command, tasks)
            if work is not None and not work.is_finished:
                return work
            return [failed if task.step.after is not None else None for task in tasks]

        inputs = [None if self._runner.tensors.get(ident) is None else failed for ident in command.inputs]
        run_exchanges(bound.run(inputs, command.scalars, lambda op, values, error: failed, failed), exchange)
