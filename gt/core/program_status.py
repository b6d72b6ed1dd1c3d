"""The status of a program or server at a moment: its workers and its sessions, for monitors."""

from __future__ import annotations

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
    """`time` is that of the machine's monotonic clock, in nanoseconds. `refused` counts what a server has refused, by
    kind: see `gt.wire.refusals`."""

    time: int
    pid: int
    workers: tuple[WorkerState, ...]
    sessions: tuple[SessionState, ...]
    refused: dict[str, int] = {}
