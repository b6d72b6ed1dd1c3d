"""Connections that belong to no client or worker: those that have not said hello, and those that are to be closed."""

from __future__ import annotations

MISTAKES = 3  # malformed messages after which a peer is no longer listened to
_PARTING_SECONDS = 5.0  # for a peer to take what it was told last


class Strangers:
    """Connections by the names that the router gives them. One that is `leaving` is not listened to."""

    def __init__(self) -> None:
        self.leaving: dict[bytes, float] = {}  # when each is closed
        self._mistakes: dict[bytes, int] = {}

    def note_mistake(self, name: bytes, now: float) -> None:
        """A connection without a hello has sent something else."""
        self._mistakes[name] = self._mistakes.get(name, 0) + 1
        if self._mistakes[name] >= MISTAKES:
            self.part(name, now)

    def part(self, name: bytes, now: float) -> None:
        """Close a connection soon."""
        self.leaving[name] = now + _PARTING_SECONDS

    def take_due(self, now: float) -> list[bytes]:
        """The connections that are to be closed now. They stay in `leaving` until they are lost."""
        return [name for name, when in self.leaving.items() if when <= now]

    def forget(self, name: bytes) -> None:
        """A connection is lost, or was taken for a client or worker."""
        self.leaving.pop(name, None)
        self._mistakes.pop(name, None)
