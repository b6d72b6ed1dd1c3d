"""Instructions that cannot be done: what they need is lost, or the client is wrong about something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gt.core.errors import LayoutError
from gt.core.messages import CreateTensor, Instruction, QueryOp, Redistribute, Rejected, RunOp
from gt.dispatcher.state import LostWorker, Misfit, NoWorkers, Session, State
from gt.sharding.spec import DeviceMesh


class Refusal(NamedTuple):
    """What follows: tensors to free on workers, and an answer, or a worker with which the answer was lost."""

    freed: Sequence[tuple[int, DeviceMesh]] = ()
    request: int = 0
    lost_with: int | None = None
    answer: Rejected | None = None


def refuse(
    state: State, session: Session, instruction: Instruction, error: Exception, gone: Mapping[int, object]
) -> Refusal:
    """Note what an instruction that failed with an error leaves behind. Errors that are ours are raised."""
    try:
        if isinstance(error, LostWorker):
            return _lose(state, session, instruction, error.worker)
        if isinstance(error, NoWorkers) and gone:
            return _lose(state, session, instruction, max(gone))
        if isinstance(error, KeyError | NoWorkers | Misfit | LayoutError):
            return _reject(instruction, error)
        raise error
    except KeyError as unknown:
        return _reject(instruction, unknown)


def _lose(state: State, session: Session, instruction: Instruction, worker: int) -> Refusal:
    """An instruction needs what was lost with a worker: a request is answered so, and results are lost too."""
    freed: Sequence[tuple[int, DeviceMesh]] = ()
    if isinstance(instruction, CreateTensor):
        state.lose(instruction.id, instruction.meta, worker)
    elif isinstance(instruction, Redistribute):
        state.lose(instruction.output, state.meta(instruction.input), worker)
    elif isinstance(instruction, RunOp):
        signature = session.ops[instruction.code].signature
        _require_known(state, instruction.inputs)
        for ident, meta in zip(instruction.outputs, signature.outputs, strict=False):
            state.lose(ident, meta, worker)
        renewed = instruction.outputs[len(signature.outputs) :]
        freed = _lose_written(state, [instruction.inputs[place] for place in signature.writes], renewed, worker)
    elif isinstance(instruction, QueryOp):
        _require_known(state, instruction.inputs)
        written = [instruction.inputs[place] for place in session.ops[instruction.code].signature.writes]
        freed = _lose_written(state, written, instruction.written, worker)
    return Refusal(freed, getattr(instruction, "request", 0), worker)


def _require_known(state: State, inputs: Sequence[int]) -> None:
    for ident in inputs:
        state.meta(ident)


def _lose_written(
    state: State, written: Sequence[int], renewed: Sequence[int], worker: int
) -> list[tuple[int, DeviceMesh]]:
    """What should have been overwritten has no value now; the old one is freed, as the write would have done."""
    freed: list[tuple[int, DeviceMesh]] = []
    for old, new in zip(written, renewed, strict=True):
        meta = state.meta(old)
        freed += state.remove(old)
        state.lose(new, meta, worker)
    return freed


def _reject(instruction: Instruction, error: Exception) -> Refusal:
    reason = f"{type(instruction).__name__} is not possible: {type(error).__name__}: {error}"
    request = getattr(instruction, "request", 0)
    return Refusal(request=request, answer=Rejected(request, reason))
