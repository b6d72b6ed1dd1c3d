"""Recordings of the traffic between workers. Several may go on at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from gt.core.messages import Collective, ExchangeWay, TrafficRead

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
    """The dispatcher notes collectives while one recording is open, and gives each away once: to the read that comes
    next. `read_traffic` reads, and says whether they are noted from now on."""

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
