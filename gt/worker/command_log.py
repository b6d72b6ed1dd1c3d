"""The table of GT_DEBUG_WORKER: the commands that a worker has run, with local tensors, time, exchanges and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from gt.core.message_fields import id_fields
from gt.core.messages import (
    Command,
    DefineOp,
    FreeTensors,
    QueryOp,
    RunOp,
    RunProgram,
    Swapped,
    WorkerCreateTensor,
    WorkerDefineProgram,
)
from gt.core.tables import COMMANDS, Column, LogTable, count, print_bytes, print_tensors, short_op
from gt.worker.engines.engine import Engine, Value
from gt.worker.failed_value import FailedValue
from gt.worker.timeline_recorder import TIMELINE_NAMES, DescribeOps, TimedCommand

COLUMNS = (
    Column("op", 20),
    Column("local tensors", 31),
    Column("us", 7, is_number=True),
    Column("received", 17),
    Column("waited us", 9, is_number=True),
    Column("restrided", 9, is_number=True),
    Column("held", 7, is_number=True),
)
NANOSECONDS = 1000  # nanoseconds in a microsecond


def open_command_log(
    worker: int,
    engine: Engine,
    tensors: Mapping[int, Value | FailedValue],
    describe: DescribeOps,
    held_bytes: Callable[[], int],
) -> CommandLog | None:
    """The log of a worker; None if nobody reads it, so that nothing is recorded."""
    table = LogTable(COMMANDS, f"work {worker}", COLUMNS)
    return CommandLog(table, engine, tensors, describe, held_bytes) if table.is_on else None


class CommandLog:
    """Writes a row for each command that is part of timelines. `tensors` are those that the worker holds."""

    def __init__(
        self,
        table: LogTable,
        engine: Engine,
        tensors: Mapping[int, Value | FailedValue],
        describe: DescribeOps,
        held_bytes: Callable[[], int],
    ) -> None:
        self._table = table
        self._engine = engine
        self._tensors = tensors
        self._describe = describe
        self._held_bytes = held_bytes
        self._restrided = engine.restrided

    def __call__(self, timed: TimedCommand) -> None:
        command, start, end, owned, _ = timed
        swaps = [swap for _, swap in owned]
        if command is None or TIMELINE_NAMES[type(command)] is None:
            return
        restrided, self._restrided = self._engine.restrided - self._restrided, self._engine.restrided
        waited = sum(swap.end - swap.start for swap in swaps)
        cells = (
            self._name(timed),
            self._print_tensors(command),
            f"{(end - start) / NANOSECONDS:.0f}",
            _print_received(swaps),
            f"{waited / NANOSECONDS:.0f}" if swaps else "",
            str(restrided or ""),
            print_bytes(self._held_bytes()),
        )
        self._table.add(cells)

    def _name(self, timed: TimedCommand) -> str:
        command = timed.command
        if isinstance(command, RunOp | QueryOp):
            return short_op(self._describe.describe_op(command.op_id).name)
        if isinstance(command, RunProgram):
            compiled = sum(len(positions) for positions, _, _ in timed.op_times if len(positions) > 1)
            program, _ = self._describe.describe_program(command.program_id)
            return f"segment of {len(program.steps)} ops" + (f", {compiled} in code" if compiled else "")
        if isinstance(command, DefineOp):
            return f"define {short_op(command.signature.op)}"
        if isinstance(command, WorkerDefineProgram):
            return f"define {short_op(command.op)}"
        return TIMELINE_NAMES[type(command)] or ""

    def _print_tensors(self, command: Command) -> str:
        """The inputs that still exist and the results of a command, as this worker holds them."""
        if isinstance(command, FreeTensors):
            return count(len(command.ids), "tensor")
        if isinstance(command, RunProgram):
            program, _ = self._describe.describe_program(command.program_id)
            made = range(command.first, command.first + program.made)
            sides: tuple[Iterable[int], Iterable[int]] = (command.inputs, made)
        elif isinstance(command, RunOp):
            sides = (command.inputs, command.outputs)
        elif isinstance(command, WorkerCreateTensor):
            sides = ((), (command.id,))
        else:
            sides = (id_fields(type(command)).tensors(command), ())
        inputs, outputs = (self._print_held(side) for side in sides)
        return f"{inputs} -> {outputs}".strip() if outputs else inputs

    def _print_held(self, idents: Iterable[int]) -> str:
        held = [self._tensors.get(ident) for ident in idents]
        values = [value for value in held if value is not None and not isinstance(value, FailedValue)]
        failed = "failed" if any(isinstance(value, FailedValue) for value in held) else ""
        return f"{print_tensors([self._engine.meta(value) for value in values])} {failed}".strip()


def _print_received(swaps: Sequence[Swapped]) -> str:
    """The exchanges of a command, and the bytes that the worker received: `all-gather 48 B`."""
    if not swaps:
        return ""
    kinds = ", ".join(dict.fromkeys(swap.kind for swap in swaps))
    return f"{kinds} {print_bytes(sum(nbytes for swap in swaps for _, nbytes in swap.receives))}"
