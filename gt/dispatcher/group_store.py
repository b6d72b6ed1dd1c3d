"""The key-value store at which workers form process groups: one worker hosts it, all others join it."""

from __future__ import annotations

from collections.abc import Iterable

from gt.core.errors import ProtocolError
from gt.core.messages import Joined, StoreReady, WorkerHostStore, WorkerJoinStore
from gt.dispatcher.message_queue import MessageQueue
from gt.dispatcher.state import State


class GroupStore:
    """Connects workers to the store, without which they cannot exchange tensors: until all know it, only the host gets
    commands. If workers are on several machines, the host is one that all of them reach."""

    def __init__(self, state: State, outgoing: MessageQueue) -> None:
        self._state = state
        self._outgoing = outgoing

    def add_worker(self, ident: int) -> None:
        """Let a new worker join the store, or start one. If the new worker cannot reach the host, it becomes the host
        itself: the others go on with the old store until the new one is there."""
        worker, host = self._state.workers[ident], self._state.workers.get(self._state.store_host)
        if host is not None and worker.is_reached_from_outside and not host.is_reached_from_outside:
            self._state.set_store(ident, None)
            self._ask_host()
        elif self._state.store is not None:
            self._outgoing.command((ident,), self._state.store)
            self.set_ready((ident,))
        else:
            self.choose_host()

    def choose_host(self) -> None:
        """Choose the worker that hosts the store, and start it there as soon as there is a second worker."""
        workers = self._state.workers
        if not workers or self._state.store is not None:
            return
        if self._state.store_host not in workers:
            reached = [ident for ident, worker in workers.items() if worker.is_reached_from_outside]
            self._state.set_store(min(reached or workers), None)
            if len(workers) > 1:
                self._ask_host()
        elif len(workers) == 2:
            self._ask_host()
        self.set_ready((self._state.store_host,))

    def _ask_host(self) -> None:
        self._state.note_store_host(self._state.store_host)
        self._outgoing.command((self._state.store_host,), WorkerHostStore())

    def lose_host(self) -> None:
        """The host is lost: no worker is ready until another one hosts a new store."""
        self._state.set_store(self._state.store_host, None)
        self._state.set_ready(self._state.workers, ready=False)
        self.choose_host()

    def announce(self, worker: int, ready: StoreReady) -> None:
        """Send the address of the store to all workers. The host may report it twice, or when another worker was chosen
        meanwhile."""
        if not self._state.workers[worker].hosts_store or not 0 < ready.port < 1 << 16:
            raise ProtocolError(f"worker {worker} was not asked for a store, or has none at port {ready.port}")
        if self._state.store is not None or worker != self._state.store_host:
            return
        store = WorkerJoinStore(self._state.workers[worker].address, ready.port, worker, ready.token)
        self._state.set_store(self._state.store_host, store)
        self._outgoing.command(tuple(self._state.workers), store)
        self.set_ready(self._state.workers)

    def set_ready(self, workers: Iterable[int]) -> None:
        """Send commands to the workers from now on, and notify clients of them."""
        new = [ident for ident in workers if not self._state.workers[ident].ready]
        self._state.set_ready(new)
        for session in self._state.sessions:
            for ident in [ident for ident in new if self._state.workers[ident].leaving is None]:
                self._outgoing.answer(session, Joined(self._state.workers[ident].info))
