"""Removal of unused steps from a worker program, by the registers that each step reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.signatures import Compute, Move, OpProgramStep, Refuse, Whole, WriteBack


def drop_unused(steps: Sequence[OpProgramStep], gives: Sequence[int]) -> list[OpProgramStep]:
    """The steps that write to a tensor, or whose results are used: by another step or as a result of the program."""
    if any(isinstance(step, WriteBack) for step in steps):
        return list(steps)  # a WriteBack names steps by number, so none may be dropped
    used = set(gives)
    kept: list[OpProgramStep] = []
    for step in reversed(steps):
        if _has_side_effect(step) or used.intersection(registers_given(step)):
            used.update(registers_read(step))
            kept.append(step)
    return kept[::-1]


def registers_read(step: OpProgramStep) -> tuple[int, ...]:
    if isinstance(step, Move):
        return (step.input,)
    if isinstance(step, WriteBack):
        return (step.base, step.view)
    if isinstance(step, Refuse):
        return ()
    return (*step.inputs, *(register for register in getattr(step, "into", ()) if register >= 0))


def registers_given(step: OpProgramStep) -> tuple[int, ...]:
    if isinstance(step, WriteBack):
        return ()
    return (step.output,) if isinstance(step, Move) else step.outputs


def _has_side_effect(step: OpProgramStep) -> bool:
    """Whether a step overwrites a tensor that existed before."""
    if isinstance(step, Whole):
        return bool(step.signature.writes)
    return isinstance(step, Compute) and any(register >= 0 for register in step.into)
