"""The latest messages that were sent for a session. They are kept as they are, and told as events when asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from gt.core.messages import Command
from gt.dispatcher.message_descriptions import expand_command
from gt.dispatcher.message_queue import Outgoing, ToWorkers
from gt.dispatcher.session_records import SessionRecord

KEPT = 4096  # messages of a session; a segment is one


class RecentMessages:
    """Whole batches of messages, the latest of them with KEPT messages in all or fewer."""

    def __init__(self) -> None:
        self._batches: deque[Sequence[Outgoing]] = deque()
        self._count = 0

    def add(self, sent: Sequence[Outgoing], *, has_bytes: bool) -> None:
        """Called for each batch. The bytes of uploads are not kept."""
        if has_bytes:
            sent = [replace(each, buffer=None) if isinstance(each, ToWorkers) else each for each in sent]
        self._batches.append(sent)
        self._count += len(sent)
        while self._count > KEPT:
            self._count -= len(self._batches.popleft())

    def commands(self, session: SessionRecord) -> Iterator[tuple[tuple[int, ...], Command]]:
        """The commands, with those of segments one by one, and their workers."""
        for sent in self._batches:
            for message in sent:
                if isinstance(message, ToWorkers):
                    for command in expand_command(session, message.command):
                        yield message.workers, command
