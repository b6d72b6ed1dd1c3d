"""Flattens the ops of a worker: a bound op, or a program on shards, as calls of ops, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gt.core.meta import TensorMeta
from gt.core.signatures import Arg, Compute, DType, Input, OpProgram, Signature, Whole
from gt.sharding.lowering import create_sharded_output, get_shard_args
from gt.sharding.op_calls import LocalContext, OpCall
from gt.sharding.spec import spec_of
from gt.worker.bound_op_programs import STRIDE_FREE, BoundOpProgram, is_the_op, is_view
from gt.worker.bound_ops import BoundOp, UnavailableOp


class FlattenedCall(NamedTuple):
    """One call among those of a flattened op. Tensors are numbered: first the inputs of the flattened op, then the
    results of its calls. `outputs` are the numbers of the call's new tensors (-1: not used). `strides` as in a
    UnitCall."""

    signature: Signature
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    strides: tuple[tuple[int, ...] | None, ...] = ()


class FlattenedOp(NamedTuple):
    """The calls that an op consists of. `gives` are the numbers of its outputs, in order; the output for a written
    tensor has the number of the written input."""

    calls: tuple[FlattenedCall, ...]
    gives: tuple[int, ...]


class CannotFlatten(Exception):
    """Raised with the reason why an op has no list of calls that could be compiled."""


def flatten_op(bound: BoundOp | UnavailableOp | BoundOpProgram, count: int) -> FlattenedOp:
    """The calls of an op that takes `count` tensors. Raises CannotFlatten if the op cannot be part of a compile
    unit."""
    if isinstance(bound, UnavailableOp):
        raise CannotFlatten("this worker does not have it")
    if isinstance(bound, BoundOpProgram):
        return _ProgramCalls(bound.program, bound.worker).flattened()
    signature = bound.signature
    outputs = tuple(range(count, count + len(signature.outputs)))
    call = FlattenedCall(signature, tuple(range(count)), outputs)
    return FlattenedOp((call,), (*outputs, *signature.writes))


class _ProgramCalls:
    """The calls of a program on one worker. `_numbers` maps the registers of the program to the numbers of tensors."""

    def __init__(self, program: OpProgram, worker: int) -> None:
        self._program = program
        self._worker = worker
        self._numbers = {register: number for number, register in enumerate(program.takes)}
        self._count = len(program.takes)
        self._calls: list[FlattenedCall] = []

    def flattened(self) -> FlattenedOp:
        for step in self._program.steps:
            if isinstance(step, Whole):
                inputs = tuple(self._numbers[register] for register in step.inputs)
                self._calls.append(FlattenedCall(step.signature, inputs, self._new(step.outputs)))
            elif isinstance(step, Compute):
                self._compute(step)
            else:
                raise CannotFlatten(f"it has a step of kind {type(step).__name__}")
        try:
            return FlattenedOp(tuple(self._calls), tuple(self._numbers[register] for register in self._program.gives))
        except KeyError:
            raise CannotFlatten("it gives no tensor on this worker") from None

    def _new(self, registers: Sequence[int]) -> tuple[int, ...]:
        numbers = tuple(range(self._count, self._count + len(registers)))
        self._count += len(registers)
        self._numbers.update(zip(registers, numbers, strict=True))
        return numbers

    def _fresh(self) -> int:
        self._count += 1
        return self._count - 1

    def _compute(self, step: Compute) -> None:
        if step.random:
            raise CannotFlatten("it draws random numbers")
        results = tuple(map(spec_of, step.result_specs))
        call = OpCall(step.op, step.args, step.kwargs, step.inputs_meta, step.outputs_meta, step.positions)
        shard = LocalContext(call, tuple(map(spec_of, step.operand_specs)), results, self._worker)
        local = get_shard_args(shard)
        inputs = [self._numbers[register] for register in step.inputs]
        pairs = zip(step.outputs_meta, results, strict=True)
        expected = [create_sharded_output(meta, spec, self._worker) for meta, spec in pairs]
        if step.in_place is not None and is_the_op(local, call):
            fresh = [register for register, into in zip(step.outputs, step.into, strict=True) if into < 0]
            self._calls.append(FlattenedCall(step.in_place, tuple(inputs), self._new(fresh)))
        elif step.is_view and is_view(local):
            (part,) = local.calls
            signature = _signature(part.op, part.args, part.kwargs, step)
            self._calls.append(FlattenedCall(signature, tuple(inputs[:1]), self._new(step.outputs)))
            return
        else:
            values = inputs[: len(call.inputs)]
            for part in local.calls:
                values += self._part(step, part.op, part.args, part.kwargs, values, part.outputs, part.output_positions)
            made = [values[position] for position in local.results]
            self._results(step, made, expected)
        for register, into in zip(step.outputs, step.into, strict=False):
            if into >= 0:
                self._numbers[register] = self._numbers[into]

    def _part(
        self,
        step: Compute,
        op: str,
        args: Sequence[Arg],
        kwargs: object,
        values: Sequence[int],
        count: int,
        positions: Sequence[int],
    ) -> list[int]:
        """One op of a lowering; returns the numbers of the tensors that it adds."""
        signature = _signature(op, tuple(args), kwargs, step)
        places = list(positions) or list(range(count))
        outputs = [-1] * (max(places, default=-1) + 1)
        made = [self._fresh() for _ in places]
        for place, number in zip(places, made, strict=True):
            outputs[place] = number
        self._calls.append(FlattenedCall(signature, tuple(values), tuple(outputs)))
        return made

    def _results(self, step: Compute, made: Sequence[int], expected: Sequence[TensorMeta]) -> None:
        """Cast results, give them their strides, or copy them into the tensors that the op writes to."""
        intos = step.into or (-1,) * len(made)
        for number, register, into, meta in zip(made, step.outputs, intos, expected, strict=True):
            if step.casts:
                cast = Signature("aten._to_copy.default", (Input(0),), {"dtype": DType(meta.dtype)}, (), (), (), ())
                before, number = number, self._fresh()
                self._calls.append(FlattenedCall(cast, (before,), (number,)))
            if into >= 0:
                copy = Signature("aten.copy_.default", (Input(0), Input(1)), {}, (), (0,), (), ())
                self._calls.append(FlattenedCall(copy, (self._numbers[into], number), ()))
            else:
                self._restride(number, meta)
                self._numbers[register] = number

    def _restride(self, number: int, meta: TensorMeta) -> None:
        """The call that makes a tensor gives it the strides of the whole result's memory format."""
        for position, call in enumerate(self._calls):
            if number in call.outputs:
                strides = tuple(meta.stride if output == number else None for output in call.outputs)
                self._calls[position] = call._replace(strides=strides)


def _signature(op: str, args: tuple[Arg, ...], kwargs: object, step: Compute) -> Signature:
    op = STRIDE_FREE.get(op, op)
    return Signature(op, args, dict(kwargs), (), (), (), (), False, step.default_dtype)  # type: ignore[call-overload]
