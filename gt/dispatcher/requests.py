"""What clients wait for: requests that workers have not answered yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from gt.core.messages import (
    Failed,
    Fetched,
    Lost,
    Queried,
    Synchronized,
    Timeline,
    TimelineRead,
    Traffic,
    TrafficRead,
    WorkerFreeTensors,
    WorkerTimeline,
    session_of,
)
from gt.core.meta import TensorMeta
from gt.dispatcher.post import Buffer, Post
from gt.dispatcher.state import Held, State, without
from gt.sharding.spec import DeviceMesh, whole

Reply: TypeAlias = Fetched | Queried | Failed | Synchronized | Traffic | Timeline


class Gone(NamedTuple):
    """A worker that is no longer there."""

    pid: int
    reason: str
    last_op: str


@dataclass
class Pending:
    """A request that workers have not answered yet, where a query's results will be, and what was answered so far: one
    of the replies, a failure if there is any; `made` counts the tensors that the others made all the same. `received`
    and `ran` are what each worker told of its traffic and its timeline."""

    waiting_for: set[int]
    first: int = 0
    written: tuple[int, ...] = ()
    mesh: DeviceMesh | None = None
    received: dict[int, dict[int, int]] = field(default_factory=dict)
    ran: list[WorkerTimeline] = field(default_factory=list)
    reply: Reply | None = None
    made: int = 0


class Requests:
    """`gone` are the workers that were lost, which the office notes."""

    def __init__(self, state: State, post: Post, gone: Mapping[int, Gone]) -> None:
        self.pending: dict[int, Pending] = {}
        self._state = state
        self._post = post
        self._gone = gone

    def wait(self, request: int, workers: Sequence[int]) -> None:
        self.pending[request] = Pending(set(workers))

    def wait_for_query(self, request: int, mesh: DeviceMesh, first: int, written: tuple[int, ...]) -> None:
        self.pending[request] = Pending(set(mesh.workers), first, written, mesh)

    def waits(self) -> dict[int, set[int]]:
        """For whom each session waits."""
        waits: dict[int, set[int]] = {}
        for request, pending in self.pending.items():
            waits.setdefault(session_of(request), set()).update(pending.waiting_for)
        return waits

    def settle(self, worker: int, reply: Reply, buffer: Buffer | None) -> None:
        """A worker's answer; the client gets one when no other worker is waited for."""
        pending = self.pending.get(reply.request)
        if pending is None:
            return
        pending.waiting_for.discard(worker)
        if pending.reply is None or isinstance(reply, Failed):
            pending.reply = reply
        if isinstance(reply, Traffic):
            pending.received[worker] = reply.received
        elif isinstance(reply, Timeline):
            pending.ran.append(WorkerTimeline(worker, reply.ran, reply.dropped))
        elif isinstance(reply, Queried):
            pending.made = len(_metas(reply))
        if not pending.waiting_for:
            self._conclude(reply.request, buffer)

    def _conclude(self, request: int, buffer: Buffer | None) -> None:
        pending = self.pending.pop(request)
        session, reply = self._state.sessions[session_of(request)], pending.reply
        assert reply is not None
        if isinstance(reply, Traffic):
            collectives, session.collectives = tuple(session.collectives), []
            self._post.answer(session.ident, TrafficRead(request, pending.received, collectives))
            return
        if isinstance(reply, Timeline):
            self._post.answer(session.ident, TimelineRead(request, tuple(pending.ran)))
            return
        if isinstance(reply, Queried):
            self._place_results(pending, reply)
        elif pending.made and pending.mesh is not None:
            made = range(pending.first, pending.first + pending.made)
            self._post.command(pending.mesh.workers, WorkerFreeTensors(tuple(made)))
        self._post.answer(session.ident, reply, buffer)

    def _place_results(self, pending: Pending, reply: Queried) -> None:
        """The tensors that a query made, and those that it may have resized."""
        assert pending.mesh is not None
        for offset, meta in enumerate(_metas(reply)):
            self._state.place(pending.first + offset, Held.of(meta, whole(pending.mesh, len(meta.shape))))
        for written, meta in zip(pending.written, reply.written, strict=True):
            self._state.remove(written)
            self._state.place(written, Held.of(meta, whole(pending.mesh, len(meta.shape))))

    def lose(self, request: int, worker: int) -> None:
        """A request cannot be answered, because of a worker that is gone."""
        self.pending.pop(request, None)
        self._post.answer(session_of(request), Lost(request, worker, *self._gone[worker]))

    def lose_worker(self, worker: int) -> None:
        """Those that wait for a worker that is gone fail now; a query goes on with the others, since every worker of
        its mesh gives the same answer."""
        for request, pending in list(self.pending.items()):
            rest = without(pending.mesh, worker) if pending.mesh is not None and worker in pending.mesh else None
            if rest is not None:
                pending.mesh = rest
                pending.waiting_for.discard(worker)
                if not pending.waiting_for:
                    self._conclude(request, None)
            elif worker in pending.waiting_for:
                self.lose(request, worker)

    def end_session(self, session: int) -> None:
        for request in [request for request in self.pending if session_of(request) == session]:
            del self.pending[request]


def _metas(reply: Queried) -> list[TensorMeta]:
    return [result for result in reply.results if isinstance(result, TensorMeta)]
