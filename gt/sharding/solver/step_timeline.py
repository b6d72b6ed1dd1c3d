"""The time of a step on one worker: what it computes, and how long it waits for exchanges that go on meanwhile."""

from __future__ import annotations

from collections.abc import Iterable


class StepTimeline:
    """Adds up the time of ops on a worker and of exchanges on its link, each one after the other. `overlap` is the
    share of an exchange's time in which the worker can compute; the rest takes the worker too. `waits` are the seconds
    for which each exchange keeps the worker from computing, in the order in which they began."""

    def __init__(self, overlap: float) -> None:
        self.waits: list[float] = []
        self.compute_seconds = 0.0
        self._overlap = overlap
        self._now = 0.0
        self._ends: list[float] = []  # end of each exchange
        self._done = 0  # exchanges that the worker has waited for
        self._exchange_of: dict[int, int] = {}  # number of the exchange that gives a tensor

    def compute(self, seconds: float) -> None:
        self.compute_seconds += seconds
        self._now += seconds

    def exchange(self, seconds: float) -> None:
        """An exchange that the worker waits for, after those that have begun."""
        self._wait_until(len(self._ends))
        self._add(seconds, seconds)

    def begin(self, seconds: float, results: Iterable[int]) -> None:
        """An exchange that goes on while the worker computes, until one of its results is needed."""
        self._add(seconds, (1 - self._overlap) * seconds)
        self._exchange_of.update(dict.fromkeys(results, len(self._ends)))

    def need(self, idents: Iterable[int]) -> None:
        """Wait for the exchanges that give some tensors, and so for those before them."""
        if self._exchange_of:
            self._wait_until(max([self._exchange_of.pop(ident, 0) for ident in idents], default=0))

    def finish(self) -> None:
        """Wait for all exchanges."""
        self._wait_until(len(self._ends))
        self._exchange_of.clear()

    def _add(self, seconds: float, busy: float) -> None:
        """An exchange that begins when the link is free, and takes the worker for `busy` seconds."""
        self._ends.append(max(self._now, self._ends[-1] if self._ends else 0.0) + seconds)
        self.waits.append(busy)
        self._now += busy

    def _wait_until(self, count: int) -> None:
        while self._done < count:
            wait = max(0.0, self._ends[self._done] - self._now)
            self.waits[self._done] += wait
            self._now += wait
            self._done += 1
