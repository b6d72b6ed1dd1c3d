"""Transactions over the state and the queue of outgoing messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gt.dispatcher.message_queue import MessageQueue
from gt.dispatcher.state import State


class Transactions:
    """Commits or rolls back changes of the state together with the messages that they queued."""

    def __init__(self, state: State, outgoing: MessageQueue) -> None:
        self._state = state
        self._outgoing = outgoing

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Commit at the end of the block; an exception rolls back its changes and its messages."""
        start = len(self._outgoing.queued)
        try:
            yield
        except BaseException:
            self.roll_back(start)
            raise
        self._state.commit()
        if self._outgoing.observer is not None:
            self._outgoing.observe_from(start)

    def roll_back(self, start: int) -> None:
        """Undo the changes since the last commit, and drop the queued messages from position `start` on."""
        self._state.roll_back()
        del self._outgoing.queued[start:]
