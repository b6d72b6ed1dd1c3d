"""Records when commands ran, for sessions that ask for a timeline. Its `clock` is also the executor's."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TypeAlias, get_args

from gt.core.message_fields import owner_of
from gt.core.messages import RAN_AT_ONCE, Command, QueryOp, Ran, RunOp, Swapped, WorkerCreateTensor
from gt.worker.exchange.local_steps import LocalStep

# by command: its name in a timeline, None if it is not recorded; a command that declares none fails here
_TIMELINE_NAMES: dict[type, str | None] = {kind: kind.timeline_name for kind in get_args(Command)}


Describe: TypeAlias = Callable[[RunOp | QueryOp], tuple[str, str]]
"""The names of the op and of the scope of a command."""


class _TimelineRecording:
    """The recorded commands of one session; `dropped` counts those that came when `limit` were held."""

    def __init__(self) -> None:
        self.limit = 0
        self.ran: deque[Ran] = deque()
        self.dropped = 0


class TimelineRecorder:
    """`is_on` says whether any session asks for a timeline. A worker reads it once per batch, so that recording costs
    nothing while it is off."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.is_on = False
        self.clock = clock
        self._recordings: dict[int, _TimelineRecording] = {}
        self._swaps: list[Swapped] = []

    def take(self, session: int, limit: int) -> tuple[tuple[Ran, ...], int]:
        """The oldest commands recorded, and how many were dropped since the last call. From now on at most `limit` are
        held; 0 ends the recording."""
        recording = self._recordings.setdefault(session, _TimelineRecording())
        taken = tuple(recording.ran.popleft() for _ in range(min(RAN_AT_ONCE, len(recording.ran))))
        dropped, recording.dropped = recording.dropped, 0
        recording.limit = limit
        if not limit and not recording.ran:
            self.forget(session)
        self._update_is_on()
        return taken, dropped

    def forget(self, session: int) -> None:
        self._recordings.pop(session, None)
        self._update_is_on()

    def _update_is_on(self) -> None:
        self.is_on = any(recording.limit for recording in self._recordings.values())

    @contextmanager
    def noting(self, command: Command, describe: Describe) -> Generator[None]:
        """Record the time that a command takes, if its session asks for a timeline."""
        session, op, scope, site = self._session_of(command), "", "", 0
        if session and isinstance(command, RunOp | QueryOp):
            op, scope = describe(command)
            site = command.site
        elif session:
            op = _TIMELINE_NAMES[type(command)] or ""
            site = command.site if isinstance(command, WorkerCreateTensor) else 0
        self._swaps = []
        start = self.clock()
        yield
        end = self.clock()
        if session:
            self._note(self._recordings[session], Ran(op, site, scope, start, end, tuple(self._swaps)))

    def _session_of(self, command: Command) -> int:
        """The session that a command belongs to; 0 if it is not recorded."""
        session = 0 if _TIMELINE_NAMES[type(command)] is None else owner_of(command)
        recording = self._recordings.get(session)
        return session if recording is not None and recording.limit else 0

    def _note(self, recording: _TimelineRecording, ran: Ran) -> None:
        if len(recording.ran) < recording.limit:
            recording.ran.append(ran)
        else:
            recording.dropped += 1

    def note_exchange(self, steps: Sequence[LocalStep], start: int) -> None:
        """Record an exchange that has ended, of the command that is running."""
        sends: Counter[int] = Counter()
        receives: Counter[int] = Counter()
        for step in steps:
            sends.update(step.sent)
            receives.update(step.received)
        self._swaps.append(Swapped(start, self.clock(), tuple(sends.items()), tuple(receives.items())))
