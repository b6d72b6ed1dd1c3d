"""A command that a worker ran, as a client and the monitor see it: codes resolved, times as the worker took them."""

from __future__ import annotations

from typing import NamedTuple


class Transfer(NamedTuple):
    """A point at which a command exchanged tensors with other workers: from when to when, and bytes by peer."""

    start: int
    end: int
    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]


class TimelineEvent(NamedTuple):
    """`op` is an aten overload, or `redistribute`, `upload`, `fetch`, `free`, `define`, `forget`, `synchronize`; `line`
    is the user's and `scope` the signal it ran in, both empty where there is none. `start` and `end` are nanoseconds of
    the machine's monotonic clock: they compare among the workers of one machine."""

    worker: int
    op: str
    line: str
    scope: str
    start: int
    end: int
    transfers: tuple[Transfer, ...] = ()

    @property
    def waited(self) -> int:
        """How long it was in exchanges, which is mostly waiting for others."""
        return sum([transfer.end - transfer.start for transfer in self.transfers])

    @property
    def busy(self) -> int:
        return self.end - self.start - self.waited
