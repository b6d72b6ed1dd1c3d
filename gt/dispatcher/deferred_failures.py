"""Failures of exchanges, kept back until it is known whether a worker was lost.

A worker whose peer was killed sees its connections closed, and tells so, before the dispatcher finds that the process
of the peer has ended. Until the processes were looked at a few times, the failure may be the consequence of a loss.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from gt.core.messages import Failed, OpFailed
from gt.dispatcher.state import State

CHECKS = 4  # of the processes of workers, after which a failure is none of a loss: about a second
REMEMBERED = 1024  # failures that were found to be none of a loss

DeferredFailure: TypeAlias = tuple[int, OpFailed | Failed]
"""A worker, and a failure that it has told of."""


class DeferredFailures:
    """`state` knows which workers are gone."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._held: list[tuple[int, DeferredFailure]] = []  # with the number of the check that decides
        self._checks = 0
        self._cleared: deque[int] = deque(maxlen=REMEMBERED)

    def hold(self, worker: int, report: OpFailed | Failed) -> bool:
        """Keep a failure back; gives whether that is necessary."""
        failure = report.failure
        if not failure.peers or failure.origin in self._cleared or self._state.lost_peer(failure) is not None:
            return False
        self._held.append((self._checks + CHECKS, (worker, report)))
        return True

    def take_lost(self, worker: int) -> list[DeferredFailure]:
        """The failures that the loss of a worker explains."""
        found = [doubt for _, doubt in self._held if worker in doubt[1].failure.peers]
        self._held = [(check, doubt) for check, doubt in self._held if worker not in doubt[1].failure.peers]
        return found

    def take_old(self) -> list[DeferredFailure]:
        """The workers were looked at once more. Gives the failures that no loss explains."""
        self._checks += 1
        found = [doubt for check, doubt in self._held if check <= self._checks]
        self._held = [(check, doubt) for check, doubt in self._held if check > self._checks]
        self._cleared.extend([report.failure.origin for _, report in found])
        return found
