"""Peers that leave: their process or connection has ended, or they are dropped or dismissed."""

from __future__ import annotations

import logging
import os
import signal
import time

from gt.core.errors import ProtocolError
from gt.core.messages import Refused, SessionEnded, WorkerShutdown
from gt.dispatcher.delivery import Delivery
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.handshakes import internal_errors_logged
from gt.dispatcher.peers import Peer, PeerTable
from gt.dispatcher.session_leases import SessionLeases
from gt.dispatcher.worker_activity import WorkerActivity
from gt.version import __version__
from gt.wire import shared_memory
from gt.wire.process_identity import is_stopped, start_mark
from gt.wire.refusals import Refusals

MAX_MALFORMED = 3  # malformed messages after which a peer is disconnected
_PARTING_SECONDS = 5.0  # time for a peer to receive its last message


class PendingConnections:
    """Connections by the identities that the router gives them. Messages of those in `leaving` are ignored."""

    def __init__(self) -> None:
        self.leaving: dict[bytes, float] = {}  # the time at which each is closed
        self._malformed: dict[bytes, int] = {}

    def note_malformed_message(self, identity: bytes, now: float) -> None:
        """A connection has sent something other than a hello."""
        self._malformed[identity] = self._malformed.get(identity, 0) + 1
        if self._malformed[identity] >= MAX_MALFORMED:
            self.close_soon(identity, now)

    def close_soon(self, identity: bytes, now: float) -> None:
        self.leaving[identity] = now + _PARTING_SECONDS

    def take_due(self, now: float) -> list[bytes]:
        """The connections to close now. They stay in `leaving` until the router reports their end."""
        return [identity for identity, when in self.leaving.items() if when <= now]

    def forget(self, identity: bytes) -> None:
        """A connection has ended."""
        self.leaving.pop(identity, None)
        self._malformed.pop(identity, None)


log = logging.getLogger("gt.dispatcher")


class Departures:
    """Removes peers that have left, and those that are silent for `silence_limit` seconds. `killed` are the processes
    of workers that were stopped for that long, and killed."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        peers: PeerTable,
        delivery: Delivery,
        leases: SessionLeases,
        pending_connections: PendingConnections,
        activity: WorkerActivity,
        refusals: Refusals,
        silence_limit: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._peers = peers
        self._delivery = delivery
        self._leases = leases
        self._pending_connections = pending_connections
        self._activity = activity
        self._refusals = refusals
        self._silence_limit = silence_limit
        self.killed: set[int] = set()

    def note_connection_end(self, identity: bytes) -> None:
        """A worker is dropped at the next check, after its earlier messages were read; a client after its lease."""
        self._pending_connections.forget(identity)
        peer = self._peers.by_identity.get(identity)
        if peer is None or peer.lost:
            return
        peer.lost = True
        if peer.is_client:
            cause = f"its connection was closed, or silent for {self._silence_limit:g} s (GT_HEARTBEAT_TIMEOUT)"
            self._leases.begin(peer, time.monotonic(), cause)

    def reap(self, peer: Peer) -> None:
        """The process of a peer has ended."""
        self.forget(peer)
        with internal_errors_logged("the removal of shared memory"):
            if not start_mark(peer.hello.pid):  # no new process has its pid
                shared_memory.sweep(peer.hello.pid)
        if peer.is_client:
            self._end_session(peer)
        else:
            self._lose_worker(peer, "has ended without a goodbye (killed, or crashed)")

    def give_up_worker(self, peer: Peer) -> None:
        """A stopped worker is killed, because others may be in the middle of an exchange with it: but not by its word,
        which may name any process. Any other worker notices that its connection has ended and joins again."""
        reason = f"is gone: its connection was closed, or silent for {self._silence_limit:g} s (GT_HEARTBEAT_TIMEOUT)"
        if peer.is_of_this_machine and peer.proven_pid == peer.hello.pid and is_stopped(peer.hello.pid):
            reason = f"was stopped for {self._silence_limit:g} s (GT_HEARTBEAT_TIMEOUT), and ended for that"
            self.killed.add(peer.hello.pid)
            with internal_errors_logged(f"the end of worker {peer.ident}"):
                os.kill(peer.hello.pid, signal.SIGKILL)
        elif not peer.is_of_this_machine:
            reason = "is gone: its connection was closed (it was killed, or has crashed)"
            if self._activity.is_long(peer.silence):
                reason = (
                    f"was silent for {self._silence_limit:g} s (GT_HEARTBEAT_TIMEOUT): its machine or network is down, "
                    f"or it was stopped"
                )
        self.forget(peer)
        self._lose_worker(peer, reason)

    def give_up_client(self, peer: Peer, reason: str, kind: type[Refused] | type[SessionEnded] = Refused) -> None:
        log.warning("client %d (%s) %s", peer.ident, peer.process, reason)
        identity = self._peers.clients[peer.ident]
        with internal_errors_logged("a refusal"):
            self._delivery.send_last(identity, kind(f"the session {reason} (server: GT {__version__})"))
        self._leases.note_ended(peer, reason)
        self.forget(peer)
        if not peer.lost:
            self._pending_connections.close_soon(identity, time.monotonic())
        self._end_session(peer)

    def give_up_lease(self, peer: Peer) -> None:
        """A client was cut off for longer than its lease."""
        self.give_up_client(peer, self._leases.describe_end(peer, self._dispatcher.state))

    def give_up_over_limit(self, peer: Peer, error: ProtocolError) -> None:
        """A client asks for more than it takes, or sends more than is kept for it."""
        identity = self._peers.clients[peer.ident]
        self._refusals.note(error.kind, identity.hex(), f"a message of client {peer.ident}: {error}")
        self.give_up_client(peer, f"was ended: {error}")

    def dismiss(self, peer: Peer, reason: str) -> None:
        """Ask an unreliable worker to end, and treat it as lost."""
        identity = self._peers.workers[peer.ident]
        self._delivery.send_to(identity, [WorkerShutdown()])
        self.forget(peer)
        self._pending_connections.close_soon(identity, time.monotonic())
        self._lose_worker(peer, reason)

    def forget(self, peer: Peer) -> None:
        self._peers.remove(peer)
        log.info("%s %d has left", peer.hello.role, peer.ident)

    def _end_session(self, peer: Peer) -> None:
        with internal_errors_logged(f"the end of client {peer.ident}"):
            self._delivery.send(self._dispatcher.end_session(peer.ident))

    def _lose_worker(self, peer: Peer, reason: str) -> None:
        if not peer.is_of_this_machine:
            reason = f"on {peer.hello.hostname or 'another machine'} {reason}"
        try:
            last = self._dispatcher.describe_op(*peer.progress[:2])
            log.warning("worker %d (pid %d) %s; its last op was %s", peer.ident, peer.hello.pid, reason, last or "none")
            self._delivery.send(self._dispatcher.lose_worker(peer.ident, reason, last, peer.progress[0]))
        except Exception:  # an internal error: the other peers are served
            log.exception("the loss of worker %d could not be dealt with", peer.ident)
            with internal_errors_logged("the messages about a lost worker"):
                self._delivery.send(self._dispatcher.take())
