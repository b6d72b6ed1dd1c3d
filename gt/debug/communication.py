"""Communication between workers: `gt.debug.comm`."""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import astuple

from gt.client import active_session
from gt.core.messages import Collective, TrafficRead


class CollectiveEvent(NamedTuple):
    """One collective: its kind, the mesh axes it ran along, the payload bytes that all workers together received, the
    op and line that issued it, the number of tensors that were exchanged together, and the way it went: "shared
    memory", "gloo all-reduce", "gloo point-to-point", ..."""

    kind: str
    axis: str
    bytes: int
    op: str
    line: str
    tensors: int
    way: str


class Comm:
    """Communication between workers inside `with gt.debug.comm() as c:`. `bytes` is counted by the workers, `pairs` the
    same by (sender, receiver); `events` are the collectives that the dispatcher planned."""

    def __init__(self) -> None:
        self.bytes = 0
        self.pairs: dict[tuple[int, int], int] = {}
        self.events: list[CollectiveEvent] = []

    def __enter__(self) -> Comm:
        self._session = active_session.current()
        self._before = _by_pair(self._session.read_traffic(watch=True))
        return self

    def __exit__(self, *error: object) -> None:
        answer = self._session.read_traffic(watch=False)
        after = _by_pair(answer)
        self.pairs = {pair: count - self._before.get(pair, 0) for pair, count in after.items()}
        self.pairs = {pair: count for pair, count in self.pairs.items() if count}
        self.bytes = sum(self.pairs.values())
        ways = _Ways(answer)
        self.events = [
            CollectiveEvent(
                c.kind,
                " ".join(c.axes),
                c.nbytes,
                c.op,
                self._session.sites.text(c.site),
                c.tensors,
                ways.of(c),
            )
            for c in answer.collectives
        ]

    def count(self, kind: str) -> int:
        """The number of collectives of a kind."""
        return sum(event.kind == kind for event in self.events)


class _Ways:
    """The ways of collectives. Workers report them for single tensors; a bucket has the ways of its tensors."""

    def __init__(self, answer: TrafficRead) -> None:
        self._exact: dict[tuple[object, ...], dict[str, None]] = {}
        self._similar: dict[tuple[object, ...], dict[str, None]] = {}
        for kind, axes, nbytes, way in map(astuple, answer.ways):
            self._exact.setdefault((kind, axes, nbytes), {})[way] = None
            self._similar.setdefault((kind, axes), {})[way] = None

    def of(self, collective: Collective) -> str:
        kind, axes = collective.kind, collective.axes
        exact = self._exact.get((kind, axes, collective.nbytes))
        return ", ".join(exact if exact is not None else self._similar.get((kind, axes), {}))


def comm() -> Comm:
    """Record the collectives that run inside: `with gt.debug.comm() as c: ...; print(c.bytes, c.events)`."""
    return Comm()


def _by_pair(answer: TrafficRead) -> dict[tuple[int, int], int]:
    return {(sender, worker): count for worker, by in answer.received.items() for sender, count in by.items()}
