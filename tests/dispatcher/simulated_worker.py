"""A worker without torch, which checks that it can run the commands of the dispatcher."""

from collections import deque

from gt.core.ids import session_of
from gt.core.messages import (
    TOLD_TO_END,
    ByteRange,
    DefineOp,
    Fetched,
    ForgetOps,
    FreeTensors,
    Goodbye,
    Queried,
    QueryOp,
    RunOp,
    StoreReady,
    Synchronize,
    Synchronized,
    Traffic,
    WorkerCreateTensor,
    WorkerDefineProgram,
    WorkerEndSession,
    WorkerFetchTensor,
    WorkerHostStore,
    WorkerJoinStore,
    WorkerLosePeer,
    WorkerReadTraffic,
    WorkerShutdown,
)
from gt.core.signatures import Compute, Move, Whole
from gt.sharding.spec import spec_of
from tests.records import LARGE, SMALL

WHOLE = "whole"


def part_of(spec):
    """A worker's part of a layout: all of the tensor, or a part."""
    return WHOLE if spec.is_whole else spec


class SimulatedWorker:
    """`held` are the layouts of the tensors in a worker's store by id; `known` and `programs` are the ops and programs
    defined on it."""

    def __init__(self, number):
        self.number = number
        self.inbox = deque()
        self.held = {}
        self.known = {}
        self.programs = {}
        self.store = -1

    def step(self):  # noqa: PLR0912  (one case for each command)
        """Run the next command; returns its reports."""
        command = self.inbox.popleft().command
        match command:
            case DefineOp(op_id, op):
                assert op_id not in self.known
                self.known[op_id] = op
            case WorkerDefineProgram(op_id, _, program):
                assert op_id not in self.programs
                self.programs[op_id] = program
            case ForgetOps(op_ids):
                for op_id in op_ids:
                    del (self.known if op_id in self.known else self.programs)[op_id]
            case WorkerCreateTensor():
                self.held[command.id] = WHOLE
            case RunOp() if command.op_id in self.programs:
                self._run_program(command, self.programs[command.op_id])
            case RunOp() | QueryOp():
                return self._run(command)
            case FreeTensors(ids):
                for ident in ids:
                    del self.held[ident]
            case WorkerFetchTensor(request, ident):
                assert ident in self.held
                return [Fetched(request, ByteRange("", SMALL.nbytes))]
            case Synchronize(request):
                return [Synchronized(request)]
            case WorkerReadTraffic(request):
                return [Traffic(request, {})]
            case WorkerEndSession(session):
                for table in (self.held, self.known, self.programs):
                    for ident in [ident for ident in table if session_of(ident) == session]:
                        del table[ident]
            case WorkerHostStore():
                return [StoreReady(self.number + 1)]
            case WorkerJoinStore(_, port):
                self.store = port - 1
            case WorkerLosePeer(worker):
                assert worker != self.number
            case WorkerShutdown():
                return [Goodbye(TOLD_TO_END)]
            case _:
                raise AssertionError(f"not a command of this test: {command}")
        return []

    def _run(self, command):
        """Run an op unchanged on whole tensors."""
        op = self.known[command.op_id]
        assert [self.held[ident] for ident in command.inputs] == [WHOLE] * len(op.args)
        for position in op.writes:
            del self.held[command.inputs[position]]
        if isinstance(command, RunOp):
            self.held |= dict.fromkeys(command.outputs, WHOLE)
            return []
        self.held |= dict.fromkeys([*command.written, command.first], WHOLE)
        return [Queried(command.request, (LARGE,), (LARGE,) * len(command.written))]

    def _run_program(self, command, program):
        """Check that each step finds its registers in the planned layouts; a move may give this worker nothing."""
        registers = {
            register: self.held[ident]
            for register, ident in zip(program.takes, command.inputs, strict=True)
            if ident in self.held
        }
        for step in program.steps:
            if isinstance(step, Move):
                source, target = spec_of(step.source), spec_of(step.target)
                assert registers.get(step.input) == (part_of(source) if self.number in source.mesh else None)
                if self.number in target.mesh:
                    registers[step.output] = part_of(target)
            elif isinstance(step, Compute):
                operands = [part_of(spec_of(spec)) for spec in step.operand_specs]
                assert [registers[register] for register in step.inputs[: len(operands)]] == operands
                registers |= dict(
                    zip(step.outputs, [part_of(spec_of(spec)) for spec in step.result_specs], strict=True)
                )
            elif isinstance(step, Whole):
                assert [registers[register] for register in step.inputs] == [WHOLE] * len(step.inputs)
                registers |= dict.fromkeys(step.outputs, WHOLE)
        for position in program.consumes:
            del self.held[command.inputs[position]]
        for register, ident in zip(program.gives, command.outputs, strict=True):
            if register in registers:
                self.held[ident] = registers[register]
