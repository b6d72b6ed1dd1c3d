"""Reports of workers: replies to requests, and failures of ops."""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from gt.core.errors import ProtocolError
from gt.core.ids import is_dispatcher_id, session_of
from gt.core.messages import Failed, NotCompiled, OpFailed, StoreReady
from gt.dispatcher.group_store import GroupStore
from gt.dispatcher.message_queue import MessageQueue
from gt.dispatcher.requests import Requests
from gt.dispatcher.state import State
from gt.dispatcher.state_records import Reply
from gt.dispatcher.transactions import Transactions
from gt.wire.codec import Buffer

# A worker whose peer was killed sees its connections closed and reports a failure before the dispatcher notices that
# the peer's process has ended. The failure is passed on after the processes were checked a few more times.


CHECKS = 4  # checks of the workers' processes after which no loss explains a failure: about a second
REMEMBERED = 1024  # failures that no loss explained

DeferredFailure: TypeAlias = tuple[int, OpFailed | Failed]
"""A worker and the failure that it reported."""


class DeferredFailures:
    """Failures of exchanges that wait for the loss of a worker to explain them."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._deferred: list[tuple[int, DeferredFailure]] = []  # each with the number of its releasing check
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


class Reports:
    """Handles workers' reports. Each method is one transaction: one that raises ProtocolError changes nothing."""

    def __init__(
        self, state: State, outgoing: MessageQueue, transactions: Transactions, requests: Requests, store: GroupStore
    ) -> None:
        self._state = state
        self._outgoing = outgoing
        self._transactions = transactions
        self._requests = requests
        self._store = store
        self._deferred_failures = DeferredFailures(state)

    def take(self, worker: int, report: OpFailed | StoreReady | NotCompiled | Reply, buffer: Buffer | None) -> None:
        if isinstance(report, OpFailed):
            self._require_own_failure(worker, report)
        elif isinstance(report, Failed):
            self._requests.require_asked(worker, report)
        if isinstance(report, OpFailed | Failed) and self._deferred_failures.defer(worker, report):
            return
        with self._transactions.begin():
            if isinstance(report, OpFailed | Failed):
                self._pass_on((worker, report))
            elif isinstance(report, StoreReady):
                self._store.announce(worker, report)
            elif isinstance(report, NotCompiled):
                self._pass_on_not_compiled(worker, report)
            else:
                self._requests.add_reply(worker, report, buffer)

    def note_process_check(self) -> None:
        """The processes of workers were checked: pass on the failures that no loss explains."""
        with self._transactions.begin():
            for failure in self._deferred_failures.take_unexplained():
                self._pass_on(failure)

    def lose_worker(self, worker: int) -> None:
        """Fail the requests that wait for a lost worker, or that failed because of it. Part of a transaction."""
        self._requests.lose_worker(worker)
        for failure in self._deferred_failures.take_explained(worker):
            self._pass_on(failure)

    def _pass_on(self, deferred: DeferredFailure) -> None:
        """Answer the request that failed, or report a failed op to the client, unless it knows of the lost worker that
        explains the failure."""
        worker, report = deferred
        if isinstance(report, Failed):
            if self._requests.is_waiting_for(worker, report.request):
                self._requests.add_reply(worker, report, None)
        elif self._state.lost_peer(report.failure) is None and not self._state.has_ended(report.session):
            self._outgoing.answer(report.session, report)
            self._drop_failed_copies(report.failure.origin)

    def _drop_failed_copies(self, origin: int) -> None:
        """Drop all copies of a session after a move of one has failed: the next op that needs one moves it again. The
        failure of copies that were gathered together names the first of them only."""
        if is_dispatcher_id(origin):
            session = session_of(origin)
            idents = [ident for ident in self._state.copies if session_of(ident) == session]
            self._outgoing.free(self._state.drop_copies(idents))

    def _pass_on_not_compiled(self, worker: int, report: NotCompiled) -> None:
        if self._state.has_ended(report.session):
            return
        if worker not in self._state.sessions[report.session].workers:
            raise ProtocolError(f"worker {worker} was given nothing of session {report.session} that could be compiled")
        self._outgoing.answer(report.session, report)

    def _require_own_failure(self, worker: int, failed: OpFailed) -> None:
        """A worker may report failures only to sessions whose ops it runs."""
        if self._state.has_ended(failed.session):
            return
        origin, workers = failed.failure.origin, self._state.sessions[failed.session].workers
        if worker not in workers or (origin and session_of(origin) != failed.session):
            raise ProtocolError(f"worker {worker} was given nothing of session {failed.session} that could have failed")
