"""Events for the monitor: one for each message that the dispatcher receives or sends."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

import msgspec

from gt.core.messages import Answer, Command, Hello, Instruction, Report, StoreReady

Direction: TypeAlias = Literal["RECV", "SEND", "WORKER_SEND", "WORKER_RECV", "CONNECT", "DISCONNECT"]
ObservedMessage: TypeAlias = Instruction | Command | Report | Answer | Hello | StoreReady


class Event(msgspec.Struct, frozen=True):
    """`peer` is `client 3` or `worker 0`; `op` and `site` are the names of the message's op and line, for a reader."""

    direction: Direction
    peer: str
    message: ObservedMessage | None
    op: str
    site: str


class Observer(Protocol):
    """Receives every event of a dispatcher; `path` is the file that it writes to, if any."""

    def __call__(self, event: Event) -> None: ...

    @property
    def path(self) -> str: ...
    def close(self) -> None: ...
