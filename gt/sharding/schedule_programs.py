"""Programs of schedules: the steps of an op that runs in rounds on windows of its operands."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gt.core.meta import ITEM_BYTES, TensorMeta
from gt.core.signatures import DType, Input
from gt.sharding.constraints import Target
from gt.sharding.cost import memory_bytes
from gt.sharding.dtypes import accumulation_dtype
from gt.sharding.lowering import NoRule, infer_output_sharding
from gt.sharding.op_calls import OpCall
from gt.sharding.rules import rule_of
from gt.sharding.schedules import (
    Algorithm,
    Schedule,
    ScheduleProblem,
    find_lean_schedule,
    find_schedule,
)
from gt.sharding.spec import ShardingSpec
from gt.sharding.strategies import OpOperand, OpResult, OpStrategy

if TYPE_CHECKING:
    from gt.sharding.program_builder import ProgramBuilder

LARGEST_COPY = 1 << 30
"""Bytes of an operand that a worker may hold for one op; an op with algorithms takes larger ones in rounds."""


def problem_of(
    builder: ProgramBuilder, call: OpCall, registers: Sequence[int], targets: Sequence[Target]
) -> ScheduleProblem:
    """The problem of finding a schedule for a call on registers of a program."""
    rule = rule_of(call)
    if rule is None:
        raise NoRule(call.op)
    own = [builder.registers[register] for register in registers]
    operands = [OpOperand(meta.shape, ITEM_BYTES[meta.dtype], spec, copies) for meta, spec, copies in own]
    (meta,) = call.outputs
    result = OpResult(meta.shape, ITEM_BYTES[meta.dtype], targets[0] if targets else None)
    panel = builder.algorithm.panel if builder.algorithm is not None else 0
    return ScheduleProblem(rule, tuple(operands), result, builder.mesh, panel)


def choose_schedule(
    builder: ProgramBuilder,
    algorithms: Mapping[str, Algorithm],
    call: OpCall,
    registers: Sequence[int],
    targets: Sequence[Target],
) -> Schedule:
    """The schedule of an op that has algorithms: by the one that the user named; or else the cheapest strategy of its
    rule, unless that copies so much of an operand to a worker that rounds with the same bytes are better."""
    if builder.algorithm is not None and builder.algorithm.name:
        return find_schedule(builder.algorithm.name, algorithms, problem_of(builder, call, registers, targets))
    own = [builder.registers[register] for register in registers]
    specs, copies = [each.spec for each in own], [each.copies for each in own]
    choice = infer_output_sharding(call, specs, builder.mesh, targets, copies, builder.reduces_first)
    lean = None
    if choice.bytes and _copies_much(builder, registers, choice.strategy):
        lean = find_lean_schedule(algorithms, problem_of(builder, call, registers, targets), choice.bytes)
    return lean if lean is not None else Schedule((choice.strategy.operands,), choice.strategy.results[0])


def _copies_much(builder: ProgramBuilder, registers: Sequence[int], strategy: OpStrategy) -> bool:
    """Whether a strategy copies more of an operand to a worker than it should hold."""
    for register, needed in zip(registers, strategy.operands, strict=True):
        meta, own, copies = builder.registers[register]
        is_copied = needed is not own and needed not in copies
        if is_copied and memory_bytes(needed, meta.shape, ITEM_BYTES[meta.dtype]) > LARGEST_COPY:
            return True
    return False


def sum_rounds(builder: ProgramBuilder, call: OpCall, registers: Sequence[int], schedule: Schedule) -> int:
    """Emit the rounds of a schedule; returns the register of their sum, which is that of 16-bit floats in float32."""
    if len(schedule.rounds) == 1:
        return builder.compute(call, registers, OpStrategy(schedule.rounds[0], (schedule.result,), {}))[0]
    starts = [schedule.start_of(position) for position in range(len(registers))]
    held = [
        builder.move(register, spec, hoists=_is_elsewhere(builder, register)) if spec is not None else register
        for register, spec in zip(registers, starts, strict=True)
    ]
    (meta,) = call.outputs
    total = -1
    windows = _move_windows(builder, held, schedule.rounds[0])
    for layouts, following in itertools.zip_longest(schedule.rounds, schedule.rounds[1:]):
        current = windows
        if following is not None:  # before the product: workers whose exchanges overlap compute while these move
            travelled = zip(held, windows, strict=True)
            held = [new if schedule.is_travelling(at) else own for at, (own, new) in enumerate(travelled)]
            windows = _move_windows(builder, held, following)
        (product,) = builder.compute(call, current, OpStrategy(layouts, (schedule.result,), {}))
        addend = _cast(builder, product, accumulation_dtype(meta.dtype))
        total = addend if total < 0 else _add(builder, total, addend)
    return _cast(builder, total, meta.dtype)


def _move_windows(builder: ProgramBuilder, held: Sequence[int], layouts: Sequence[ShardingSpec]) -> list[int]:
    return [builder.move(register, spec, hoists=False) for register, spec in zip(held, layouts, strict=True)]


def _is_elsewhere(builder: ProgramBuilder, register: int) -> bool:
    """Whether a register is on workers that do not run the program."""
    return not set(builder.mesh.workers).issuperset(builder.spec(register).mesh.workers)


def _cast(builder: ProgramBuilder, register: int, dtype: str) -> int:
    own, spec, _ = builder.registers[register]
    if own.dtype == dtype:
        return register
    meta = TensorMeta(own.shape, own.stride, own.offset, dtype)
    call = OpCall("aten._to_copy.default", (Input(0),), {"dtype": DType(dtype)}, (own,), (meta,))
    return builder.compute(call, (register,), OpStrategy((spec,), (spec,), {}))[0]


def _add(builder: ProgramBuilder, one: int, other: int) -> int:
    meta, spec, _ = builder.registers[one]
    call = OpCall("aten.add.Tensor", (Input(0), Input(1)), {}, (meta, meta), (meta,))
    return builder.compute(call, (one, other), OpStrategy((spec, spec), (spec,), {}))[0]
