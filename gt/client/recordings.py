"""Recordings of the commands that workers run for a program, of its waits, and of the traffic between workers. Several
may go on at the same time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping

from gt.core.messages import Collective, ExchangeWay, Ran, TimelineRead, TrafficRead

Pairs = Mapping[tuple[int, int], int]
"""Bytes by sender and receiver."""


class TrafficRecording:
    """The bytes, the collectives, and the ways of the latest collectives, from `TrafficRecordings.begin` to `end`."""

    def __init__(self) -> None:
        self.before: Pairs = {}
        self.pairs: dict[tuple[int, int], int] = {}
        self.collectives: list[Collective] = []
        self.ways: tuple[ExchangeWay, ...] = ()


class TrafficRecordings:
    """The open recordings of traffic. While there is one the dispatcher notes collectives, and gives each away once, to
    the next read. `read_traffic` reads, and says whether they are noted from now on."""

    def __init__(self, read_traffic: Callable[[bool], TrafficRead]) -> None:
        self._read_traffic = read_traffic
        self._open: list[TrafficRecording] = []
        self._lock = threading.RLock()  # a read and the change of `_open` belong together

    def begin(self) -> TrafficRecording:
        recording = TrafficRecording()
        with self._lock:
            recording.before = _by_pair(self._take(watch=True))
            self._open.append(recording)
        return recording

    def end(self, recording: TrafficRecording) -> None:
        """Take what the dispatcher has noted; the other recordings go on."""
        with self._lock:
            try:
                answer = self._take(watch=len(self._open) > 1)
            finally:
                self._open.remove(recording)
        moved = {pair: count - recording.before.get(pair, 0) for pair, count in _by_pair(answer).items()}
        recording.pairs = {pair: count for pair, count in moved.items() if count}
        recording.ways = answer.ways

    def _take(self, *, watch: bool) -> TrafficRead:
        answer = self._read_traffic(watch)
        for recording in self._open:
            recording.collectives += answer.collectives
        return answer


def _by_pair(answer: TrafficRead) -> Pairs:
    return {(sender, worker): count for worker, by in answer.received.items() for sender, count in by.items()}


class CommandRecording:
    """The commands of each worker from `CommandRecordings.begin` to `end`, in the order of each worker; at most `limit`
    of each worker, the others are counted in `dropped`. `memory` has samples of each worker's memory: worker, time and
    bytes. `waits` are the start, the end and the site of each wait of the program for an answer."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.ran: list[tuple[int, Ran]] = []
        self.memory: list[tuple[int, int, int]] = []
        self.waits: list[tuple[int, int, int]] = []
        self.dropped = 0
        self._counts: Counter[int] = Counter()

    def add(self, worker: int, ran: tuple[Ran, ...]) -> None:
        room = max(0, self.limit - self._counts[worker])
        self._counts[worker] += len(ran)
        self.ran += [(worker, each) for each in ran[:room]]
        self.dropped += max(0, len(ran) - room)


class CommandRecordings:
    """The open recordings of commands, which workers record while there is one. `read_timeline` takes commands from
    them, and says how many each may hold from now on."""

    def __init__(self, read_timeline: Callable[[int], TimelineRead]) -> None:
        self._read_timeline = read_timeline
        self._open: list[CommandRecording] = []
        self._lock = threading.RLock()  # a read and the change of `_open` belong together

    def __bool__(self) -> bool:
        return bool(self._open)

    def begin(self, limit: int) -> CommandRecording:
        with self._lock:
            self._take_all()  # commands of open recordings, or left by one whose end could not be read
            recording = CommandRecording(limit)
            self._open.append(recording)
            try:
                self._read_timeline(self._limit())
            except BaseException:
                self._open.remove(recording)
                raise
            return recording

    def end(self, recording: CommandRecording) -> None:
        """Take what the workers have recorded; the other recordings go on."""
        with self._lock:
            try:
                self._take_all(without=recording)
            finally:
                self._open.remove(recording)

    def note_wait(self, start: int, end: int, site: int) -> None:
        for recording in self._open:
            recording.waits.append((start, end, site))

    def _limit(self, without: CommandRecording | None = None) -> int:
        return max((each.limit for each in self._open if each is not without), default=0)

    def _take_all(self, without: CommandRecording | None = None) -> None:
        """Take all commands for the open recordings. From now on the workers record for all but one of these."""
        limit, found = self._limit(without), True
        while found:
            found = False
            for timeline in self._read_timeline(limit).workers:
                found = found or bool(timeline.ran)
                for recording in self._open:
                    recording.add(timeline.worker, timeline.ran)
                    recording.memory += [(timeline.worker, *sample) for sample in timeline.memory]
                    recording.dropped += timeline.dropped
