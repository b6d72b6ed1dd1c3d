"""The most recent failures of ops, kept for people who look at a program after something went wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from gt.core.messages import Failure
from gt.core.program_view import FailureState
from gt.dispatcher.state_records import SessionRecord

KEPT = 64
KEPT_CAUSES = 4096  # causes of reported failures, for reports of other workers

_Cause: TypeAlias = tuple[int, str, str, str, str]
"""The session, the op, the line, and the kind and message of the error."""


class FailureLog:
    """Keeps the latest failures: one for all workers and reads that report it. An op of a line that fails again in the
    same way is kept once, with its number of `times`: a loop that catches its errors leaves room for others. `count` is
    the number of all failures, also of those that are not kept."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.count = 0
        self._clock = clock
        self._kept: dict[_Cause, FailureState] = {}  # ordered by last time
        self._causes: dict[tuple[int, int, str], _Cause] = {}  # keyed by session, origin and op

    def note(self, session: SessionRecord, failure: Failure) -> None:
        line = session.site(failure.site) if failure.site else ""
        reported = (session.ident, failure.origin, failure.op)
        is_new = reported not in self._causes
        cause = self._causes.setdefault(reported, (session.ident, failure.op, line, failure.kind, failure.message))
        known = self._kept.get(cause)
        if known is not None:
            known = msgspec.structs.replace(known, workers=tuple(sorted({*known.workers, failure.worker})))
        if is_new:
            self.count += 1
            self._kept.pop(cause, None)
            known = self._again(known) if known is not None else self._first(session, failure, line)
        if known is not None:
            self._kept[cause] = known
        if len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        if len(self._causes) > KEPT_CAUSES:
            del self._causes[next(iter(self._causes))]

    def _first(self, session: SessionRecord, failure: Failure, line: str) -> FailureState:
        return FailureState(
            self.count,
            self._clock(),
            session.ident,
            failure.op,
            failure.inputs,
            line,
            failure.kind,
            failure.message,
            failure.traceback,
            (failure.worker,),
        )

    def _again(self, known: FailureState) -> FailureState:
        return msgspec.structs.replace(known, time=self._clock(), times=known.times + 1)

    def by_origin(self, session: int) -> dict[int, FailureState]:
        """The failures of a session that are kept, by the tensors that have no value for them."""
        reported = [(origin, cause) for (owner, origin, _), cause in self._causes.items() if owner == session]
        return {origin: self._kept[cause] for origin, cause in reported if cause in self._kept}

    def latest(self) -> tuple[FailureState, ...]:
        """The failures that are kept, the last one first."""
        return tuple(reversed(list(self._kept.values())))
