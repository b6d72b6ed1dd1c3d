"""What a worker does for an op on tensors that are cut: the steps of a program, made for its place in the mesh."""

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
    Program,
    Refuse,
    Signature,
    Step,
    ViewStep,
    Whole,
    WriteBack,
)
from gt.sharding.lowering import create_sharded_output, get_shard_args
from gt.sharding.op_calls import LocalCall, LocalContext, LocalProgram, OpCall
from gt.sharding.spec import ShardingSpec, local_box, spec_of
from gt.worker.engines.counter_rng import Region
from gt.worker.engines.engine import Engine, Value
from gt.worker.exchange.interface import Swapping
from gt.worker.failed_value import Fail, FailedValue
from gt.worker.kernels import Kernel
from gt.worker.moves import Mover

Registers: TypeAlias = dict[int, Any]

# Their strided forms need strides that a shard may not have.
_STRIDE_FREE = {"aten.view.default": "aten.reshape.default", "aten._unsafe_view.default": "aten.reshape.default"}


class ProgramKernel:
    """A program bound to an engine and a worker. `run` never raises: where a step fails, `FailedValue` goes on in place
    of its results, so that the workers of an exchange stay in step. `swaps` are the exchanges it comes to, without what
    is sent; None where it may come to several. Unlike a kernel it is never a bare op (`direct`)."""

    direct = None

    def __init__(self, engine: Engine, worker: int, op: str, program: Program) -> None:
        self.op = op
        self.program = program
        self._engine = engine
        self._worker = worker
        self._views: dict[int, Callable[[Value], Value]] = {}
        self._steps = [self._prepare(number, step) for number, step in enumerate(program.steps)]
        moves = [step.mover.swaps() for step in self._steps if isinstance(step, _Moving)]
        self.swaps = moves[0] if len(moves) == 1 else None if moves else []

    def run(
        self,
        inputs: Sequence[Value | FailedValue | None],
        numbers: tuple[Number, ...],
        fail: Fail,
        held_back: FailedValue | None = None,
    ) -> Swapping:
        """Gives the results, and what is left of the tensors that should have been written, where nothing was: by the
        registers that they are given in. `held_back`: why tensors are moved, but nothing is computed."""
        registers: Registers = dict(zip(self.program.takes, inputs, strict=True))
        targets = [self.program.takes[place] for place in self.program.consumes]
        untouched: Registers = {register: registers[register] for register in targets}
        is_written = False
        for step in self._steps:
            if isinstance(step, _Moving):
                registers[step.output] = yield from step.mover.run(registers.get(step.input), fail)
                if step.input in targets:
                    untouched[step.output] = registers[step.output]
            elif held_back is None:
                is_written |= step(registers, numbers, fail)
            elif isinstance(step, _Computing):
                registers.update(dict.fromkeys(step.outputs, held_back))
        if held_back is not None:
            registers.update(dict.fromkeys(self.program.gives, held_back))
        return [registers.get(register) for register in self.program.gives], {} if is_written else untouched

    def with_former(self, results: list[Any], untouched: Registers, command: RunOp) -> list[Any]:
        """The results; what should have been written and was not touched has the value before."""
        first = len(results) - len(self.program.consumes)
        for number, place in enumerate(self.program.consumes, first):
            result, value = results[number], untouched.get(self.program.gives[number])
            if isinstance(result, FailedValue) and value is not None:
                results[number] = result.instead_of(value, command.inputs[place], command.outputs[number])
        return results

    def _prepare(self, number: int, step: Step) -> Any:
        if isinstance(step, Move):
            return _Moving(
                step, Mover(self._engine, self._worker, step.meta, spec_of(step.source), spec_of(step.target))
            )
        if isinstance(step, Whole):
            written = [step.inputs[place] for place in step.signature.writes]
            run = _made(lambda: Kernel(self._engine, step.signature).call)
            return _Computing(step.signature.op, step.inputs, step.outputs, run, written, writes=bool(written))
        if isinstance(step, WriteBack):
            return self._settling(step)
        if isinstance(step, Refuse):
            return _Computing(step.op, (), step.outputs, _raising(RuntimeError(step.reason)), writes=False)
        into = [register for register in step.into if register >= 0]
        run = _made(lambda: self._part(number, step))
        return _Computing(step.op, (*step.inputs, *into), step.outputs, run, writes=bool(into))

    def _settling(self, step: WriteBack) -> _Action:
        def settle(registers: Registers, numbers: tuple[Number, ...], fail: Fail) -> bool:
            base, view = registers[step.base], registers[step.view]
            if isinstance(view, FailedValue):
                registers[step.base] = view
                return False
            if not isinstance(base, FailedValue) and self._engine.nbytes(view) and not self._engine.aliases(view, base):
                self._engine.write_through(base, self._composed(step.steps), view)
            return True

        return settle

    def _composed(self, steps: Sequence[tuple[int, int]]) -> Callable[[Value], Value]:
        def view(value: Value) -> Value:
            for number, pick in steps:
                made = self._views[number](value)
                value = made[pick] if isinstance(made, list | tuple) else made
            return value

        return view

    # Ops on shards

    def _part(self, number: int, step: Compute) -> _Run:
        """This worker's part of an op."""
        operands = tuple(map(spec_of, step.operands))
        results = tuple(map(spec_of, step.results))
        call = OpCall(step.op, step.args, step.kwargs, step.inputs_meta, step.outputs_meta, step.positions)
        shard = LocalContext(call, operands, results, self._worker)
        region = self._region(step, shard) if step.random else None
        local = get_shard_args(shard)
        if step.in_place is not None and _is_the_op(local, call) and not step.random:
            return self._checked(step, results, self._in_place(step.in_place, step))
        if step.is_view and _is_view(local):
            return self._checked(step, results, self._view(number, local.calls[0]))
        return self._checked(step, results, self._local(step, call, local, region))

    def _checked(self, step: Compute, results: Sequence[ShardingSpec], run: _Run) -> _Run:
        """The first time, what comes out is compared with what the plan says that this worker holds of the result.
        Where its strides differ, they are made those of the result's memory format, then and at all later times."""
        pairs = zip(step.outputs_meta, results, strict=True)
        expected = [create_sharded_output(meta, spec, self._worker) for meta, spec in pairs]
        cast = self._engine.resolve("aten._to_copy.default") if step.casts else None
        dtypes = [self._engine.literal(DType(meta.dtype)) for meta in step.outputs_meta]
        fresh = [not step.is_view and not (step.into and step.into[place] >= 0) for place in range(len(expected))]
        is_checked = restrides = False

        def checked(values: list[Value], numbers: tuple[Number, ...]) -> list[Any]:
            nonlocal is_checked, restrides
            made = run(values, numbers)
            if cast is not None:
                made = [cast(result, dtype=dtype) for result, dtype in zip(made, dtypes, strict=True)]
            if not is_checked:
                restrides = self._check(step.op, made, expected, fresh)
                is_checked = not self._engine.checks
            if not restrides:
                return made
            return [
                self._engine.with_strides(result, told.stride) if is_fresh else result
                for result, told, is_fresh in zip(made, expected, fresh, strict=True)
            ]

        return checked

    def _check(self, op: str, made: Sequence[Value], expected: Sequence[TensorMeta], fresh: Sequence[bool]) -> bool:
        """Raises where an op gave another shape or dtype than it should; gives whether strides differ of what is
        `fresh`: neither a view nor something that was written to."""
        differ = False
        for result, told, is_fresh in zip(made, expected, fresh, strict=True):
            found = self._engine.meta(result)
            if (found.shape, found.dtype) != (told.shape, told.dtype):
                raise RuntimeError(f"{op} gave {found} on this worker, and its part of the result is {told}")
            differ |= is_fresh and found.stride != told.stride
        return differ

    def _local(self, step: Compute, call: OpCall, local: LocalProgram, region: Region | None) -> _Run:
        """The ops that a lowering has written."""
        kernels = [self._kernel(part, step, region) for part in local.calls]
        count = len(call.inputs)
        copy = self._engine.resolve("aten.copy_.default") if any(r >= 0 for r in step.into) else None

        def run(values: list[Value], numbers: tuple[Number, ...]) -> list[Any]:
            registers = values[:count]
            for kernel, part in zip(kernels, local.calls, strict=True):
                given = kernel.call(registers, numbers)
                asked = [given[place] for place in part.output_positions] if part.output_positions else given
                made = [value for value in asked if value is not None]
                if len(made) != part.outputs:
                    raise RuntimeError(f"{part.op} gave {len(made)} tensors where {part.outputs} were expected")
                registers += made
            found = [registers[place] for place in local.results]
            targets = iter(values[len(step.inputs) :])
            for place, register in enumerate(step.into):
                if register >= 0 and copy is not None:
                    found[place] = copy(next(targets), found[place])
            return found

        return run

    def _in_place(self, signature: Signature, step: Compute) -> _Run:
        kernel = Kernel(self._engine, signature)

        def run(values: list[Value], numbers: tuple[Number, ...]) -> list[Any]:
            fresh = iter(kernel.call(values[: len(step.inputs)], numbers))
            targets = iter(values[len(step.inputs) :])
            return [next(targets) if register >= 0 else next(fresh) for register in step.into]

        return run

    def _view(self, number: int, local: LocalCall) -> _Run:
        view = self._engine.view_step(ViewStep(local.op, local.args[1:], dict(local.kwargs)))
        self._views[number] = view
        return lambda values, numbers: list(made) if isinstance(made := view(values[0]), list | tuple) else [made]

    def _kernel(self, part: LocalCall, step: Compute, region: Region | None) -> Kernel:
        """One local op. Its tensors are all registers so far, so it has no inputs of its own to check."""
        random = step.random and part.op == step.op
        op = _STRIDE_FREE.get(part.op, part.op)
        signature = Signature(op, part.args, dict(part.kwargs), (), (), (), (), random, step.floating)
        return Kernel(self._engine, signature, region if random else None)

    def _region(self, step: Compute, shard: LocalContext) -> Region:
        """Where in the whole tensor the random numbers of this worker are."""
        shape = step.outputs_meta[0].shape
        return Region(shape, local_box(shard.results[0], shape, self._worker))


_Run: TypeAlias = Callable[[list[Value], tuple[Number, ...]], list[Any]]
_Action: TypeAlias = Callable[[Registers, tuple[Number, ...], Fail], bool]
"""A step on registers; gives whether it may have written to a tensor that was there before."""


def _is_view(local: LocalProgram) -> bool:
    """Whether what a worker does for a view is one view op of what it has. It may have nothing, and make nothing."""
    if len(local.calls) != 1:
        return False
    (call,) = local.calls
    return call.args[:1] == (Input(0),) and call.op != "aten.as_strided.default"


def _is_the_op(local: LocalProgram, call: OpCall) -> bool:
    """Whether a worker's part is nothing but the op itself, with the arguments that it has."""
    if len(local.calls) != 1 or local.results != tuple(range(len(call.inputs), len(call.inputs) + len(call.outputs))):
        return False
    return local.calls[0][:3] == (call.op, call.args, dict(call.kwargs))


def _made(make: Callable[[], _Run]) -> _Run:
    """An op that cannot be made here fails when it is run, so that the other steps, and the other workers, go on."""
    try:
        return make()
    except Exception as error:
        return _raising(error)


def _raising(error: Exception) -> _Run:
    def run(values: list[Value], numbers: tuple[Number, ...]) -> list[Any]:
        raise error

    return run


class _Moving:
    def __init__(self, step: Move, mover: Mover) -> None:
        self.input = step.input
        self.output = step.output
        self.mover = mover


class _Computing:
    """Runs an op on registers. What a failing register goes into is failing too, also where it is `written`. `writes`:
    it changes tensors that were there before."""

    def __init__(
        self,
        op: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        run: _Run,
        written: Sequence[int] = (),
        *,
        writes: bool,
    ) -> None:
        self._op = op
        self._inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self._run = run
        self._written = tuple(written)
        self._writes = writes

    def __call__(self, registers: Registers, numbers: tuple[Number, ...], fail: Fail) -> bool:
        values = [registers[register] for register in self._inputs]
        failing = next((value for value in values if isinstance(value, FailedValue)), None)
        is_run = failing is None
        if failing is None:
            try:
                results = self._run(values, numbers)
            except Exception as error:
                failing = fail(self._op, values, error)
        if failing is not None:
            registers.update(dict.fromkeys((*self.outputs, *self._written), failing.passed_on()))
        else:
            registers.update(zip(self.outputs, results, strict=False))
        return is_run and self._writes
