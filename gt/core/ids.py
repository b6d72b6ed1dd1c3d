"""Ids of tensors, requests and ops. The process that creates an object gives it its id; ids are never reused, and the
high bits of an id are the session that it belongs to."""

from __future__ import annotations

from enum import Enum, auto
from typing import Annotated, TypeAlias

from msgspec import Meta

SESSION_SHIFT = 40
ALL_SESSIONS = 0  # the session of a monitor's requests, which concern all sessions
MAX_RESULTS = 1 << 12  # tensors that one query may return
FIRST_QUERY_ID = 1 << (SESSION_SHIFT - 1)  # ids from here on: results of queries, MAX_RESULTS ids for each
FIRST_DISPATCHER_ID = 1 << (SESSION_SHIFT - 2)  # ids from here on: the dispatcher's copies of tensors, and programs


class IdRole(Enum):
    """The meaning of an id field of a message. `gt.core.message_fields` reads it from the field's type."""

    OWNED = auto()  # a tensor of the session that the message belongs to, or a position among its tensors
    OTHER = auto()  # also of that session, but an op, a program or a request; these are numbered apart from tensors
    NEW = auto()  # also of that session, and given to a new tensor by the message
    FIRST_RESULT = auto()  # the first of MAX_RESULTS ids that a query's results may take


_RANGE = Meta(ge=0, lt=1 << 62)
_COUNT = Meta(max_length=1 << 20)
_Int: TypeAlias = Annotated[int, _RANGE]
SiteId: TypeAlias = _Int
ScopeId: TypeAlias = _Int
"""Ids of sites and of scopes: each session numbers its own from 1, without the session's bits; 0 is none."""
Id: TypeAlias = Annotated[int, _RANGE, IdRole.OWNED]
Ids: TypeAlias = Annotated[tuple[_Int, ...], _COUNT, IdRole.OWNED]
OtherId: TypeAlias = Annotated[int, _RANGE, IdRole.OTHER]
OtherIds: TypeAlias = Annotated[tuple[_Int, ...], _COUNT, IdRole.OTHER]
NewId: TypeAlias = Annotated[int, _RANGE, IdRole.NEW]
NewIds: TypeAlias = Annotated[tuple[_Int, ...], _COUNT, IdRole.NEW]
FirstResultId: TypeAlias = Annotated[int, _RANGE, IdRole.FIRST_RESULT]


def session_of(ident: int) -> int:
    return ident >> SESSION_SHIFT


def is_dispatcher_id(ident: int) -> bool:
    """Whether the dispatcher gave an id: to a copy of a tensor, the token of a step, or a program."""
    return FIRST_DISPATCHER_ID <= ident & ((1 << SESSION_SHIFT) - 1) < FIRST_QUERY_ID


def short_id(ident: int) -> str:
    """An id for people, without its session: `12`, `c5` for a copy that the dispatcher made, and `q3` or `q3.1` for
    results of the session's query number 3."""
    number = ident & ((1 << SESSION_SHIFT) - 1)
    if number < FIRST_DISPATCHER_ID:
        return str(number)
    if number < FIRST_QUERY_ID:
        return f"c{number - FIRST_DISPATCHER_ID}"
    query, position = divmod(number - FIRST_QUERY_ID, MAX_RESULTS)
    return f"q{query}.{position}" if position else f"q{query}"
