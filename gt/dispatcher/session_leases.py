"""Sessions whose connection is lost: each is kept for the time of its lease, for a client that connects again."""

from __future__ import annotations

import hmac
import logging
import math
import secrets
from typing import NamedTuple

from gt.core.errors import ProtocolError
from gt.core.ids import session_of
from gt.core.messages import Resume
from gt.core.tables import print_bytes
from gt.dispatcher.peers import Peer, PeerTable
from gt.dispatcher.state import State

log = logging.getLogger("gt.dispatcher")

_REMEMBERED = 1 << 10  # sessions that were ended without their clients


class _EndedSession(NamedTuple):
    """A session that was ended without its client, which may ask for it: `token` and `key` are the client's."""

    token: str
    key: str
    reason: str


class SessionLeases:
    """Keeps sessions without a connection for `seconds`. `server` identifies this process to clients that reconnect."""

    def __init__(self, peers: PeerTable, seconds: float) -> None:
        self.server = secrets.token_hex(8)
        self.seconds = seconds
        self._peers = peers
        self._ended: dict[int, _EndedSession] = {}

    def begin(self, peer: Peer, now: float, cause: str) -> None:
        """The connection of a client is lost."""
        peer.kept_until = now + self.seconds
        log.warning(
            "client %d (%s) is cut off: %s; its session is kept for %g s", peer.ident, peer.process, cause, self.seconds
        )

    def end(self, peer: Peer, now: float) -> None:
        """The client has a new connection."""
        if peer.lost:
            log.warning("client %d (%s) is back after %.1f s", peer.ident, peer.process, self._away(peer, now))
        peer.lost, peer.kept_until = False, math.inf

    def _away(self, peer: Peer, now: float) -> float:
        return now - (peer.kept_until - self.seconds)

    def note_ended(self, peer: Peer, reason: str) -> None:
        """A session was ended without its client, which gets the reason if it connects again."""
        self._ended[peer.ident] = _EndedSession(peer.session_secret, peer.key, reason)
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def find(self, resume: Resume, key: str) -> Peer | str:
        """The client that a Resume of the peer with this key belongs to, or why there is none. Raises ProtocolError if
        its session is another's."""
        if resume.server != self.server:
            return "the server was started again since, and has no session of before"
        peer = self._peers.client(resume.session)
        ended = self._ended.get(resume.session)
        if peer is not None:
            owner = (peer.session_secret, peer.key)
        elif ended is not None:
            owner = (ended.token, ended.key)
        else:
            return f"the server has no session {resume.session}"
        if not hmac.compare_digest(resume.token.encode(), owner[0].encode()) or key != owner[1]:
            raise ProtocolError(f"session {resume.session} is not one of the peer that asks for it", "foreign")
        return peer if peer is not None else f"the session {ended.reason}" if ended is not None else ""

    def describe_end(self, peer: Peer, state: State) -> str:
        """Why a session is ended whose lease is over, and what is lost."""
        tensors = [tensor for ident, tensor in state.tensors.items() if session_of(ident) == peer.ident]
        held = sum(tensor.nbytes * tensor.spec.mesh.size for tensor in tensors)
        return (
            f"was freed: its client was cut off for {self.seconds:g} s, the time of its lease (GT_LEASE of the "
            f"server); its {len(tensors)} tensors ({print_bytes(held)}) are lost"
        )
