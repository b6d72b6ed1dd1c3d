"""The most recent failures of ops, kept for people who look at a program after something went wrong."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from gt.core.messages import Failure
from gt.core.program_view import FailureState
from gt.dispatcher.session_records import SessionRecord

KEPT = 64


class FailureLog:
    """A failure that several workers report, or several reads, is one. `count` are all failures, also those that are
    not kept."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.count = 0
        self._clock = clock
        self._kept: dict[tuple[int, int, str], FailureState] = {}

    def note(self, session: SessionRecord, failure: Failure) -> None:
        key = (session.ident, failure.origin, failure.op)
        known = self._kept.get(key)
        if known is not None:
            workers = tuple(sorted({*known.workers, failure.worker}))
            self._kept[key] = msgspec.structs.replace(known, workers=workers)
            return
        self.count += 1
        self._kept[key] = FailureState(
            self.count,
            self._clock(),
            session.ident,
            failure.op,
            failure.inputs,
            session.site(failure.site) if failure.site else "",
            failure.kind,
            failure.message,
            failure.traceback,
            (failure.worker,),
        )
        if len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]

    def latest(self) -> tuple[FailureState, ...]:
        """The failures that are kept, the last one first."""
        return tuple(reversed(list(self._kept.values())))
