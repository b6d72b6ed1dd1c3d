"""Ids of tensors, requests and ops: given by who makes a thing, never reused, with the session in the high bits."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

SESSION_SHIFT = 40
MAX_RESULTS = 1 << 12  # tensors that one query may return
FIRST_RUN = 1 << (SESSION_SHIFT - 1)  # ids from here on are given to the results of queries, in runs of MAX_RESULTS
FIRST_OWN = 1 << (SESSION_SHIFT - 2)  # ids from here on are given by the dispatcher: copies of tensors, programs

Id: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
Ids: TypeAlias = Annotated[tuple[Id, ...], Meta(max_length=1 << 20)]


def session_of(ident: int) -> int:
    return ident >> SESSION_SHIFT


def short_id(ident: int) -> str:
    """An id for people, without its session: `12`, `c5` for a copy that the dispatcher made, and `q3` or `q3.1` for
    results of the session's query number 3."""
    number = ident & ((1 << SESSION_SHIFT) - 1)
    if number < FIRST_OWN:
        return str(number)
    if number < FIRST_RUN:
        return f"c{number - FIRST_OWN}"
    run, place = divmod(number - FIRST_RUN, MAX_RESULTS)
    return f"q{run}.{place}" if place else f"q{run}"
