"""What clients wait for: requests that workers have not answered yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from gt.core.errors import ProtocolError
from gt.core.ids import MAX_RESULTS, session_of
from gt.core.messages import (
    Failed,
    Fetched,
    Lost,
    Queried,
    Stats,
    StatsRead,
    Synchronized,
    Timeline,
    TimelineRead,
    Traffic,
    TrafficRead,
    WorkerFreeTensors,
    WorkerTimeline,
)
from gt.core.meta import TensorMeta
from gt.dispatcher.post import Buffer, Post
from gt.dispatcher.state import Held, State, without
from gt.sharding.spec import DeviceMesh, whole

Reply: TypeAlias = Fetched | Queried | Failed | Synchronized | Traffic | Stats | Timeline


class Gone(NamedTuple):
    """A worker that is no longer there."""

    pid: int
    reason: str
    last_op: str


@dataclass(slots=True)
class Pending:
    """A request that workers have not answered yet, what was answered so far, and where a query's results will be."""

    waiting_for: set[int]
    replies: dict[int, Reply] = field(default_factory=dict)
    first: int = 0
    written: tuple[int, ...] = ()
    mesh: DeviceMesh | None = None


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
        self.pending[request] = Pending(set(mesh.workers), {}, first, written, mesh)

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
        if pending.mesh is not None:
            _require_answer(pending, reply)
        pending.waiting_for.discard(worker)
        pending.replies[worker] = reply
        if not pending.waiting_for:
            self._conclude(reply.request, buffer)

    def _conclude(self, request: int, buffer: Buffer | None) -> None:
        pending = self.pending.pop(request)
        session, replies = self._state.sessions[session_of(request)], pending.replies
        reply = next(iter(replies.values()))
        if isinstance(reply, Traffic):
            received = {worker: told.received for worker, told in replies.items() if isinstance(told, Traffic)}
            collectives, session.collectives = tuple(session.collectives), []
            self._post.answer(session.ident, TrafficRead(request, received, collectives))
        elif isinstance(reply, Stats):
            stats = {worker: told.stats for worker, told in replies.items() if isinstance(told, Stats)}
            self._post.answer(session.ident, StatsRead(request, stats))
        elif isinstance(reply, Timeline):
            told = [(worker, told) for worker, told in replies.items() if isinstance(told, Timeline)]
            ran = tuple([WorkerTimeline(worker, timeline.ran, timeline.dropped) for worker, timeline in told])
            self._post.answer(session.ident, TimelineRead(request, ran))
        elif pending.mesh is not None:
            self._post.answer(session.ident, self._queried(pending, pending.mesh))
        else:
            self._post.answer(session.ident, reply, buffer)  # type: ignore[arg-type]

    def _queried(self, pending: Pending, mesh: DeviceMesh) -> Queried | Failed:
        """The answer to a query: a failure if there is any, and then what the other workers made is freed."""
        done = next((reply for reply in pending.replies.values() if isinstance(reply, Queried)), None)
        failure = next((reply for reply in pending.replies.values() if isinstance(reply, Failed)), None)
        if failure is None:
            assert done is not None, "a query is answered by its results or by a failure"
            self._place_results(pending, done)
            return done
        if done is not None and (count := len(_metas(done))):
            made = range(pending.first, pending.first + count)
            self._post.command(mesh.workers, WorkerFreeTensors(tuple(made)))
        return failure

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


def _require_answer(pending: Pending, reply: Reply) -> None:
    """Checked before anything is noted of it, so that the request stays one that is waited for."""
    if not isinstance(reply, Queried | Failed):
        raise ProtocolError(f"{type(reply).__name__} is not an answer to a query")
    if isinstance(reply, Queried) and len(reply.written) != len(pending.written):
        raise ProtocolError(
            f"a query that writes {len(pending.written)} tensors was answered with {len(reply.written)}"
        )
    if isinstance(reply, Queried) and len(_metas(reply)) > MAX_RESULTS:
        raise ProtocolError(f"{len(_metas(reply))} results of one query are over the limit of {MAX_RESULTS}")


def _metas(reply: Queried) -> list[TensorMeta]:
    return [result for result in reply.results if isinstance(result, TensorMeta)]
