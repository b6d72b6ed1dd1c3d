"""The records that a monitor gets: messages of the dispatcher, work of the workers, and ops that clients issue.

They cross a socket, and are all that the tools read: a log, a trace and a picture are made from the same records. All
times are nanoseconds of the machine's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import msgspec

from gt.core.message_events import BatchPlanned, Details, Event, MonitorEvent, OpIssued, WorkerRan, WorkerSampled
from gt.core.message_fields import PAYLOAD_RECORDS, byte_ranges_of, id_fields


class MessageSeen(msgspec.Struct, frozen=True, tag=True):
    """A message that passed the dispatcher. `command` is its name on the wire, beginning with `Worker` if it goes to a
    worker; `nbytes` is the size of the tensor beside it, -1 if there is none. `request` joins a request and its
    answer; 0 if it is neither."""

    time: int
    direction: str
    peer: str
    command: str
    nbytes: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    op: str
    site: str
    request: int = 0
    details: Details = ()


Record: TypeAlias = MessageSeen | BatchPlanned | WorkerRan | WorkerSampled | OpIssued


def records_of(events: Iterable[MonitorEvent]) -> Iterator[Record]:
    """Events as records."""
    for event in events:
        yield message_seen(event) if isinstance(event, Event) else event


def message_seen(event: Event) -> MessageSeen:
    message: Any = event.message
    inputs, outputs = _ids(message)
    return MessageSeen(
        event.time,
        event.direction,
        event.peer,
        _name(event),
        sum(byte_range.nbytes for byte_range in byte_ranges_of(message)) if type(message) in PAYLOAD_RECORDS else -1,
        inputs,
        outputs,
        event.op,
        event.site,
        getattr(message, "request", 0),
        event.details,
    )


def _name(event: Event) -> str:
    if event.message is None:
        return "-"
    tag = str(event.message.__struct_config__.tag)
    return tag if event.direction != "WORKER_SEND" or tag.startswith("Worker") else f"Worker{tag}"


def _ids(message: msgspec.Struct | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tensors that a message names: its inputs, or those that it is about; and its outputs."""
    names = id_fields(type(message)).names if message is not None else frozenset()
    ids = {name: getattr(message, name) for name in ("id", "ids", "inputs", "outputs") if name in names}
    outputs = ids.pop("outputs", ())
    first = next(iter(ids.values()), ())
    return (first if isinstance(first, tuple) else (first,)), outputs
