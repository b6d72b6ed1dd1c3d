"""Reads the declarations of records: the ids they name, the session they belong to, the bytes they carry.

The declarations are the types of the fields in `gt.core.messages`, so a new message needs no entry in a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, get_args, get_type_hints

from msgspec import Struct

from gt.core.errors import ProtocolError
from gt.core.ids import FIRST_DISPATCHER_ID, FIRST_QUERY_ID, MAX_RESULTS, SESSION_SHIFT, IdRole, session_of
from gt.core.messages import (
    AckBytes,
    AckRead,
    Answer,
    ByteRange,
    Command,
    EndSession,
    Instruction,
    ReadSessions,
    Report,
)

ReadIds: TypeAlias = Callable[[Any], Sequence[int]]


class IdFields(NamedTuple):
    """Functions that read the ids of a record: all of them, those of tensors, and those that it gives to new tensors.
    `names` are the fields with ids, `tensor_names` those with ids of tensors, and `first_result` is the one with the
    first id of a query's results."""

    names: frozenset[str]
    tensor_names: tuple[str, ...]
    all: ReadIds
    tensors: ReadIds
    new: ReadIds
    first_result: str | None


@cache
def id_fields(kind: type[Struct]) -> IdFields:
    """The id fields of a kind of record, read from its declaration once."""
    hints = get_type_hints(kind, include_extras=True)
    roles = {name: role for name, hint in hints.items() if (role := _role(hint)) is not None}
    tuples = frozenset(name for name in roles if get_args(hints[name])[0] is not int)
    tensors = [name for name, role in roles.items() if role in (IdRole.OWNED, IdRole.NEW)]
    new = [name for name, role in roles.items() if role is IdRole.NEW]
    first_result = next((name for name, role in roles.items() if role is IdRole.FIRST_RESULT), None)
    of_tensors, of_new = _reader(tensors, tuples), _reader(new, tuples)
    return IdFields(frozenset(roles), tuple(tensors), _reader(roles, tuples), of_tensors, of_new, first_result)


def _role(hint: object) -> IdRole | None:
    return next((part for part in get_args(hint) if isinstance(part, IdRole)), None)


def _reader(names: Iterable[str], tuples: frozenset[str]) -> ReadIds:
    """A function that reads the ids in some fields, the fields with one id first. Made once for a kind of record and
    called for each instruction of a client, so each case has its fastest function."""
    one, several = [name for name in names if name not in tuples], [name for name in names if name in tuples]
    if not several:
        return _read_each(one)
    if not one and len(several) == 1:
        return attrgetter(several[0])
    read_one, read_several = _read_each(one), _read_each(several)
    return lambda record: (*read_one(record), *chain.from_iterable(read_several(record)))


def _read_each(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """The values of fields as a tuple, which `attrgetter` makes of two and more only."""
    if len(names) > 1:
        return attrgetter(*names)
    if not names:
        return lambda record: ()
    read = attrgetter(names[0])
    return lambda record: (read(record),)


def owner_of(record: Struct) -> int:
    """The session that a record belongs to, taken from its first id; 0 if it names none."""
    ids = id_fields(type(record)).all(record)
    return session_of(ids[0]) if ids else 0


PAYLOAD_RECORDS = frozenset(
    kind
    for union in (Instruction, Command, Report, Answer)
    for kind in get_args(union)
    if {"byte_range", "byte_ranges"} & {*kind.__struct_fields__}
)
"""The records with the bytes of tensors. The bytes travel beside the records, in the same order."""


def byte_ranges_of(record: Any) -> tuple[ByteRange, ...]:
    """The byte ranges of one of the PAYLOAD_RECORDS."""
    return record.byte_ranges if "byte_ranges" in record.__struct_fields__ else (record.byte_range,)


_END = 1 << SESSION_SHIFT


def require_ownership(session: int, instruction: Instruction | AckRead | AckBytes | ReadSessions | EndSession) -> None:
    """A session may name only its own tensors, ops and requests, and none that the dispatcher numbers for it. Ids from
    FIRST_QUERY_ID on are for results of queries. This is the only place where ids are checked."""
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
