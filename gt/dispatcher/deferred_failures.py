"""Failures of exchanges, deferred until it is known whether a lost worker explains them.

A worker whose peer was killed sees its connections closed and reports a failure before the dispatcher notices that the
peer's process has ended. The failure is passed on after the processes were checked a few more times.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from gt.core.messages import Failed, OpFailed
from gt.dispatcher.state import State

CHECKS = 4  # checks of the workers' processes after which no loss explains a failure: about a second
REMEMBERED = 1024  # failures that no loss explained

DeferredFailure: TypeAlias = tuple[int, OpFailed | Failed]
"""A worker and the failure that it reported."""


class DeferredFailures:
    """Failures of exchanges that wait for the loss of a worker to explain them."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._deferred: list[tuple[int, DeferredFailure]] = []  # with the number of the check that releases it
        self._checks = 0
        self._unexplained: deque[int] = deque(maxlen=REMEMBERED)

    def defer(self, worker: int, report: OpFailed | Failed) -> bool:
        """Keep a failure if a loss may explain it; returns whether it was kept."""
        failure = report.failure
        if not failure.peers or failure.origin in self._unexplained or self._state.lost_peer(failure) is not None:
            return False
        self._deferred.append((self._checks + CHECKS, (worker, report)))
        return True

    def take_explained(self, worker: int) -> list[DeferredFailure]:
        """The failures that the loss of a worker explains."""
        found = [failure for _, failure in self._deferred if worker in failure[1].failure.peers]
        self._deferred = [(check, it) for check, it in self._deferred if worker not in it[1].failure.peers]
        return found

    def take_unexplained(self) -> list[DeferredFailure]:
        """The workers' processes were checked once more; returns the failures that no loss explains."""
        self._checks += 1
        found = [failure for check, failure in self._deferred if check <= self._checks]
        self._deferred = [(check, failure) for check, failure in self._deferred if check > self._checks]
        self._unexplained.extend(report.failure.origin for _, report in found)
        return found
