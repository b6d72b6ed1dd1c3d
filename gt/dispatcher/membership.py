"""Workers and sessions that come and go."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from gt.core.messages import LostLine, Rejected, WorkerDefineScope, WorkerEndSession, WorkerLosePeer
from gt.core.meta import ITEM_BYTES, TensorMeta
from gt.dispatcher.fair_queue import FairQueue
from gt.dispatcher.group_store import GroupStore
from gt.dispatcher.message_queue import MessageQueue
from gt.dispatcher.plan_cache import PlanCache
from gt.dispatcher.programs import Programs
from gt.dispatcher.redistribution import Redistributor, default_limit
from gt.dispatcher.rejection import describe_internal_error, lost
from gt.dispatcher.reports import Reports
from gt.dispatcher.state import State
from gt.dispatcher.state_records import DeadWorker, SessionRecord
from gt.dispatcher.transactions import Transactions

MAX_LINES = 8  # lines with the most bytes; all others are summed up as one
MAX_EXAMPLES = 3  # dtypes and shapes that are named


def describe_losses(lost: Sequence[tuple[int, TensorMeta]], sites: Mapping[int, int]) -> tuple[LostLine, ...]:
    """Describe lost tensors by the lines that made them: `sites`, by id, as far as they are known."""
    by_site: dict[int, list[TensorMeta]] = {}
    for ident, meta in lost:
        by_site.setdefault(sites.get(ident, 0), []).append(meta)
    known = sorted((site for site in by_site if site), key=lambda site: _nbytes(by_site[site]), reverse=True)
    rest = [meta for site in (*known[MAX_LINES:], 0) for meta in by_site.get(site, ())]
    lines = [_describe(site, by_site[site]) for site in known[:MAX_LINES]]
    return (*lines, _describe(0, rest)) if rest else tuple(lines)


def _describe(site: int, metas: Sequence[TensorMeta]) -> LostLine:
    kinds = dict.fromkeys(f"{meta.dtype}{list(meta.shape)}" for meta in metas)
    return LostLine(site, len(metas), _nbytes(metas), tuple(kinds)[:MAX_EXAMPLES])


def _nbytes(metas: Sequence[TensorMeta]) -> int:
    return sum(math.prod(meta.shape) * ITEM_BYTES[meta.dtype] for meta in metas)


log = logging.getLogger("gt.dispatcher")

FindSites: TypeAlias = Callable[[SessionRecord, Iterable[int]], Mapping[int, int]]
"""The sites that made some tensors of a session, as far as they are known."""


class Membership:
    """Adds and removes workers and sessions."""

    def __init__(
        self,
        state: State,
        outgoing: MessageQueue,
        transactions: Transactions,
        redistributor: Redistributor,
        plan_cache: PlanCache,
        programs: Programs,
        fair_queue: FairQueue,
        store: GroupStore,
        copy_limit: int | None = None,
    ) -> None:
        self._state = state
        self._outgoing = outgoing
        self._transactions = transactions
        self._redistributor = redistributor
        self._plan_cache = plan_cache
        self._programs = programs
        self._fair_queue = fair_queue
        self._store = store
        self._copy_limit = copy_limit

    def join_worker(
        self, device: str, host: str, pid: int, memory: int, *, overlaps: bool, hostname: str, address: str
    ) -> int:
        with self._transactions.begin():
            worker = self._state.add_worker(
                device, host, pid, memory, overlaps=overlaps, hostname=hostname, address=address
            )
            ident = worker.info.worker
            self._set_copy_limit()
            self._outgoing.observe("CONNECT", f"worker {ident}", None)
            for session in self._state.sessions.values():
                for scope_id, scope in session.scopes.items():
                    command = WorkerDefineScope(session.ident, scope_id, scope.name, scope.compile)
                    self._outgoing.command((ident,), command)
            self._store.add_worker(ident)
        return ident

    def _set_copy_limit(self) -> None:
        """Set the limit that the user gave or, without one, the default for the present workers."""
        default = default_limit(self._state.workers.values())
        self._state.set_copy_limit(default if self._copy_limit is None else self._copy_limit)

    def make_ready(self, worker: int) -> None:
        """Let a worker get commands without a store: workers in one process need none."""
        with self._transactions.begin():
            self._store.set_ready((worker,))

    def lose_worker(self, ident: int, dead: DeadWorker, reports: Reports, find_sites: FindSites) -> None:
        """Remove a lost worker, and tell the other workers, which may wait for it in an exchange. The requests that
        wait for it fail first; each session then loses its tensors in its own transaction."""
        with self._transactions.begin():
            self._outgoing.observe("DISCONNECT", f"worker {ident}", None)
            self._state.remove_worker(ident, dead)
            self._set_copy_limit()
            if self._state.workers:
                self._outgoing.command(tuple(self._state.workers), WorkerLosePeer(ident))
            reports.lose_worker(ident)
        if ident == self._state.store_host:
            with self._transactions.begin():
                self._store.lose_host()
        tensors = self._state.tensors_on(ident)
        for session in list(self._state.sessions.values()):
            self._lose_worker_of(session, tensors.get(session.ident, []), ident, find_sites)
        with self._transactions.begin():
            self._state.forget_meshes_of(ident)
        self._fair_queue.lose_worker(ident)

    def _lose_worker_of(
        self, session: SessionRecord, tensors: Sequence[int], worker: int, find_sites: FindSites
    ) -> None:
        """Take a lost worker from one session. An internal error ends this session only."""
        try:
            with self._transactions.begin():
                self._lose_parts(session, tensors, worker, find_sites)
        except Exception as error:
            log.exception("the session of client %d ends because of a mistake of GT", session.ident)
            with self._transactions.begin():
                self._outgoing.answer(session.ident, Rejected(0, describe_internal_error(error)))
                self.remove_session(session.ident)

    def _lose_parts(self, session: SessionRecord, tensors: Sequence[int], worker: int, find_sites: FindSites) -> None:
        """Take a lost worker from the tensors and plans of a session, and tell the client."""
        losses = self._state.lose_parts(tensors, worker)
        self._outgoing.free(losses.useless)
        for ident, copy in losses.promoted:
            self._redistributor.rename(session, self._state.tensors[ident], copy, ident, 0)
        self._programs.forget_parts(session)
        self._plan_cache.forget(session, self._state.forget_plans_on(session, worker))
        lines = describe_losses(losses.missing, find_sites(session, [ident for ident, _ in losses.missing]))
        if lines or not self._state.dead_worker(worker).is_drained:
            self._outgoing.answer(session.ident, lost(self._state, session, 0, worker, lines=lines))

    def open_session(self, host: str, pid: int, key: str = "") -> int:
        with self._transactions.begin():
            ident = self._state.add_session(host, pid, key).ident
            self._outgoing.observe("CONNECT", f"client {ident}", None)
        return ident

    def end_session(self, ident: int) -> None:
        with self._transactions.begin():
            self.remove_session(ident)

    def remove_session(self, ident: int) -> None:
        """Remove a session here and on the workers. Part of a transaction."""
        if ident not in self._state.sessions:
            return
        self._outgoing.observe("DISCONNECT", f"client {ident}", None)
        self._fair_queue.forget_session(ident)
        self._state.remove_session(ident)
        self._outgoing.command(tuple(self._state.workers), WorkerEndSession(ident))
