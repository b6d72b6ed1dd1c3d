"""What clients wait for: requests that workers have not answered yet."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.errors import ProtocolError
from gt.core.ids import MAX_RESULTS, session_of, short_id
from gt.core.messages import (
    RAN_AT_ONCE,
    Answer,
    Failed,
    Fetched,
    FreeTensors,
    Lost,
    Queried,
    Stats,
    StatsRead,
    TimelineRead,
    TimelineReport,
    Traffic,
    TrafficRead,
    Versions,
    VersionsRead,
    WorkerTimeline,
)
from gt.core.meta import TensorMeta
from gt.dispatcher.outgoing import Buffer, MessageQueue
from gt.dispatcher.rejection import lost
from gt.dispatcher.state import PendingRequest, Reply, State, TensorRecord, without
from gt.sharding.spec import DeviceMesh, whole


class Requests:
    """Requests by what workers answer to them; which there are is a part of the state."""

    def __init__(self, state: State, post: MessageQueue) -> None:
        self._state = state
        self._post = post

    def wait(self, request: int, workers: Sequence[int], *expects: type[Reply], nbytes: int = -1) -> None:
        """`expects`: the kinds of answers that workers may give; `nbytes`: the size of a read."""
        self._state.add_request(request, PendingRequest(frozenset(workers), expects, nbytes=nbytes))

    def wait_for_query(
        self, request: int, mesh: DeviceMesh, first: int, written: Sequence[tuple[int, TensorMeta]]
    ) -> None:
        workers = frozenset(mesh.workers)
        pending = PendingRequest(workers, (Queried, Failed), mesh=mesh, first=first, written=tuple(written))
        self._state.add_request(request, pending)

    def wait_for_versions(self, request: int, workers: Sequence[int], asked: Sequence[int]) -> None:
        self._state.add_request(request, PendingRequest(frozenset(workers), (Versions,), asked=tuple(asked)))

    def waits(self) -> dict[int, set[int]]:
        """For whom each session waits."""
        waits: dict[int, set[int]] = {}
        for request, pending in self._state.pending.items():
            if not pending.is_answered:
                waits.setdefault(session_of(request), set()).update(pending.waiting_for)
        return waits

    def settle(self, worker: int, reply: Reply, buffer: Buffer | None) -> None:
        """A worker's answer; the client gets one when no other worker is waited for."""
        pending = self.require_asked(worker, reply)
        if pending is None:
            return
        self._require_own_bytes(worker, pending, reply)
        rest = pending._replace(waiting_for=pending.waiting_for - {worker}, replies=(*pending.replies, (worker, reply)))
        self._go_on(reply.request, rest, buffer)

    def is_waiting_for(self, worker: int, request: int) -> bool:
        pending = self._state.pending.get(request)
        return pending is not None and worker in pending.waiting_for

    def require_asked(self, worker: int, reply: Reply) -> PendingRequest | None:
        """The request that a reply is for; None where its session has ended. Raises ProtocolError for a reply that the
        worker was not asked for, or that is none to the request."""
        pending = self._state.pending.get(reply.request)
        if pending is None and self._state.is_over(session_of(reply.request)):
            return None
        if pending is None or worker not in pending.waiting_for:
            raise ProtocolError(f"worker {worker} was not asked for request {short_id(reply.request)}")
        _require_answer(pending, reply)
        return pending

    def _require_own_bytes(self, worker: int, pending: PendingRequest, reply: Reply) -> None:
        """A read brings as many bytes as the tensor has, in memory of the worker's own; counts name workers once."""
        if isinstance(reply, Fetched):
            segment, pid = reply.segment, self._state.workers[worker].info.pid
            if pending.nbytes not in (-1, segment.nbytes):
                raise ProtocolError(f"a tensor of {pending.nbytes} bytes was read as {segment.nbytes} bytes")
            if segment.name and not segment.name.startswith(f"gt-{pid}-"):
                raise ProtocolError(f"segment {segment.name} is not one of process {pid}")
        received = reply.received if isinstance(reply, Traffic) else ()
        received = reply.stats.received if isinstance(reply, Stats) else received
        if len(received) > self._state.workers_joined:
            raise ProtocolError(f"bytes were received from {len(received)} workers, more than there ever were")
        if isinstance(reply, TimelineReport) and len(reply.ran) > RAN_AT_ONCE:
            raise ProtocolError(f"a timeline of {len(reply.ran)} commands is over the limit of {RAN_AT_ONCE}")

    def _go_on(self, request: int, pending: PendingRequest, buffer: Buffer | None = None) -> None:
        """Wait for the other workers, or conclude."""
        if pending.waiting_for:
            self._state.set_request(request, pending)
            return
        self._state.drop_request(request)
        if not pending.is_answered:
            conclusion = self._conclusion(request, pending)
            if isinstance(conclusion, Failed):
                conclusion = self._explained(conclusion)
            self._post.answer(session_of(request), conclusion, buffer)

    def _explained(self, failed: Failed) -> Failed | Lost:
        """An exchange that failed because a worker is gone is a loss of that worker."""
        worker = self._state.lost_peer(failed.failure)
        return failed if worker is None else lost(self._state, failed.request, worker, failed.failure.site)

    def _conclusion(self, request: int, pending: PendingRequest) -> Answer:
        reply = pending.replies[0][1]
        if isinstance(reply, Traffic):
            received = {worker: told.received for worker, told in pending.replies if isinstance(told, Traffic)}
            collectives = self._state.take_collectives(self._state.sessions[session_of(request)])
            return TrafficRead(request, received, collectives)
        if isinstance(reply, Stats):
            stats = {worker: told.stats for worker, told in pending.replies if isinstance(told, Stats)}
            return StatsRead(request, stats)
        if isinstance(reply, TimelineReport):
            told = [(worker, told) for worker, told in pending.replies if isinstance(told, TimelineReport)]
            ran = tuple([WorkerTimeline(worker, timeline.ran, timeline.dropped) for worker, timeline in told])
            return TimelineRead(request, ran)
        if isinstance(reply, Versions):
            spans = {worker: dict(told.spans) for worker, told in pending.replies if isinstance(told, Versions)}
            return VersionsRead(request, tuple([self._state.span(ident, spans) for ident in pending.asked]))
        if pending.mesh is not None:
            return self._queried(pending, pending.mesh)
        return reply

    def _queried(self, pending: PendingRequest, mesh: DeviceMesh) -> Queried | Failed:
        """The answer to a query: a failure if there is any, and then what the other workers made is freed."""
        done = next((reply for _, reply in pending.replies if isinstance(reply, Queried)), None)
        failure = next((reply for _, reply in pending.replies if isinstance(reply, Failed)), None)
        if failure is None:
            assert done is not None, "a query is answered by its results or by a failure"
            self._place_results(pending, done, mesh)
            return done
        if done is not None and (count := len(_metas(done))):
            made = range(pending.first, pending.first + count)
            self._post.command(mesh.workers, FreeTensors(tuple(made)))
        return failure

    def _place_results(self, pending: PendingRequest, reply: Queried, mesh: DeviceMesh) -> None:
        """The tensors that a query made, and those that it has resized, unless they were freed or moved since."""
        state = self._state
        for offset, meta in enumerate(_metas(reply)):
            state.place(pending.first + offset, TensorRecord.of(meta, whole(mesh, len(meta.shape))))
        for (ident, before), meta in zip(pending.written, reply.written, strict=True):
            held = state.tensors.get(ident)
            if held is not None and meta != before and held.meta == before and held.spec.is_whole:
                for alias, where in state.resize(ident, meta):
                    self._post.command(where.workers, FreeTensors((alias,)))

    def lose_worker(self, worker: int) -> None:
        """Those that wait for a worker that is gone fail now; a query goes on with the others, since every worker of
        its mesh gives the same answer."""
        for request, pending in list(self._state.pending.items()):
            others = pending._replace(waiting_for=pending.waiting_for - {worker})
            rest = without(pending.mesh, worker) if pending.mesh is not None and worker in pending.mesh else None
            if rest is not None:
                self._go_on(request, others._replace(mesh=rest))
            elif worker in pending.waiting_for:
                if not pending.is_answered:
                    self._post.answer(session_of(request), lost(self._state, request, worker))
                self._go_on(request, others._replace(is_answered=True))


def _require_answer(pending: PendingRequest, reply: Reply) -> None:
    """Checked before anything is noted of it, so that the request stays one that is waited for."""
    if not isinstance(reply, pending.expects):
        expected = " or ".join([kind.__name__ for kind in pending.expects])
        what = "a query" if pending.mesh is not None else f"a request that {expected} answers"
        raise ProtocolError(f"{type(reply).__name__} is not an answer to {what}")
    if isinstance(reply, Queried) and len(reply.written) != len(pending.written):
        raise ProtocolError(
            f"a query that writes {len(pending.written)} tensors was answered with {len(reply.written)}"
        )
    if isinstance(reply, Queried) and len(_metas(reply)) > MAX_RESULTS:
        raise ProtocolError(f"{len(_metas(reply))} results of one query are over the limit of {MAX_RESULTS}")


def _metas(reply: Queried) -> list[TensorMeta]:
    return [result for result in reply.results if isinstance(result, TensorMeta)]
