"""What workers are doing, for clients that wait for them and for `gt.workers()`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gt.core import worker_progress
from gt.core.errors import ProtocolError
from gt.core.messages import Activity, Waiting
from gt.dispatcher.delivery import Delivery
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.handshakes import internal_errors_logged
from gt.dispatcher.message_queue import ToClient
from gt.dispatcher.peers import NO_PROGRESS, Peer, PeerTable
from gt.dispatcher.status import read_unlocked
from gt.wire.connections import Router
from gt.wire.process_identity import is_stopped

MAX_DESCRIBED = 16  # workers that are described to a client that waits for them
_BUSY_NANOSECONDS = 1_000_000_000  # a worker with the same commands for this long is listed as busy


class WorkerActivity:
    """What each worker does, for waiting clients and `gt.workers()`. Peers silent for `silence_limit` s are dropped."""

    def __init__(
        self, dispatcher: Dispatcher, peers: PeerTable, delivery: Delivery, router: Router, silence_limit: float
    ) -> None:
        self._dispatcher = dispatcher
        self._peers = peers
        self._delivery = delivery
        self._router = router
        self._silence_limit = silence_limit

    def note(self, peer: Peer, activity: Activity) -> None:
        """A worker of another machine says what it does. Those of this machine show it in shared memory."""
        if len(activity.words) != worker_progress.LENGTH:
            raise ProtocolError(f"{len(activity.words)} words do not say what a worker does")
        if not peer.is_of_this_machine:
            words = list(activity.words)
            words[worker_progress.SINCE] = time.monotonic_ns() - words[worker_progress.SINCE]
            peer.progress = tuple(words)

    def read_progress(self) -> dict[int, Sequence[int]]:
        """The progress of all workers that show it; any thread may ask."""
        peers = read_unlocked(lambda: list(self._peers.by_identity.values()))
        return {peer.ident: peer.progress for peer in peers if not peer.is_client and peer.progress is not NO_PROGRESS}

    def explain_waits(self) -> None:
        """Tell waiting clients which workers they wait for, and the current op of each."""
        for session, workers in self._dispatcher.waits().items():
            peer = self._peers.client(session)
            if peer is not None and peer.lost:
                continue
            with internal_errors_logged(f"telling client {session} for whom it waits"):
                present = [worker for worker in sorted(workers) if worker in self._peers.workers]
                described = [self.describe(worker, session) for worker in present[:MAX_DESCRIBED]]
                if len(present) > MAX_DESCRIBED:
                    described.append(f"and {len(present) - MAX_DESCRIBED} more")
                self._delivery.send([ToClient(session, Waiting(f"for {', '.join(described)}"))])

    def describe(self, worker: int, session: int) -> str:
        """What a worker does, for a session that waits for it."""
        peer = self._peers.by_identity[self._peers.workers[worker]]
        described = self._dispatcher.describe_op_to(session, *peer.progress[:2])
        is_at = "was stopped at" if peer.is_of_this_machine and is_stopped(peer.hello.pid) else "is at"
        where = "" if peer.is_of_this_machine else f" on {peer.hello.hostname or 'another machine'}"
        return f"worker {worker}{where}, which {is_at} {described or 'its start'}"

    def describe_state(self, worker: int) -> str:
        """The state of a worker that is ready, for `gt.workers()`."""
        identity = self._peers.workers.get(worker)
        if identity is None:
            return "ready"
        peer = self._peers.by_identity[identity]
        self.note_silence(peer)
        if self.is_long(peer.silence):
            return f"silent for {peer.silence:.0f} s"
        if peer.is_of_this_machine and is_stopped(peer.hello.pid):
            return "stopped"
        lasts = time.monotonic_ns() - peer.progress[worker_progress.SINCE]
        is_busy = peer.progress[worker_progress.STATE] != worker_progress.IDLE and lasts > _BUSY_NANOSECONDS
        return "busy" if is_busy else "ready"

    def note_silence(self, peer: Peer) -> None:
        """Note for how long nothing has come from a worker of another machine."""
        silence = None if peer.is_of_this_machine else self._router.silence_of(self._peers.workers[peer.ident])
        if silence is not None:
            peer.silence = silence

    def is_long(self, silence: float) -> bool:
        """Whether heartbeats were not answered. They are sent four times within the limit."""
        return 0 < self._silence_limit / 2 < silence
