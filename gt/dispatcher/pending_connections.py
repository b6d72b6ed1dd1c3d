"""Connections that belong to no client or worker: those without a hello yet, and those that are about to be closed."""

from __future__ import annotations

MAX_MALFORMED = 3  # malformed messages after which a peer is disconnected
_PARTING_SECONDS = 5.0  # for a peer to receive its last message


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
