"""Events for the monitor: messages that the dispatcher receives or sends, and the work of clients and workers.

All times are nanoseconds of the machine's monotonic clock.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from gt.core.ids import Id
from gt.core.messages import Answer, Command, Hello, Instruction, Ran, Report, StoreReady

Direction: TypeAlias = Literal["RECV", "SEND", "WORKER_SEND", "WORKER_RECV", "CONNECT", "DISCONNECT"]
Details: TypeAlias = tuple[tuple[str, str], ...]
"""Names and values that describe a message to a reader: `(("shape", "4x8"), ("spec", "x,-"))`."""


class TensorCreated(msgspec.Struct, frozen=True, tag="WorkerCreateTensor"):
    """A command creates a tensor on a worker without an upload: the op has no tensors as inputs. Not sent: a log shows
    it after the command, under the name of the command that uploads a tensor."""

    id: Id


ObservedMessage: TypeAlias = Instruction | Command | Report | Answer | Hello | StoreReady | TensorCreated


class Event(msgspec.Struct, frozen=True):
    """A message as an observer sees it. `peer` is `client 3` or `worker 0`; `op` and `site` are the names of the
    message's op and line, for a reader. `time` is 0 if it is now."""

    direction: Direction
    peer: str
    message: ObservedMessage | None
    op: str
    site: str
    time: int = 0
    details: Details = ()


class BatchPlanned(msgspec.Struct, frozen=True, tag=True):
    """The dispatcher has planned a batch of instructions of a session."""

    session: int
    start: int
    end: int
    instructions: int


class WorkerRan(msgspec.Struct, frozen=True, tag=True):
    """A worker has run a command, for a line of the user's program."""

    worker: int
    ran: Ran
    site: str


class WorkerSampled(msgspec.Struct, frozen=True, tag=True):
    """The bytes of all tensors that a worker held at a time."""

    worker: int
    time: int
    nbytes: int


class OpIssued(msgspec.Struct, frozen=True, tag=True):
    """A client has issued an op that makes a tensor with this id."""

    session: int
    time: int
    op: str
    site: str
    output: int


class ProgramWaited(msgspec.Struct, frozen=True, tag=True):
    """A line of a program has waited for a value."""

    session: int
    start: int
    end: int
    site: str


MonitorEvent: TypeAlias = Event | BatchPlanned | WorkerRan | WorkerSampled | OpIssued


class Captured(NamedTuple):
    """The events of a capture, the number of those that there was no room for, and the workers whose commands are
    missing because they did not send them in time."""

    events: list[MonitorEvent]
    dropped: int
    missing: tuple[int, ...]


class Captures(Protocol):
    """Captures the events of a dispatcher: `begin` with a limit of their number, `end` with the seconds that it may
    wait for the workers."""

    def begin(self, limit: int) -> None: ...
    def end(self, seconds: float) -> Captured: ...


class Observer(Protocol):
    """Receives every event of a dispatcher; `path` is the file that it writes to, if any."""

    def __call__(self, event: Event) -> None: ...

    @property
    def path(self) -> str: ...
    def close(self) -> None: ...


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
