"""Counts the bytes that a worker exchanges with others, as plans count them, and notes the ways they came."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gt.core.messages import MAX_WAYS, ExchangeWay
from gt.worker.exchange.interface import Exchange
from gt.worker.exchange.local_steps import LocalStep

_MAX_STEPS = 4096


class TrafficCount:
    """Counts how often each local step ran, and the bytes by sender only when asked: a step may have hundreds of
    senders. `sent` is the sum for all receivers, when the bytes were last asked for."""

    def __init__(self) -> None:
        self._runs: Counter[LocalStep] = Counter()
        self._nbytes: Counter[int] = Counter()
        self.sent = 0
        self._latest: dict[tuple[str, tuple[str, ...], int], LocalStep] = {}

    def add(self, steps: Iterable[LocalStep]) -> None:
        for step in steps:
            self._runs[step] += 1
            self._latest[step.kind, step.reshard_step.axes, step.nbytes] = step
        if len(self._runs) > _MAX_STEPS:  # steps of programs that are forgotten must not be kept
            self.by_peer()
        while len(self._latest) > MAX_WAYS:
            del self._latest[next(iter(self._latest))]

    def ways(self, exchange: Exchange) -> tuple[ExchangeWay, ...]:
        """The ways of the latest collectives."""
        return tuple(ExchangeWay(*collective, exchange.way_of(step)) for collective, step in self._latest.items())

    def by_peer(self) -> dict[int, int]:
        """The bytes received since the worker began, by sender."""
        for step, runs in self._runs.items():
            self.sent += runs * sum(step.sent.values())
            for peer, nbytes in step.received.items():
                self._nbytes[peer] += runs * nbytes
        self._runs.clear()
        return dict(self._nbytes)
