"""Checks that an instruction names ids of its own session only."""

from __future__ import annotations

from gt.core.errors import ProtocolError
from gt.core.ids import FIRST_DISPATCHER_ID, FIRST_QUERY_ID, MAX_RESULTS, SESSION_SHIFT
from gt.core.message_fields import id_fields
from gt.core.messages import AckBytes, AckRead, EndSession, Instruction, ReadSessions, RunSegment

_END = 1 << SESSION_SHIFT


def require_ownership(session: int, instruction: Instruction | AckRead | AckBytes | ReadSessions | EndSession) -> None:
    """A session may name only its own tensors, ops and requests, and none that the dispatcher numbers for it. Ids from
    FIRST_QUERY_ID on are for results of queries. This is the only place where ids are checked."""
    if type(instruction) is RunSegment:
        for between in instruction.between:
            require_ownership(session, between.instruction)
    low = session << SESSION_SHIFT
    fields = id_fields(type(instruction))
    ids = fields.all(instruction)
    if fields.first_result is None and (not ids or (low <= min(ids) and max(ids) < low + FIRST_DISPATCHER_ID)):
        return  # most instructions: no id is a result of a query
    kind = type(instruction).__name__
    first = low + FIRST_QUERY_ID if fields.first_result is None else getattr(instruction, fields.first_result)
    for ident in (*ids, first + MAX_RESULTS - 1):
        number = ident - low
        if not (0 <= number < FIRST_DISPATCHER_ID or FIRST_QUERY_ID <= number < _END):
            raise ProtocolError(f"{kind} of session {session} names {ident}, which is not its own", "foreign")
    if any(ident - low >= FIRST_QUERY_ID for ident in fields.new(instruction)):
        raise ProtocolError(f"{kind} gives a tensor an id that is for results of queries", "foreign")
    if first - low < FIRST_QUERY_ID:
        raise ProtocolError(f"results of a query cannot take ids from {first} on", "foreign")
