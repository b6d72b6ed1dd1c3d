"""A program seen from a dashboard: its tensors, traffic and failures, beside the status of its workers and sessions."""

from __future__ import annotations

from typing import Protocol

import msgspec


class WorkerState(msgspec.Struct, frozen=True):
    """A worker. `state` is `idle`, `running`, `exchanging`, `stopped` (by a signal or a debugger), `starting` or
    `unknown`; `op` and `site` are those of its last op, and `waits_for` the workers that have not come to its exchange.
    Nanoseconds and bytes count from its start, `nbytes` are those of the tensors it holds, and `memory` those of its
    device."""

    worker: int
    host: str
    pid: int
    device: str
    memory: int
    state: str
    op: str = ""
    site: str = ""
    waits_for: tuple[int, ...] = ()
    since: int = 0
    busy: int = 0
    waited: int = 0
    ops: int = 0
    nbytes: int = 0
    received: int = 0
    sent: int = 0


class SessionState(msgspec.Struct, frozen=True):
    """A client's session: its tensors, their bytes on all workers, instructions that wait for their turn, and requests
    that workers have not answered."""

    session: int
    host: str
    pid: int
    tensors: int
    nbytes: int
    queued: int
    requests: int


class ProgramStatus(msgspec.Struct, frozen=True):
    """The workers and sessions of a program at a `time` of the machine's monotonic clock, in nanoseconds. `refused`
    counts a server's refusals by kind: see `gt.wire.refusals`."""

    time: int
    pid: int
    workers: tuple[WorkerState, ...]
    sessions: tuple[SessionState, ...]
    refused: dict[str, int] = {}


class HeldPart(msgspec.Struct, frozen=True):
    """The part of a tensor that a worker holds: the start and the end in each dim. Replicas have the same `part`."""

    worker: int
    part: int
    intervals: tuple[tuple[int, int], ...]


class TensorState(msgspec.Struct, frozen=True):
    """Tensors of a session that are alike, `count` of them. `nbytes` are those of one of them on all workers together;
    `copies` is the number of copies of them in other layouts. `line` is the line that wrote them last, empty if that is
    not known."""

    session: int
    shape: tuple[int, ...]
    dtype: str
    layout: str
    mesh: str
    nbytes: int
    count: int
    copies: int
    line: str
    parts: tuple[HeldPart, ...]


class LineMemory(msgspec.Struct, frozen=True):
    """The bytes on all workers of the tensors that a line wrote last. The line is empty for the rest."""

    line: str
    nbytes: int
    tensors: int


class MemoryState(msgspec.Struct, frozen=True):
    """The memory of tensors on all workers by line, the most first, and the largest tensors. `copied` are the bytes of
    copies in other layouts. `dropped` batches of instructions came too fast to be looked at: the lines of their tensors
    are not known."""

    nbytes: int
    tensors: int
    copied: int
    lines: tuple[LineMemory, ...]
    largest: tuple[TensorState, ...]
    dropped: int


class PairTraffic(msgspec.Struct, frozen=True):
    """The bytes that a worker has received from another one since its start."""

    sender: int
    receiver: int
    nbytes: int


class FailureState(msgspec.Struct, frozen=True):
    """An op that failed: where it was issued, and where it failed. `time` is in seconds since 1970; `workers` are those
    that have reported it, -1 for the dispatcher. An op of a line that failed in the same way several `times` is
    listed once, with the last time."""

    number: int
    time: float
    session: int
    op: str
    inputs: tuple[str, ...]
    line: str
    kind: str
    message: str
    traceback: str
    workers: tuple[int, ...]
    times: int = 1


class LostWorker(msgspec.Struct, frozen=True):
    """A worker that has gone, the reason, and the op that it ran last."""

    worker: int
    pid: int
    reason: str
    last_op: str


class FailuresState(msgspec.Struct, frozen=True):
    """The most recent failures, the last one first; `count` are all of them."""

    count: int
    failures: tuple[FailureState, ...]
    lost: tuple[LostWorker, ...]


class ProgramView(Protocol):
    """Reads a program while it goes on; one thread may ask. Reading does not wait for the program. `watch_lines` lets
    the program note which line writes which tensor, from then on; off, that costs nothing."""

    def read_workers(self) -> tuple[WorkerState, ...]: ...
    def read_status(self) -> ProgramStatus: ...
    def read_memory(self) -> MemoryState: ...
    def read_traffic(self) -> tuple[PairTraffic, ...]: ...
    def read_failures(self) -> FailuresState: ...
    def watch_lines(self, on: bool) -> None: ...
