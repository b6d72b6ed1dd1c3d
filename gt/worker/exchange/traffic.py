"""Counts the bytes that a worker receives from others, as plans count them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gt.worker.exchange.step_parts import StepPart

_MAX_PARTS = 4096


class TrafficCount:
    """Counts how often each part of a move ran, and the bytes by sender only when asked: a part may have hundreds of
    senders."""

    def __init__(self) -> None:
        self._runs: Counter[StepPart] = Counter()
        self._nbytes: Counter[int] = Counter()

    def add(self, parts: Iterable[StepPart]) -> None:
        for part in parts:
            self._runs[part] += 1
        if len(self._runs) > _MAX_PARTS:  # parts of programs that are forgotten must not be kept
            self.by_peer()

    def by_peer(self) -> dict[int, int]:
        """The bytes received since the worker began, by sender."""
        for part, runs in self._runs.items():
            for peer, nbytes in part.received.items():
                self._nbytes[peer] += runs * nbytes
        self._runs.clear()
        return dict(self._nbytes)
