"""Replays recorded steps of a program with other layouts: the ordinary dispatcher plans them for workers that do not
exist, and the commands that it would send are priced. So a prediction and a run come from the same planner."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from gt.core.errors import GTError
from gt.core.ids import session_of
from gt.core.message_fields import id_fields
from gt.core.messages import (
    BeginModule,
    BeginStep,
    ByteRange,
    Command,
    CreateTensor,
    DefineOp,
    DefineScope,
    DropCopies,
    EndStep,
    FreeTensors,
    Instruction,
    NoteGradient,
    OpFailed,
    PlaceTensor,
    Queried,
    QueryOp,
    Redistribute,
    Rejected,
    RunOp,
    WorkerBeginStep,
    WorkerDefineProgram,
)
from gt.core.meta import ITEM_BYTES, TensorMeta
from gt.core.signatures import Compute, Move, OpProgram, OpProgramStep, Signature, Whole
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.message_queue import Outgoing, ToClient, ToWorkers
from gt.sharding.boxes import Shape, box_elements
from gt.sharding.calibration import Calibration, step_seconds
from gt.sharding.hop_traffic import StepKind
from gt.sharding.op_calls import OpCall
from gt.sharding.reshard import may_overlap, plan_reshard
from gt.sharding.rules import rule_of
from gt.sharding.solver.op_strategies import call_seconds
from gt.sharding.solver.recorded_program import ENTER, GRADIENT, INPUT, LEAVE, OUTPUT, ModuleMark, RecordedSteps
from gt.sharding.solver.step_timeline import StepTimeline
from gt.sharding.spec import DeviceMesh, ShardingSpec, largest_local_shape, local_box, spec_of, whole
from gt.sharding.strategies import project
from gt.sharding.view_layouts import base_layout
from gt.signals.config import ModelConfig
from gt.signals.resolution import resolve_activation, resolve_spec

_REPLAYED = (RunOp, QueryOp, Redistribute, FreeTensors, NoteGradient, BeginStep, EndStep)


class CollectiveCost(NamedTuple):
    """One communication step: its kind and axes, the bytes that all workers together receive, its time, the op and the
    line that cause it, the module, and the part of its time in which workers wait for it and do not compute."""

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    seconds: float
    op: str
    line: str
    module: str
    waits: float = 0.0


class ReplayedStep(NamedTuple):
    """The cost of a step as the dispatcher plans it. `peak` are the most bytes that a worker holds at any time of all
    recorded steps, `modules` the time of computation in each module."""

    compute_seconds: float
    collectives: tuple[CollectiveCost, ...]
    peak: int
    modules: dict[str, float]

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.communication_seconds

    @property
    def communication_seconds(self) -> float:
        """The time in which workers wait for each other, and do not compute."""
        return sum([each.waits for each in self.collectives])

    @property
    def nbytes(self) -> int:
        """The bytes that all workers together receive."""
        return sum([each.nbytes for each in self.collectives])


def replay_steps(
    steps: RecordedSteps, config: ModelConfig, mesh: DeviceMesh, workers: int, machine: Calibration
) -> ReplayedStep:
    """The cost of the last recorded step, with the layouts of a configuration."""
    return _Replay(steps, config, mesh, workers, machine).run()


class _MoveStep(NamedTuple):
    """One communication step of a program. `waiting` is the part of its time that does not depend on bytes."""

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    seconds: float
    waiting: float


class _ProgramCost(NamedTuple):
    """The time of a program's computation, and its communication. `collective` is the kind of exchange that may go on
    while the worker computes; None if the program does anything else."""

    compute: float
    moves: tuple[_MoveStep, ...]
    collective: StepKind | None = None


class _Replay:
    def __init__(
        self, steps: RecordedSteps, config: ModelConfig, mesh: DeviceMesh, workers: int, machine: Calibration
    ) -> None:
        self._steps = steps
        self._config = config
        self._mesh = mesh
        self._machine = machine
        self._dispatcher = Dispatcher()
        for _ in range(workers):
            number, _ = self._dispatcher.join_worker("cpu", "here", 1, overlaps=machine.overlap > 0)
            self._dispatcher.make_ready(number)
        self._session = self._open_session()
        self._layouts = self._parameter_layouts()
        self._cut = {ident for ident, spec in self._layouts.items() if any(spec.dims)}
        self._inputs = {mark.ident for mark in steps.marks if mark.kind == INPUT}
        self._costs: dict[int, _ProgramCost] = {}
        self._timeline = StepTimeline(machine.overlap)
        self._collectives: list[CollectiveCost] = []
        self._modules: defaultdict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._backward = ""
        self._in_update = False
        self._tokens: set[int] = set()  # workers agree on a step with these tensors: their exchange is not counted
        self._unused: dict[int, Sequence[tuple[int, int]]] = {}  # per tensor: workers with smaller shards, by how much
        self._unused_on = [0] * workers
        self._peak = 0

    def _open_session(self) -> int:
        """A session with the number that the recorded ids have."""
        wanted = session_of(next(iter(self._steps.parameters.values())))
        while (session := self._dispatcher.open_session("here", 1)) < wanted:
            self._dispatcher.end_session(session)
        return session

    def _parameter_layouts(self) -> dict[int, ShardingSpec]:
        """The layouts of parameters and of the optimizer's state, by id."""
        found: dict[int, ShardingSpec] = {}
        for name, ident in self._steps.parameters.items():
            rank = len(self._steps.metas[ident].shape) if ident in self._steps.metas else None
            entry = self._config.spec_for(name)
            if rank is not None and entry is not None:
                found[ident] = resolve_spec(entry.dims, self._mesh, rank)
            elif rank is not None:
                found.setdefault(ident, whole(self._mesh, rank))  # a tied parameter may have another name with a layout
        return found | {
            state: found[parameter] for state, parameter in self._steps.states.items() if parameter in found
        }

    # The stream

    def run(self) -> ReplayedStep:
        steps, marks = self._steps, list(self._steps.marks)
        self._tell(list(self._preamble()))
        next_mark = 0
        for position, instruction in enumerate(steps.instructions):
            if position == steps.starts[-1]:
                self._begin_measuring()
            while next_mark < len(marks) and marks[next_mark].position <= position:
                self._tell(list(self._at_mark(marks[next_mark])))
                next_mark += 1
            self._tell(list(self._translated(instruction)), getattr(instruction, "site", 0))
            self._follow(instruction)
        self._timeline.finish()
        waits = zip(self._collectives, self._timeline.waits, strict=True)
        collectives = tuple([each._replace(waits=wait) for each, wait in waits])
        return ReplayedStep(self._timeline.compute_seconds, collectives, self._peak, dict(self._modules))

    def _begin_measuring(self) -> None:
        self._timeline = StepTimeline(self._machine.overlap)
        self._collectives.clear()
        self._modules.clear()

    def _preamble(self) -> Iterator[Instruction]:
        """Definitions, and the tensors that exist before the steps."""
        steps = self._steps
        used = {each.op_id for each in steps.instructions if isinstance(each, RunOp | QueryOp)}
        yield from [DefineOp(op_id, steps.signatures[op_id]) for op_id in sorted(used)]
        yield from [DefineScope(ident, name, policy) for ident, (name, policy) in steps.scopes.items()]
        made: set[int] = set()
        for instruction in steps.instructions:
            for ident in _named(instruction):
                if ident not in made and ident in steps.metas:
                    made.add(ident)
                    layout = self._layouts.get(ident, steps.layouts.get(ident))
                    yield _create(ident, steps.metas[ident], layout)
            made.update(_created(instruction, steps.answers))

    def _translated(self, instruction: Instruction) -> Iterator[Instruction]:
        if isinstance(instruction, _REPLAYED):
            yield instruction
        elif isinstance(instruction, CreateTensor):
            yield self._with_layout(instruction)
        elif isinstance(instruction, DropCopies):
            ids = tuple([ident for ident in instruction.ids if ident in self._cut])
            if ids:
                yield DropCopies(ids)
        elif isinstance(instruction, BeginModule):
            ids, following = [
                tuple([ident for ident in idents if ident in self._cut])
                for idents in (instruction.parameters, instruction.next_parameters)
            ]
            if ids:
                yield BeginModule(instruction.module, ids, instruction.next_module, following, instruction.site)

    def _with_layout(self, create: CreateTensor) -> CreateTensor:
        dims = self._config.inputs
        if create.id not in self._inputs or dims is None:
            return create
        return _create(create.id, create.meta, resolve_activation(dims, self._mesh, create.meta.shape), create.site)

    def _at_mark(self, mark: ModuleMark) -> Iterator[Instruction]:
        if mark.kind == ENTER:
            self._stack.append(mark.module)
            if not mark.module:  # the model begins, so backward has ended
                self._backward = ""
        elif mark.kind == LEAVE:
            self._stack.pop()
        else:
            if mark.kind == GRADIENT:
                self._backward = mark.module
            spec = self._activation_layout(mark)
            if spec is not None:
                yield PlaceTensor(mark.ident, spec.record(), 0)
                yield FreeTensors(mark.dead)

    def _activation_layout(self, mark: ModuleMark) -> ShardingSpec | None:
        entry = self._config.output_for(mark.module) if mark.kind in (OUTPUT, GRADIENT) else None
        dims = self._config.inputs if mark.kind == INPUT else entry.dims if entry is not None else None
        assert mark.meta is not None
        spec = None if dims is None else resolve_activation(dims, self._mesh, mark.meta.shape)
        return None if spec is None else base_layout(mark.view, self._steps.metas[mark.ident], spec)

    def _follow(self, instruction: Instruction) -> None:
        """Note which parameters an op has given new ids, and where an optimizer's step begins and ends."""
        if isinstance(instruction, RunOp):
            signature = self._steps.signatures[instruction.op_id]
            versions = instruction.outputs[len(signature.outputs) :]
            for position, version in zip(signature.writes, versions, strict=True):
                if instruction.inputs[position] in self._cut:
                    self._cut.add(version)
        elif isinstance(instruction, BeginStep | EndStep):
            self._in_update = isinstance(instruction, BeginStep)

    # Costs

    def _tell(self, batch: list[Instruction], site: int = 0) -> None:
        for instruction in batch:
            for message in self._dispatcher.instruct(self._session, [instruction], ()):
                self._price(message, site)
                if isinstance(message, ToWorkers):
                    self._count_unused(message.command)
            if isinstance(instruction, QueryOp):
                self._answer(instruction)
            self._peak = max(self._peak, self._most_bytes())

    def _most_bytes(self) -> int:
        """The bytes of the worker that holds the most. The dispatcher counts the largest shard for all workers."""
        held = [-unused for unused in self._unused_on]
        for mesh, nbytes in self._dispatcher.state.bytes_on.items():
            for worker in mesh.workers if nbytes else ():
                held[worker] += nbytes
        return max(held)

    def _count_unused(self, command: Command) -> None:
        """Note the tensors that a command has made, moved or freed, if their shards differ in size."""
        state = self._dispatcher.state
        for ident in id_fields(type(command)).tensors(command):
            for worker, nbytes in self._unused.pop(ident, ()):
                self._unused_on[worker] -= nbytes
            original, layout = state.copy_order.get(ident, (ident, None))
            tensor = state.tensors.get(original)
            if tensor is not None:
                unused = _unused_bytes(layout or tensor.spec, tensor.meta.shape, ITEM_BYTES[tensor.meta.dtype])
                if unused:
                    self._unused[ident] = unused
                for worker, nbytes in unused:
                    self._unused_on[worker] += nbytes

    def _answer(self, query: QueryOp) -> None:
        """Give the recorded answer of each worker to a query."""
        for worker in sorted(self._dispatcher.state.pending[query.request].waiting_for):
            self._dispatcher.report(worker, self._steps.answers[query.request], None)

    def _price(self, message: Outgoing, site: int) -> None:
        if isinstance(message, ToClient):
            if isinstance(message.answer, Rejected | OpFailed):
                raise GTError(f"a recorded step cannot be replayed with these layouts: {message.answer}")
            return
        command: Command = message.command
        if isinstance(command, WorkerDefineProgram):
            self._costs[command.op_id] = self._program_cost(command.program)
        elif isinstance(command, DefineOp):
            self._costs[command.op_id] = _ProgramCost(-1.0, ())
        elif isinstance(command, WorkerBeginStep):
            self._tokens.add(command.token)
        elif isinstance(command, RunOp) and self._tokens.isdisjoint(command.inputs):
            self._add(command, site)

    def _add(self, run: RunOp, site: int) -> None:
        cost = self._costs.get(run.op_id)
        if cost is None or cost.compute < 0:
            cost = self._costs[run.op_id] = self._whole_cost(run)
        module = self._stack[-1] if self._stack else "" if self._in_update else self._backward
        self._modules[module] += cost.compute
        op = self._dispatcher.find_op(run.op_id, 0)[0]
        line = self._steps.sites.get(site, "")
        moves = [move for move in cost.moves if move.nbytes]
        self._collectives += [CollectiveCost(*move[:4], op, line, module) for move in moves]
        goes_on = may_overlap(cost.collective, run.inputs, run.outputs)
        self._pass_time(run, cost.compute, [move.seconds for move in moves], goes_on=goes_on)

    def _pass_time(self, run: RunOp, compute: float, exchanges: Sequence[float], *, goes_on: bool) -> None:
        timeline = self._timeline
        timeline.need(run.inputs)
        for seconds in exchanges:
            if goes_on:
                timeline.begin(seconds, run.outputs)
            else:
                timeline.exchange(seconds)
        timeline.compute(compute)

    def _whole_cost(self, run: RunOp) -> _ProgramCost:
        """The cost of an op on whole tensors."""
        signature = self._steps.signatures.get(run.op_id)
        metas = [self._steps.metas.get(ident) for ident in run.inputs]
        if signature is None or any(meta is None for meta in metas):
            return _ProgramCost(self._machine.op_seconds, ())
        used = [
            path[-1].results[path[-1].pick or 0] if path else meta
            for path, meta in zip(signature.paths, metas, strict=True)
        ]
        return _ProgramCost(self._call_seconds(_call_of(signature, used), None, None), ())  # type: ignore[arg-type]

    def _program_cost(self, program: OpProgram) -> _ProgramCost:
        compute = 0.0
        moves: list[_MoveStep] = []
        kinds = {_overlapping_kind(step) for step in program.steps}
        for step in program.steps:
            if isinstance(step, Compute) and not step.is_view:
                call = OpCall(step.op, step.args, step.kwargs, step.inputs_meta, step.outputs_meta, step.positions)
                compute += self._call_seconds(
                    call, [spec_of(spec) for spec in step.operand_specs], [spec_of(spec) for spec in step.result_specs]
                )
            elif isinstance(step, Whole):
                compute += self._machine.op_seconds
            elif isinstance(step, Move):
                moves += self._move_cost(step)
        if len(moves) > 1 and len(moves) == len(program.steps):  # one exchange of several tensors
            moves = [moves[0], *[move._replace(seconds=move.seconds - move.waiting) for move in moves[1:]]]
        return _ProgramCost(compute, tuple(moves), kinds.pop() if len(kinds) == 1 else None)

    def _move_cost(self, move: Move) -> list[_MoveStep]:
        source, target = spec_of(move.source), spec_of(move.target)
        plan = plan_reshard(move.meta.shape, ITEM_BYTES[move.meta.dtype], source, target)
        found = []
        for step, nbytes in zip(plan.steps, plan.step_bytes, strict=True):
            time, waiting = [
                step_seconds(step.kind, step.axes, count, step.target.mesh, self._machine)
                for count in (nbytes, min(nbytes, 1))
            ]
            found.append(_MoveStep(step.kind, step.axes, nbytes, time, waiting))
        return found

    def _call_seconds(
        self, call: OpCall, operands: Sequence[ShardingSpec] | None, results: Sequence[ShardingSpec] | None
    ) -> float:
        rule = rule_of(call)
        ranks = [[len(meta.shape) for meta in metas] for metas in (call.inputs, call.outputs)]
        needed, given = [
            list(specs) if specs is not None else [whole(self._mesh, rank) for rank in own]
            for specs, own in zip((operands, results), ranks, strict=True)
        ]
        assignment = {}
        if rule is not None:
            for position, spec in enumerate(needed[: len(rule.operands)]):
                assignment.update(project(rule, position, spec))
        specs = (*needed[: len(call.inputs)], *given)
        return call_seconds(rule, call, assignment, specs, self._machine)


@lru_cache(maxsize=1 << 12)
def _unused_bytes(spec: ShardingSpec, shape: Shape, item_bytes: int) -> tuple[tuple[int, int], ...]:
    """The workers whose shards are smaller than the largest one, and by how many bytes."""
    largest = math.prod(largest_local_shape(spec, shape))
    sizes = [(worker, box_elements(local_box(spec, shape, worker))) for worker in spec.mesh.workers]
    return tuple([(worker, (largest - size) * item_bytes) for worker, size in sizes if size < largest])


def _overlapping_kind(step: OpProgramStep) -> StepKind | None:
    """The kind of a step that is one exchange and may go on while a worker computes: a gather of equal parts, or a
    sum. Other kinds need the worker."""
    if not isinstance(step, Move):
        return None
    source, shape = spec_of(step.source), step.meta.shape
    plan = plan_reshard(shape, ITEM_BYTES[step.meta.dtype], source, spec_of(step.target))
    kinds = [each.kind for each in plan.steps]
    if kinds == ["all-gather"]:
        parts = math.prod([source.mesh.axis_size(axis) for axis in source.axes])
        return "all-gather" if parts * math.prod(largest_local_shape(source, shape)) == math.prod(shape) else None
    return "all-reduce" if kinds == ["all-reduce"] and source.kind == "sum" else None


def _call_of(signature: Signature, metas: Sequence[TensorMeta]) -> OpCall:
    written = [metas[position] for position in signature.writes]
    name = signature.functional or signature.op
    return OpCall(
        name, signature.args, signature.kwargs, tuple(metas), (*signature.outputs, *written), signature.positions
    )


def _create(ident: int, meta: TensorMeta, layout: ShardingSpec | None, site: int = 0) -> CreateTensor:
    record = layout.replace(partial=()).record() if layout is not None else None
    return CreateTensor(ident, meta, ByteRange("", meta.nbytes), record, site)


def _named(instruction: Instruction) -> tuple[int, ...]:
    """The tensors that an instruction needs."""
    if isinstance(instruction, RunOp | QueryOp):
        return instruction.inputs
    if isinstance(instruction, Redistribute):
        return (instruction.input,)
    return (instruction.gradient, instruction.parameter) if isinstance(instruction, NoteGradient) else ()


def _created(instruction: Instruction, answers: Mapping[int, Queried]) -> tuple[int, ...]:
    if isinstance(instruction, RunOp):
        return instruction.outputs
    if isinstance(instruction, QueryOp):
        results = len(answers[instruction.request].results)
        return (*instruction.written, *range(instruction.first, instruction.first + results))
    if isinstance(instruction, CreateTensor):
        return (instruction.id,)
    return (instruction.output,) if isinstance(instruction, Redistribute) else ()
