"""Whose ids an instruction may name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gt.core.errors import ProtocolError
from gt.core.ids import FIRST_OWN, FIRST_RUN, MAX_RESULTS, SESSION_SHIFT
from gt.core.messages import (
    BeginStep,
    CreateTensor,
    DefineOp,
    DefineScope,
    DefineSite,
    EndStep,
    FetchTensor,
    ForgetOps,
    FreeTensors,
    Goodbye,
    Instruction,
    LocateTensor,
    QueryOp,
    ReadStats,
    ReadTimeline,
    ReadTraffic,
    ReadVersions,
    Received,
    Redistribute,
    RunOp,
    Synchronize,
    Taken,
)

_NAMED: dict[type, Callable[[Any], tuple[int, ...]]] = {
    RunOp: lambda op: (op.code, *op.inputs, *op.outputs),
    QueryOp: lambda op: (op.request, op.code, op.first, op.first + MAX_RESULTS - 1, *op.inputs, *op.written),
    FreeTensors: lambda free: free.ids,
    CreateTensor: lambda created: (created.id,),
    Redistribute: lambda move: (move.input, move.output),
    FetchTensor: lambda fetch: (fetch.request, fetch.id),
    LocateTensor: lambda locate: (locate.request, locate.id),
    ReadVersions: lambda read: (read.request, *read.ids),
    BeginStep: lambda begin: (begin.step, *begin.gradients, *begin.parameters),
    EndStep: lambda end: (end.step,),
    Synchronize: lambda synchronize: (synchronize.request,),
    ReadTraffic: lambda read: (read.request,),
    ReadStats: lambda read: (read.request,),
    ReadTimeline: lambda read: (read.request,),
    DefineOp: lambda define: (define.code,),
    ForgetOps: lambda forget: forget.codes,
    DefineSite: lambda define: (),
    DefineScope: lambda define: (),
    Goodbye: lambda goodbye: (),
    Received: lambda received: (received.request,),
    Taken: lambda taken: (),
}


# The ids that an instruction gives to new tensors. Results of queries have ids to themselves, as their number is not
# known before.
_GIVEN: dict[type, Callable[[Any], tuple[int, ...]]] = {
    RunOp: lambda op: op.outputs,
    QueryOp: lambda op: op.written,
    CreateTensor: lambda created: (created.id,),
    Redistribute: lambda move: (move.output,),
}


def require_ownership(session: int, instruction: Instruction | Received | Taken) -> None:
    """A session may name its own tensors and requests only, and none that the dispatcher names for it; new tensors take
    ids of their kind. The one place where this is checked."""
    low = session << SESSION_SHIFT
    for ident in _NAMED[type(instruction)](instruction):
        number = ident - low
        if not (0 <= number < FIRST_OWN or FIRST_RUN <= number < 1 << SESSION_SHIFT):
            raise ProtocolError(
                f"{type(instruction).__name__} of session {session} names {ident}, which is not its own"
            )
    given = _GIVEN.get(type(instruction))
    if given is not None and any(ident - low >= FIRST_RUN for ident in given(instruction)):
        raise ProtocolError(f"{type(instruction).__name__} gives a tensor an id that is for results of queries")
    if isinstance(instruction, QueryOp) and instruction.first - low < FIRST_RUN:
        raise ProtocolError(f"results of a query cannot take ids from {instruction.first} on")
