"""The activity of workers between two moments: how busy they were, ops and bytes a second, and the mix of ops."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import msgspec

from gt.core.message_events import BatchPlanned, Details, Event, MonitorEvent, OpIssued, WorkerRan, WorkerSampled
from gt.core.message_fields import PAYLOAD_RECORDS, byte_ranges_of, id_fields
from gt.core.program_view import ProgramStatus, SessionState, WorkerState

REMEMBERED = 256  # samples that the mix of ops is made of


class WorkerActivity(msgspec.Struct, frozen=True):
    """What a worker did between two samples. `busy` and `exchanging` are shares of the time; rates are per second.
    `seconds` is how long it has been in its present state."""

    worker: int
    host: str
    pid: int
    device: str
    state: str
    seconds: float
    busy: float
    exchanging: float
    op: str
    site: str
    waits_for: tuple[int, ...]
    ops_per_second: float
    nbytes: int
    memory: int
    received_per_second: float
    sent_per_second: float


class Activity(msgspec.Struct, frozen=True):
    """What a program did between two samples. `op_mix` has the ops that workers were at when they were sampled, with
    their shares of all samples, and `line_mix` the lines of these. `refused` counts a server's refusals by kind."""

    pid: int
    workers: tuple[WorkerActivity, ...]
    sessions: tuple[SessionState, ...]
    op_mix: dict[str, float]
    line_mix: dict[str, float]
    refused: dict[str, int] = {}


class ActivityMeter:
    """Makes activities of the statuses of one program, each since the status `window` before."""

    def __init__(self, window: int = 1) -> None:
        self._statuses: deque[ProgramStatus] = deque(maxlen=window)
        self._seen: deque[tuple[str, str]] = deque(maxlen=REMEMBERED)

    def add(self, status: ProgramStatus) -> Activity:
        """The activity since an earlier status; rates are 0 for the first one."""
        last = self._statuses[0] if self._statuses else None
        before = {} if last is None else {worker.worker: worker for worker in last.workers}
        seconds = 0.0 if last is None else (status.time - last.time) / 1e9
        self._statuses.append(status)
        self._seen.extend((each.op, each.site) for each in status.workers if each.op and each.state != "idle")
        ops, lines = _mix([op for op, _ in self._seen]), _mix([line for _, line in self._seen if line])
        rows = tuple(_activity(status.time, before.get(each.worker), each, seconds) for each in status.workers)
        return Activity(status.pid, rows, status.sessions, ops, lines, status.refused)


def _mix(looks: list[str]) -> dict[str, float]:
    """The share of each name, the largest first."""
    return {name: count / len(looks) for name, count in Counter(looks).most_common()}


def _activity(now: int, before: WorkerState | None, after: WorkerState, seconds: float) -> WorkerActivity:
    def rate(name: str) -> float:
        if before is None or not seconds:
            return 0.0
        return max(0.0, (getattr(after, name) - getattr(before, name)) / seconds)

    in_state = max(0.0, (now - after.since) / 1e9) if after.since else 0.0
    busy, exchanging = rate("busy") / 1e9, rate("waited") / 1e9
    # The time of a command that goes on is counted at its end.
    if after.state == "running":
        busy += min(in_state / seconds, 1.0) if seconds else 0.0
    elif after.state == "exchanging":
        exchanging += min(in_state / seconds, 1.0) if seconds else 0.0
    return WorkerActivity(
        after.worker,
        after.host,
        after.pid,
        after.device,
        after.state,
        in_state,
        min(busy, 1.0),
        min(exchanging, 1.0),
        after.op,
        after.site,
        after.waits_for,
        rate("ops"),
        after.nbytes,
        after.memory,
        rate("received"),
        rate("sent"),
    )


def local_time() -> str:
    return time.strftime("%H:%M:%S")


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
