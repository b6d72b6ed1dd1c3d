"""The activity of workers between two moments: how busy they were, ops and bytes a second, and the mix of ops."""

from __future__ import annotations

import time
from collections import Counter, deque

import msgspec

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
