"""Rejected instructions: an input has no value, the client made an error, or GT did."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from gt.core.errors import LimitError
from gt.core.messages import (
    Answer,
    CreateTensor,
    Failed,
    Failure,
    FetchTensor,
    Instruction,
    Lost,
    LostLine,
    OpFailed,
    QueryOp,
    Redistribute,
    Rejected,
    RunOp,
    Uploaded,
)
from gt.core.signatures import Signature
from gt.dispatcher.instruction_errors import Cause, InvalidInstruction, LimitExceeded, NoValue, NoWorkers
from gt.dispatcher.state import State
from gt.dispatcher.state_records import SessionRecord
from gt.sharding.spec import DeviceMesh

log = logging.getLogger("gt.dispatcher")

DISPATCHER = -1  # replaces the worker in a Failure
OP_OF_ANOTHER = "an op of another program"  # whose key is another one
_MAX_TEXT = 1 << 14


class Rejection(NamedTuple):
    """Consequences of a rejection: tensors to free on workers, answers to the client, and the error that the client
    made, if any."""

    freed: Sequence[tuple[int, DeviceMesh]] = ()
    answers: Sequence[Answer] = ()
    mistake: InvalidInstruction | None = None


def reject(state: State, session: SessionRecord, instruction: Instruction, error: Exception) -> Rejection:
    """Record the consequences of an instruction that raised an error: outputs without a value, answers to the client.
    The changes of the instruction itself were rolled back before."""
    try:
        if isinstance(error, NoValue):
            return _reject_without_value(state, session, instruction, error.cause)
        if isinstance(error, NoWorkers) and state.dead_workers:
            return _reject_without_value(state, session, instruction, max(state.dead_workers))
        if isinstance(error, LimitExceeded):
            return _reject_over_limit(state, session, instruction, error)
        if isinstance(error, MemoryError) and isinstance(instruction, FetchTensor):
            return Rejection(answers=[_failed_request(instruction, MemoryError.__name__, error)])
        if not isinstance(error, InvalidInstruction | NoWorkers):
            return _reject_for_internal_error(state, session, instruction, error)
    except InvalidInstruction as wrong:
        error = wrong
    reason = f"{type(instruction).__name__} is not possible: {str(error) or 'there are no workers'}"[:_MAX_TEXT]
    request = _request(instruction)
    # a pending request with the same id still gets its own answer
    mistake = error if isinstance(error, InvalidInstruction) else None
    return Rejection(answers=[Rejected(0 if request in state.pending else request, reason)], mistake=mistake)


def reject_internal_error(instruction: Instruction, error: Exception) -> Rejected:
    """The answer to an instruction that raised an internal error. Without a request, it ends the session."""
    return Rejected(
        _request(instruction), f"{type(instruction).__name__} is not possible. {describe_internal_error(error)}"
    )


def describe_internal_error(error: Exception) -> str:
    text = "".join(traceback.format_exception(error))[-_MAX_TEXT:]
    return f"This is a mistake of GT, not of your program; please report it: {type(error).__name__}: {error}\n{text}"


def lost(
    state: State, session: SessionRecord, request: int, worker: int, site: int = 0, lines: tuple[LostLine, ...] = ()
) -> Lost:
    """The answer to a request of a session that needs a lost worker."""
    pid, reason, last_op, op_key, _ = state.dead_worker(worker)
    if op_key not in (None, session.key):
        last_op = OP_OF_ANOTHER
    return Lost(request, worker, pid, reason, last_op, site, lines)


def _reject_without_value(state: State, session: SessionRecord, instruction: Instruction, cause: Cause) -> Rejection:
    """An input has no value: answer the request, and mark the outputs as missing."""
    freed = _lose_results(state, session, instruction, cause)
    if isinstance(instruction, CreateTensor):
        return Rejection(freed, _unused_memory(instruction))
    request = _request(instruction)
    if not request:
        return Rejection(freed)
    if isinstance(cause, int):
        return Rejection(freed, [lost(state, session, request, cause)])
    return Rejection(freed, [Failed(request, cause)])


def _reject_for_internal_error(
    state: State, session: SessionRecord, instruction: Instruction, error: Exception
) -> Rejection:
    """An internal error while planning an op is a failure of that op; the session goes on."""
    log.error("%s of client %d failed", type(instruction).__name__, session.ident, exc_info=error)
    if not isinstance(instruction, RunOp | QueryOp | CreateTensor | Redistribute):
        return Rejection(answers=[reject_internal_error(instruction, error)])
    text = "".join(traceback.format_exception(error))[-_MAX_TEXT:]
    message = f"a mistake of GT while the op was planned: {type(error).__name__}: {error}"
    return _fail(state, session, instruction, "RuntimeError", message, text)


def _reject_over_limit(
    state: State, session: SessionRecord, instruction: Instruction, error: LimitExceeded
) -> Rejection:
    """The session may not hold the results of an op, an upload or a copy that it needs: that is a failure of the op,
    and the session goes on. Other instructions only prepare ops, which fail themselves if they have to."""
    if isinstance(instruction, RunOp | QueryOp | CreateTensor | Redistribute):
        return _fail(state, session, instruction, LimitError.__name__, str(error), "")
    if not _request(instruction):
        return Rejection()
    return Rejection(answers=[_failed_request(instruction, LimitError.__name__, error)])


def _failed_request(instruction: Instruction, kind: str, error: Exception) -> Failed:
    """The answer to a request that fails before it reaches a worker."""
    request, site = _request(instruction), getattr(instruction, "site", 0)
    failure = Failure(DISPATCHER, type(instruction).__name__, (), site, request, kind, str(error), "")
    return Failed(request, failure, is_own_failure=True)


def _fail(
    state: State,
    session: SessionRecord,
    instruction: RunOp | QueryOp | CreateTensor | Redistribute,
    kind: str,
    message: str,
    text: str,
) -> Rejection:
    """An op fails before it reaches a worker."""
    failure = _failure(state, session, instruction, kind, message, text)
    freed = _lose_results(state, session, instruction, failure)
    if isinstance(instruction, QueryOp):
        return Rejection(freed, [Failed(instruction.request, failure, is_own_failure=True)])
    unused = _unused_memory(instruction) if isinstance(instruction, CreateTensor) else []
    return Rejection(freed, [OpFailed(session.ident, failure), *unused])


def _unused_memory(create: CreateTensor) -> list[Answer]:
    """The shared memory of an upload that no worker will read is the client's again."""
    return [Uploaded(create.id)] if create.byte_range.name else []


def _failure(
    state: State,
    session: SessionRecord,
    instruction: RunOp | QueryOp | CreateTensor | Redistribute,
    kind: str,
    message: str,
    text: str,
) -> Failure:
    match instruction:
        case RunOp(op_id, inputs, outputs):
            op, origin = session.op(op_id).signature.op, next(iter(outputs), 0)
        case QueryOp(request, op_id, inputs):
            op, origin = session.op(op_id).signature.op, request
        case CreateTensor(ident):
            op, inputs, origin = "upload", (), ident
        case Redistribute(source, target):
            op, inputs, origin = "redistribute", (source,), target
    shapes = tuple(str(state.meta(ident)) for ident in inputs)
    return Failure(DISPATCHER, op, shapes, instruction.site, origin, kind, message, text)


def _lose_results(
    state: State, session: SessionRecord, instruction: Instruction, cause: Cause
) -> list[tuple[int, DeviceMesh]]:
    """Mark the outputs and written inputs of an instruction as missing. Raises InvalidInstruction if it is invalid."""
    if isinstance(instruction, CreateTensor):
        state.require_new((instruction.id,))
        state.mark_missing(instruction.id, instruction.meta, cause)
    elif isinstance(instruction, Redistribute):
        state.require_new((instruction.output,))
        state.mark_missing(instruction.output, state.meta(instruction.input), cause)
    elif isinstance(instruction, RunOp):
        op = session.op(instruction.op_id)
        op.require_fit(instruction.inputs, instruction.outputs)
        state.require_new(instruction.outputs)
        results = zip(instruction.outputs, op.signature.outputs, strict=False)
        written = _written(state, op.signature, instruction.inputs)
        for ident, meta in results:
            state.mark_missing(ident, meta, cause)
        return _lose_written(state, written, instruction.outputs[len(op.signature.outputs) :], cause)
    elif isinstance(instruction, QueryOp):
        op = session.op(instruction.op_id)
        op.require_fit_of_query(instruction.inputs, instruction.written)
        state.require_new(instruction.written)
        return _lose_written(state, _written(state, op.signature, instruction.inputs), instruction.written, cause)
    return []


def _written(state: State, signature: Signature, inputs: Sequence[int]) -> list[int]:
    """The tensors that an op writes. Raises UnknownId if some input does not exist."""
    for ident in inputs:
        state.meta(ident)
    return [inputs[position] for position in signature.writes]


def _lose_written(
    state: State, written: Sequence[int], renewed: Sequence[int], cause: Cause
) -> list[tuple[int, DeviceMesh]]:
    pairs = zip(written, renewed, strict=True)
    return [freed for old, new in pairs for freed in state.mark_write_failed(old, new, cause)]


def _request(instruction: Instruction) -> int:
    return getattr(instruction, "request", 0)
