"""Communication between workers: `gt.debug.comm`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import astuple

from gt.client import active_session
from gt.core.messages import Collective, ExchangeWay


class CollectiveEvent(NamedTuple):
    """One collective: its kind, the mesh axes it ran along, the payload bytes that all workers together received, the
    op and line that issued it, the number of tensors that were exchanged together, and the way it went: "shared
    memory", "gloo all-reduce", "gloo point-to-point", ...

    >>> gt.init(workers=2, mode="virtual")
    >>> x = gt.ones(4, mesh=gt.mesh(2, ("tp",)), placements=gt.Partial())
    >>> with gt.debug.comm() as c:
    ...     y = x.relu()
    >>> event = c.events[0]
    >>> event.kind, event.axis, event.op
    ('all-reduce', 'tp', 'aten.relu.default')
    """

    kind: str
    axis: str
    bytes: int
    op: str
    line: str
    tensors: int
    way: str


class Comm:
    """Communication between workers inside `with gt.debug.comm() as c:`. `bytes` is counted by the workers, `pairs` the
    same by (sender, receiver); `events` are the collectives that the dispatcher planned. With `mode="shapes"` nothing
    is sent: `bytes` are those of the events.

    >>> with gt.debug.comm() as c:
    ...     y = gt.ones(2) + 1
    >>> c.bytes, c.pairs, c.count("all-reduce")
    (0, {}, 0)
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.pairs: dict[tuple[int, int], int] = {}
        self.events: list[CollectiveEvent] = []

    def __enter__(self) -> Comm:
        self._session = active_session.current()
        self._recording = self._session.traffic_recordings.begin()
        return self

    def __exit__(self, *error: object) -> None:
        recording = self._recording
        self._session.traffic_recordings.end(recording)
        self.pairs = recording.pairs
        planned = sum(collective.nbytes for collective in recording.collectives)
        self.bytes = sum(self.pairs.values()) if self._session.computes else planned
        ways = _Ways(recording.ways)
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
            for c in recording.collectives
        ]

    def count(self, kind: str) -> int:
        """The number of collectives of a kind."""
        return sum(event.kind == kind for event in self.events)


class _Ways:
    """The ways of collectives. Workers report them for single tensors; a bucket has the ways of its tensors."""

    def __init__(self, reported: Iterable[ExchangeWay]) -> None:
        self._exact: dict[tuple[object, ...], dict[str, None]] = {}
        self._similar: dict[tuple[object, ...], dict[str, None]] = {}
        for kind, axes, nbytes, way in map(astuple, reported):
            self._exact.setdefault((kind, axes, nbytes), {})[way] = None
            self._similar.setdefault((kind, axes), {})[way] = None

    def of(self, collective: Collective) -> str:
        kind, axes = collective.kind, collective.axes
        exact = self._exact.get((kind, axes, collective.nbytes))
        return ", ".join(exact if exact is not None else self._similar.get((kind, axes), {}))


def comm() -> Comm:
    """Record the collectives that run inside: `with gt.debug.comm() as c: ...; print(c.bytes, c.events)`.

    >>> gt.init(workers=2, mode="virtual")
    >>> x = gt.ones(4, 2, mesh=gt.mesh(2), placements=gt.Shard(0))
    >>> with gt.debug.comm() as c:
    ...     y = x.redistribute()
    >>> [(event.kind, event.bytes) for event in c.events]
    [('all-gather', 32)]
    """
    return Comm()
