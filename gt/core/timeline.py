"""Commands that workers ran, for clients and the monitor: with times, and the names of their op, line and scope."""

from __future__ import annotations

from typing import NamedTuple


class Transfer(NamedTuple):
    """One exchange of tensors with other workers during a command: its start, its end, and bytes by peer."""

    start: int
    end: int
    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]


class TimelineEvent(NamedTuple):
    """A command that a worker ran. `op` is an aten overload, or `redistribute`, `upload`, `fetch`, `free`, `define`,
    `forget`, `synchronize`. `line` is the line of the user's program and `scope` the signal, empty if there is none.
    `start` and `end` are nanoseconds of the machine's monotonic clock, which its workers share."""

    worker: int
    op: str
    line: str
    scope: str
    start: int
    end: int
    transfers: tuple[Transfer, ...] = ()

    @property
    def waited(self) -> int:
        """Nanoseconds in exchanges, which is mostly waiting for other workers."""
        return sum(transfer.end - transfer.start for transfer in self.transfers)

    @property
    def busy(self) -> int:
        return self.end - self.start - self.waited
