"""Programs: an op on sharded tensors as steps that compute and move, prepared for one worker of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from gt.core.messages import RunOp
from gt.core.meta import TensorMeta
from gt.core.signatures import (
    Compute,
    DType,
    Input,
    Move,
    Number,
    OpProgram,
    OpProgramStep,
    Refuse,
    Signature,
    ViewStep,
    Whole,
    WriteBack,
)
from gt.sharding.lowering import create_sharded_output, get_shard_args
from gt.sharding.op_calls import LocalCall, LocalContext, LocalProgram, OpCall
from gt.sharding.spec import ShardingSpec, local_box, spec_of
from gt.worker.bound_ops import BoundOp
from gt.worker.direct_calls import DirectCall
from gt.worker.engines.counter_rng import Region
from gt.worker.engines.engine import Engine, Value
from gt.worker.exchange.interface import Exchanging
from gt.worker.failed_value import Fail, FailedValue
from gt.worker.memory_guard import LARGE_BYTES, MemoryGuard
from gt.worker.moves import BegunMoves, Mover, run_moves

Registers: TypeAlias = dict[int, Any]

# The view ops need strides that a shard may not have.
STRIDE_FREE = {"aten.view.default": "aten.reshape.default", "aten._unsafe_view.default": "aten.reshape.default"}


class BoundOpProgram:
    """A program bound to an engine and a worker. `run` never raises: where a step fails, its results are `FailedValue`,
    so that all workers do the same exchanges.

    `exchanges` has this worker's local step of the exchange of a run, or is empty if there is no exchange; it is None
    if there are several. `collective` is the kind of the one collective that the program consists of, or None.
    `targets` are this worker's parts of inputs that need no value, as they are overwritten, by position. `direct` and
    `writes` as for a `BoundOp`: a program of one call on this worker's shards is as good as the op."""

    def __init__(
        self, engine: Engine, worker: int, op: str, program: OpProgram, guard: MemoryGuard | None = None
    ) -> None:
        self.op = op
        self._guard = guard
        self.program = program
        self._engine = engine
        self.worker = worker
        self._views: dict[int, Callable[[Value], Value]] = {}
        self.writes = program.consumes
        self.direct: DirectCall | None = None
        prepared = [self._prepare(number, step) for number, step in enumerate(program.steps)]
        self._steps = _with_early_moves(_side_by_side(prepared))
        self._dead = _dead_after(self._steps, program)
        self.targets = self._targets() if program.writes_all else {}
        moves = [step for step in self._steps if isinstance(step, _Moves)]
        all_steps = [local for step in moves for mover in step.movers for local in mover.steps]
        local_steps = [local for local in all_steps if local and local.members]
        self.exchanges = local_steps if len(local_steps) < 2 else None
        self.is_local = not moves
        is_one = self._steps == moves and len({local.members for local in local_steps}) == 1
        kinds = {mover.kind for step in moves for mover in step.movers} if is_one else set()
        self.collective = kinds.pop() if len(kinds) == 1 else None

    def run(
        self,
        inputs: Sequence[Value | FailedValue | None],
        scalars: tuple[Number, ...],
        fail: Fail,
        skip_reason: FailedValue | None = None,
    ) -> Exchanging:
        """Returns the results, and the values of tensors that were to be written where nothing was written, by the
        registers of their results. With a `skip_reason` tensors are moved, and nothing is computed."""
        registers: Registers = dict(zip(self.program.takes, inputs, strict=True))
        targets = [self.program.takes[position] for position in self.program.consumes]
        untouched: Registers = {register: registers[register] for register in targets}
        is_written = False
        begun: tuple[_Moves, BegunMoves] | None = None
        for step, dead in zip(self._steps, self._dead, strict=True):
            if begun is not None and (isinstance(step, _Moves) or not set(step.inputs).isdisjoint(begun[0].outputs)):
                registers.update(zip(begun[0].outputs, begun[1].finish(), strict=True))
                begun = None
            if isinstance(step, _Moves) and step.is_early:
                begun = step, BegunMoves(step.movers, self._with_room(step, registers, fail), fail)
                yield from begun[1].begin()
            elif isinstance(step, _Moves):
                moved = yield from run_moves(step.movers, self._with_room(step, registers, fail), fail)
                registers.update(zip(step.outputs, moved, strict=True))
                untouched.update(
                    (output, registers[output])
                    for input, output in zip(step.inputs, step.outputs, strict=True)
                    if input in targets
                )
            elif skip_reason is None:
                is_written |= step(registers, scalars, fail)
            elif isinstance(step, _ComputeStep):
                registers.update(dict.fromkeys(step.outputs, skip_reason))
            for register in dead:
                registers.pop(register, None)
        if skip_reason is not None:
            registers.update(dict.fromkeys(self.program.gives, skip_reason))
        return [registers.get(register) for register in self.program.gives], {} if is_written else untouched

    def _with_room(self, step: _Moves, registers: Registers, fail: Fail) -> list[Any]:
        """The values to move. Where this worker has no memory for what it would get, it sends a failure instead."""
        values = [registers.get(register) for register in step.inputs]
        for position, mover in enumerate(step.movers):
            value = values[position]
            if self._guard is None or mover.nbytes < LARGE_BYTES or value is None or isinstance(value, FailedValue):
                continue
            try:
                self._guard.reserve(mover.nbytes)
            except Exception as error:
                values[position] = fail(self.op, [value], error)
        return values

    def with_previous(self, results: list[Any], untouched: Registers, command: RunOp) -> list[Any]:
        """The results of `run`, where failed ones of untouched tensors keep the previous values."""
        first = len(results) - len(self.program.consumes)
        for number, position in enumerate(self.program.consumes, first):
            result, value = results[number], untouched.get(self.program.gives[number])
            if isinstance(result, FailedValue) and value is not None:
                results[number] = result.in_place_of(value, command.inputs[position], command.outputs[number])
        return results

    def _targets(self) -> dict[int, TensorMeta]:
        found: dict[int, TensorMeta] = {}
        for position in self.program.consumes:
            register = self.program.takes[position]
            for step in self.program.steps:
                if isinstance(step, Move) and step.input == register:
                    found[position] = create_sharded_output(step.meta, spec_of(step.source), self.worker)
                elif isinstance(step, Compute) and register in step.inputs[: len(step.operand_specs)]:
                    place = step.inputs.index(register)
                    meta, spec = step.inputs_meta[place], spec_of(step.operand_specs[place])
                    found[position] = create_sharded_output(meta, spec, self.worker)
                elif isinstance(step, Whole) and register in step.inputs:
                    written = step.signature.writes.index(step.inputs.index(register))
                    found[position] = step.signature.fully_written[written]
                if position in found:
                    break
        return found if len(found) == len(self.program.consumes) else {}

    def _prepare(self, number: int, step: OpProgramStep) -> Any:
        if isinstance(step, Move):
            mover = Mover(self._engine, self.worker, step.meta, spec_of(step.source), spec_of(step.target))
            return _Moves([step.input], [step.output], [mover])
        if isinstance(step, Whole):
            written = [step.inputs[position] for position in step.signature.writes]
            run = _or_raising(lambda: BoundOp(self._engine, step.signature, guard=self._guard).call)
            return _ComputeStep(step.signature.op, step.inputs, step.outputs, run, written, writes=bool(written))
        if isinstance(step, WriteBack):
            return self._write_back(step)
        if isinstance(step, Refuse):
            return _ComputeStep(step.op, (), step.outputs, _raising(RuntimeError(step.reason)), writes=False)
        into = [register for register in step.into if register >= 0]
        run = _or_raising(lambda: self._local_op(number, step))
        return _ComputeStep(step.op, (*step.inputs, *into), step.outputs, run, writes=bool(into))

    def _write_back(self, step: WriteBack) -> _StepAction:
        def write_back(registers: Registers, scalars: tuple[Number, ...], fail: Fail) -> bool:
            base, view = registers[step.base], registers[step.view]
            if isinstance(view, FailedValue):
                registers[step.base] = view
                return False
            if isinstance(base, FailedValue):
                return True
            try:
                if self._engine.nbytes(view) and not self._engine.aliases(view, base):
                    self._engine.write_through(base, self._composed(step.steps), view)
            except Exception as error:
                registers[step.base] = fail(self.op, [base], error)
            return True

        return write_back

    def _composed(self, steps: Sequence[tuple[int, int]]) -> Callable[[Value], Value]:
        def view(value: Value) -> Value:
            for number, pick in steps:
                made = self._views[number](value)
                value = made[pick] if isinstance(made, list | tuple) else made
            return value

        return view

    # Ops on shards

    def _local_op(self, number: int, step: Compute) -> _LocalFunction:
        """This worker's part of an op."""
        operands = tuple(map(spec_of, step.operand_specs))
        results = tuple(map(spec_of, step.result_specs))
        call = OpCall(step.op, step.args, step.kwargs, step.inputs_meta, step.outputs_meta, step.positions)
        shard = LocalContext(call, operands, results, self.worker)
        region = self._region(step, shard) if step.random else None
        local = get_shard_args(shard)
        if step.in_place is not None and is_the_op(local, call) and not step.random:
            bound = BoundOp(self._engine, step.in_place)
            direct = bound if self._is_single(step) and len(step.into) == 1 else None
            return self._checked(step, results, self._in_place(bound, step), direct)
        if step.is_view and is_view(local):
            return self._checked(step, results, self._view(number, local.calls[0]))
        ops = [self._bind_call(local_call, step, region) for local_call in local.calls]
        is_one_call = len(ops) == 1 and local.results == (len(call.inputs),) and not step.into
        direct = ops[0] if is_one_call and self._is_single(step) else None
        return self._checked(step, results, self._lowered(step, call, local, ops), direct)

    def _is_single(self, step: Compute) -> bool:
        """Whether a step is the whole program, takes the command's inputs in order and gives one tensor."""
        program = self.program
        is_plain = not (step.random or step.casts or step.is_view)
        gives = program.gives == step.outputs and len(step.outputs) == 1
        return is_plain and gives and len(program.steps) == 1 and program.takes == step.inputs

    def _checked(
        self, step: Compute, results: Sequence[ShardingSpec], run: _LocalFunction, direct: BoundOp | None = None
    ) -> _LocalFunction:
        """The first results are compared with the parts that the plan expects of this worker. Where their strides
        differ, these and all later results are copied into the memory format of the whole result; otherwise, if the
        program is one call, of the op `direct`, that is called directly from then on."""
        pairs = zip(step.outputs_meta, results, strict=True)
        expected = [create_sharded_output(meta, spec, self.worker) for meta, spec in pairs]
        cast = self._engine.resolve("aten._to_copy.default") if step.casts else None
        dtypes = [self._engine.literal(DType(meta.dtype)) for meta in step.outputs_meta]
        fresh = [not step.is_view and not (step.into and step.into[position] >= 0) for position in range(len(expected))]
        is_checked = restrides = False
        nbytes = sum(meta.nbytes for meta, is_fresh in zip(expected, fresh, strict=True) if is_fresh)
        guard = self._guard if nbytes >= LARGE_BYTES else None

        def checked(values: list[Value], scalars: tuple[Number, ...]) -> list[Any]:
            nonlocal is_checked, restrides
            if guard is not None:
                guard.reserve(nbytes)
            results = run(values, scalars)
            if cast is not None:
                results = [cast(result, dtype=dtype) for result, dtype in zip(results, dtypes, strict=True)]
            if not is_checked:
                restrides = self._check(step.op, results, expected, fresh)
                is_checked = not self._engine.checks_geometry
                if direct is not None and direct.gives_tensor and not restrides and self.direct is None:
                    called = direct.make_direct(values[: len(step.inputs)], scalars)
                    self.direct = guard.reserving(nbytes, called) if guard is not None and called else called
            if not restrides:
                return results
            return [
                self._engine.with_strides(result, meta.stride) if is_fresh else result
                for result, meta, is_fresh in zip(results, expected, fresh, strict=True)
            ]

        return checked

    def _check(self, op: str, results: Sequence[Value], expected: Sequence[TensorMeta], fresh: Sequence[bool]) -> bool:
        """Raises where the shape or dtype of a result is not the expected one. Returns whether strides differ of a
        `fresh` result: one that is neither a view nor a tensor that was written to. An empty part of a split counts as
        one: it would keep the memory of the whole."""
        differ = False
        for result, meta, is_fresh in zip(results, expected, fresh, strict=True):
            found = self._engine.meta(result)
            if (found.shape, found.dtype) != (meta.shape, meta.dtype):
                raise RuntimeError(f"{op} gave {found} on this worker, and its part of the result is {meta}")
            differ |= is_fresh and (
                found.stride != meta.stride or (not meta.nbytes and bool(self._engine.storage(result)[1]))
            )
        return differ

    def _lowered(self, step: Compute, call: OpCall, local: LocalProgram, ops: Sequence[BoundOp]) -> _LocalFunction:
        """The ops on shards that the lowering of an op consists of."""
        count = len(call.inputs)
        copy = self._engine.resolve("aten.copy_.default") if any(r >= 0 for r in step.into) else None

        def run(values: list[Value], scalars: tuple[Number, ...]) -> list[Any]:
            registers = values[:count]
            for bound, local_call in zip(ops, local.calls, strict=True):
                outputs = bound.call(registers, scalars)
                used = [outputs[p] for p in local_call.output_positions] if local_call.output_positions else outputs
                present = [value for value in used if value is not None]
                if len(present) != local_call.outputs:
                    expected = local_call.outputs
                    raise RuntimeError(f"{local_call.op} gave {len(present)} tensors where {expected} were expected")
                registers += present
            results = [registers[position] for position in local.results]
            targets = iter(values[len(step.inputs) :])
            for position, register in enumerate(step.into):
                if register >= 0 and copy is not None:
                    results[position] = copy(next(targets), results[position])
            return results

        return run

    def _in_place(self, bound: BoundOp, step: Compute) -> _LocalFunction:
        def run(values: list[Value], scalars: tuple[Number, ...]) -> list[Any]:
            fresh = iter(bound.call(values[: len(step.inputs)], scalars))
            targets = iter(values[len(step.inputs) :])
            return [next(targets) if register >= 0 else next(fresh) for register in step.into]

        return run

    def _view(self, number: int, local: LocalCall) -> _LocalFunction:
        view = self._engine.make_view(ViewStep(local.op, local.args[1:], dict(local.kwargs)))
        self._views[number] = view
        return lambda values, scalars: list(views) if isinstance(views := view(values[0]), list | tuple) else [views]

    def _bind_call(self, call: LocalCall, step: Compute, region: Region | None) -> BoundOp:
        """One op of a lowering. Its inputs are all registers so far, so its signature has no view paths."""
        random = step.random and call.op == step.op
        op = STRIDE_FREE.get(call.op, call.op)
        signature = Signature(op, call.args, dict(call.kwargs), (), (), (), (), random, step.default_dtype)
        return BoundOp(self._engine, signature, region if random else None)

    def _region(self, step: Compute, shard: LocalContext) -> Region:
        """The part of the whole result for which this worker draws random numbers."""
        shape = step.outputs_meta[0].shape
        return Region(shape, local_box(shard.results[0], shape, self.worker))


_LocalFunction: TypeAlias = Callable[[list[Value], tuple[Number, ...]], list[Any]]
_StepAction: TypeAlias = Callable[[Registers, tuple[Number, ...], Fail], bool]
"""A step on registers; returns whether it may have written to a tensor that existed before."""


def is_view(local: LocalProgram) -> bool:
    """Whether the lowering of a view op is one view op of this worker's shard."""
    if len(local.calls) != 1:
        return False
    (call,) = local.calls
    return call.args[:1] == (Input(0),) and call.op != "aten.as_strided.default"


def is_the_op(local: LocalProgram, call: OpCall) -> bool:
    """Whether the lowering of an op is the op itself with its own arguments."""
    if len(local.calls) != 1 or local.results != tuple(range(len(call.inputs), len(call.inputs) + len(call.outputs))):
        return False
    return local.calls[0][:3] == (call.op, call.args, dict(call.kwargs))


def _or_raising(make: Callable[[], _LocalFunction]) -> _LocalFunction:
    """An op that cannot be prepared raises when it is run, so that the other steps and the other workers go on."""
    try:
        return make()
    except Exception as error:
        return _raising(error)


def _raising(error: Exception) -> _LocalFunction:
    def run(values: list[Value], scalars: tuple[Number, ...]) -> list[Any]:
        raise error

    return run


class _Moves:
    """Moves that do not depend on each other. An early one begins before other steps, which do not need its outputs."""

    def __init__(self, inputs: list[int], outputs: list[int], movers: list[Mover]) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.movers = movers
        self.is_early = False


def _side_by_side(steps: Sequence[Any]) -> list[Any]:
    """The steps of a program, with consecutive moves joined where none needs the result of another."""
    joined: list[Any] = []
    for step in steps:
        last = joined[-1] if joined else None
        if isinstance(step, _Moves) and isinstance(last, _Moves) and step.inputs[0] not in last.outputs:
            joined[-1] = _Moves(last.inputs + step.inputs, last.outputs + step.outputs, last.movers + step.movers)
        else:
            joined.append(step)
    return joined


def _with_early_moves(steps: Sequence[Any]) -> list[Any]:
    """The steps of a program in which moves begin early whose outputs the next step does not need, but a later one.
    Those that were joined with moves for the next step follow them, on their own. Only moves of one step each begin
    early, and only in programs that write to no tensor."""
    if not all(isinstance(step, _Moves) or (isinstance(step, _ComputeStep) and not step.writes) for step in steps):
        return list(steps)
    found: list[Any] = []
    for number, step in enumerate(steps):
        following = steps[number + 1] if number + 1 < len(steps) else None
        if isinstance(step, _Moves) and isinstance(following, _ComputeStep):
            used_later = {register for later in steps[number + 2 :] for register in later.inputs}
            found += _split_early(step, set(following.inputs), used_later)
        else:
            found.append(step)
    return found


def _split_early(moves: _Moves, needed: set[int], used_later: set[int]) -> list[_Moves]:
    """Moves for the next step, which needs some outputs, and then those that begin early."""
    each = list(zip(moves.inputs, moves.outputs, moves.movers, strict=True))
    early = [move for move in each if move[1] not in needed and move[1] in used_later and len(move[2].steps) <= 1]
    groups = [[move for move in each if move not in early], early]
    split = [_Moves(*map(list, zip(*group, strict=True))) for group in groups if group]
    if early:
        split[-1].is_early = True
    return split


def _dead_after(steps: Sequence[Any], program: OpProgram) -> list[tuple[int, ...]]:
    """For each step, the registers that no later step reads and the program does not give: their memory is freed. None
    if some step writes a view back, which may read any register."""
    if not all(isinstance(step, _Moves | _ComputeStep) for step in steps):
        return [()] * len(steps)
    kept = {*program.gives, *[program.takes[position] for position in program.consumes]}
    dead: list[tuple[int, ...]] = []
    for step in reversed(steps):
        last = {*step.inputs, *step.outputs} - kept
        kept |= last
        dead.append(tuple(last))
    return dead[::-1]


class _ComputeStep:
    """Runs an op on registers. Where an input has failed, so have the outputs and the `written` registers. `writes`
    says whether the op changes tensors that existed before."""

    def __init__(
        self,
        op: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        run: _LocalFunction,
        written: Sequence[int] = (),
        *,
        writes: bool,
    ) -> None:
        self._op = op
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self._run = run
        self._written = tuple(written)
        self.writes = writes

    def __call__(self, registers: Registers, scalars: tuple[Number, ...], fail: Fail) -> bool:
        values = [registers[register] for register in self.inputs]
        failed = next((value for value in values if isinstance(value, FailedValue)), None)
        has_begun = failed is None
        if failed is None:
            try:
                results = self._run(values, scalars)
            except Exception as error:
                failed = fail(self._op, values, error)
        if failed is not None:
            registers.update(dict.fromkeys((*self.outputs, *self._written), failed.for_dependents()))
        else:
            registers.update(zip(self.outputs, results, strict=False))
        return has_begun and self.writes
