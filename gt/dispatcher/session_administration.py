"""Lists the sessions of a server for its clients, and decides who may end which."""

from __future__ import annotations

import time
from collections import Counter

from gt.core.ids import session_of
from gt.core.messages import ListedSession
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.peers import Peer, PeerTable
from gt.wire.authentication import OWN_USER
from gt.wire.process_identity import host_name

LIST_SECONDS = 0.2  # a list of this age is given again: adding up all tensors takes time


class SessionAdministration:
    """The list of sessions, and the times at which they began."""

    def __init__(self, dispatcher: Dispatcher, peers: PeerTable) -> None:
        self._dispatcher = dispatcher
        self._peers = peers
        self._listed: tuple[ListedSession, ...] = ()
        self._listed_at = float("-inf")

    def list_for(self, asker: Peer) -> tuple[ListedSession, ...]:
        """All sessions of other processes, without that of the asker."""
        now = time.monotonic()
        if now - self._listed_at > LIST_SECONDS:
            self._listed, self._listed_at = tuple(self._list(now)), now
        return tuple([each for each in self._listed if each.session != asker.ident])

    def _list(self, now: float) -> list[ListedSession]:
        state = self._dispatcher.state
        tensors = Counter(map(session_of, state.tensors))
        held: dict[int, Counter[int]] = {}
        copies = [(copy, state.tensors[ident].meta, spec) for copy, (ident, spec) in state.copy_order.items()]
        records = [(ident, tensor.nbytes, tensor.spec) for ident, tensor in state.tensors.items()]
        records += [(copy, state.copy_size(meta, spec), spec) for copy, meta, spec in copies]
        for ident, nbytes, spec in records:
            counted = held.setdefault(session_of(ident), Counter())
            for worker in spec.mesh.workers:
                counted[worker] += nbytes
        requests, queued = Counter(map(session_of, state.pending)), self._dispatcher.queued()
        peers = [peer for peer in self._peers.by_identity.values() if peer.is_client]
        found = []
        for peer in sorted(peers, key=lambda peer: peer.ident):
            in_flight = peer.backpressure.queued + queued.get(peer.ident, 0) + requests[peer.ident]
            found.append(
                ListedSession(
                    peer.ident,
                    peer.key,
                    peer.hello.hostname or host_name(),
                    peer.hello.pid,
                    peer.hello.program,
                    now - peer.joined_at,
                    tensors[peer.ident],
                    tuple(sorted(held.get(peer.ident, {}).items())),
                    in_flight,
                    "lost" if peer.lost else "working" if in_flight else "idle",
                )
            )
        return found

    def find(self, asker: Peer, session: int) -> Peer | str:
        """The client of a session that the asker may end; or why it may not."""
        if session == asker.ident:
            return f"session {session} is that of the client that asks; it ends by a goodbye"
        peer = self._peers.client(session)
        if peer is None:
            return f"there is no session {session}; list them with: python -m gt.scripts.sessions"
        if asker.key not in (peer.key, OWN_USER):
            return (
                f"session {session} is one of the key {peer.key!r}, and this is the key {asker.key!r}; a session is "
                f"ended by its own key, or by the user of the server on the server's machine"
            )
        return peer
