"""Requests of clients that workers have not answered yet, and the answers made of the workers' replies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter

from msgspec.structs import astuple

from gt.core.errors import ProtocolError
from gt.core.ids import MAX_RESULTS, session_of, short_id
from gt.core.messages import (
    CURRENT,
    MAX_NON_FINITE,
    MAX_SAMPLES,
    MAX_WAYS,
    RAN_AT_ONCE,
    Answer,
    ByteRange,
    Failed,
    Fetched,
    FetchTensor,
    Lost,
    MemoryRead,
    MemoryReport,
    MoreRoomNeeded,
    NonFiniteRead,
    NonFiniteReport,
    Queried,
    ReadVersions,
    Stats,
    StatsRead,
    TensorRead,
    TimelineRead,
    TimelineReport,
    Traffic,
    TrafficRead,
    Uploaded,
    Versions,
    VersionsRead,
    WorkerFetchTensor,
    WorkerTimeline,
)
from gt.core.meta import ITEM_BYTES, TensorMeta
from gt.core.tables import print_bytes
from gt.dispatcher.instruction_errors import InvalidInstruction, NoWorkers
from gt.dispatcher.message_queue import MessageQueue
from gt.dispatcher.rejection import lost
from gt.dispatcher.state import State
from gt.dispatcher.state_records import PendingRequest, ReadPart, Reply, SessionRecord
from gt.dispatcher.tensor_records import TensorRecord, mesh_without
from gt.sharding.held_parts import TensorPart, parts_to_read
from gt.sharding.spec import DeviceMesh, ShardingSpec, compute_local_shape, whole
from gt.wire.codec import Buffer
from gt.wire.payloads import require_memory
from gt.wire.shared_memory import SHARE_BYTES

_COPIES = 2  # of bytes that a worker sends: ZeroMQ's, and Python's


class Requests:
    """Asks workers, and answers clients when all have replied. The requests are part of the state: `State.pending`."""

    def __init__(self, state: State, outgoing: MessageQueue) -> None:
        self._state = state
        self._outgoing = outgoing

    def wait(self, request: int, workers: Sequence[int], *expects: type[Reply]) -> None:
        """Record a request that workers have to answer. `expects`: the kinds of replies that they may send."""
        self._state.add_request(request, PendingRequest(frozenset(workers), expects))

    def wait_for_read(self, request: int, reads: Sequence[ReadPart], layout: ShardingSpec | None) -> None:
        workers = frozenset(read.worker for read in reads)
        self._state.add_request(request, PendingRequest(workers, (Fetched, Failed), reads=tuple(reads), layout=layout))

    def wait_for_query(
        self, request: int, mesh: DeviceMesh, first: int, written: Sequence[tuple[int, TensorMeta]]
    ) -> None:
        workers = frozenset(mesh.workers)
        pending = PendingRequest(workers, (Queried, Failed), mesh=mesh, first=first, written=tuple(written))
        self._state.add_request(request, pending)

    def wait_for_versions(self, request: int, workers: Sequence[int], version_ids: Sequence[int]) -> None:
        self._state.add_request(
            request, PendingRequest(frozenset(workers), (Versions, Failed), version_ids=tuple(version_ids))
        )

    def waits(self) -> dict[int, set[int]]:
        """The workers that each session waits for."""
        waits: dict[int, set[int]] = {}
        for request, pending in self._state.pending.items():
            if not pending.is_answered:
                waits.setdefault(session_of(request), set()).update(pending.waiting_for)
        return waits

    def add_reply(self, worker: int, reply: Reply, buffer: Buffer | None) -> None:
        """Take the reply of a worker; the client is answered after the last reply."""
        pending = self.require_asked(worker, reply)
        if pending is None:
            return
        self._require_own_bytes(worker, pending, reply)
        rest = pending._replace(waiting_for=pending.waiting_for - {worker}, replies=(*pending.replies, (worker, reply)))
        if buffer is not None and not pending.is_answered:
            rest = rest._replace(buffers=(*rest.buffers, (worker, buffer)))
        self._proceed(reply.request, rest)

    def is_waiting_for(self, worker: int, request: int) -> bool:
        pending = self._state.pending.get(request)
        return pending is not None and worker in pending.waiting_for

    def require_asked(self, worker: int, reply: Reply) -> PendingRequest | None:
        """The request that a reply is for; None if its session has ended. Raises ProtocolError if the worker was not
        asked, or the reply is not of an expected kind."""
        pending = self._state.pending.get(reply.request)
        if pending is None and self._state.has_ended(session_of(reply.request)):
            return None
        if pending is None or worker not in pending.waiting_for:
            raise ProtocolError(f"worker {worker} was not asked for request {short_id(reply.request)}")
        _require_answer(pending, reply)
        return pending

    def _require_own_bytes(self, worker: int, pending: PendingRequest, reply: Reply) -> None:
        """Check the sizes in a reply, and that its bytes are in the memory that the client gave for them."""
        if isinstance(reply, Fetched):
            (asked,) = [read for read in pending.reads if read.worker == worker]
            if asked.nbytes not in (-1, reply.byte_range.nbytes):
                raise ProtocolError(f"a tensor of {asked.nbytes} bytes was read as {reply.byte_range.nbytes} bytes")
            if reply.byte_range.name and reply.byte_range != asked.place:
                raise ProtocolError(
                    f"shared buffer {reply.byte_range.name} is not the one that worker {worker} was to write to"
                )
        received = reply.received if isinstance(reply, Traffic) else ()
        received = reply.stats.received if isinstance(reply, Stats) else received
        if len(received) > self._state.workers_joined:
            raise ProtocolError(f"bytes were received from {len(received)} workers, more than there ever were")
        if isinstance(reply, Traffic) and len(reply.ways) > MAX_WAYS:
            raise ProtocolError(f"the ways of {len(reply.ways)} collectives are over the limit of {MAX_WAYS}")
        if isinstance(reply, NonFiniteReport) and len(reply.calls) > MAX_NON_FINITE:
            raise ProtocolError(f"{len(reply.calls)} commands with NaN are over the limit of {MAX_NON_FINITE}")
        if isinstance(reply, TimelineReport):
            require_timeline(reply)

    def _proceed(self, request: int, pending: PendingRequest) -> None:
        """Wait for the other workers, or answer the client."""
        if pending.waiting_for:
            self._state.set_request(request, pending)
            return
        self._state.drop_request(request)
        if not pending.is_answered:
            answer = self._answer(request, pending)
            if isinstance(answer, Failed):
                answer = self._explained(answer)
            self._outgoing.answer(session_of(request), answer, _buffers(pending, answer))

    def _explained(self, failed: Failed) -> Failed | Lost:
        """A failed exchange with a lost worker becomes the loss of that worker."""
        worker = self._state.lost_peer(failed.failure)
        return failed if worker is None else self._lost(failed.request, worker, failed.failure.site)

    def _lost(self, request: int, worker: int, site: int = 0) -> Lost:
        return lost(self._state, self._state.sessions[session_of(request)], request, worker, site)

    def _answer(self, request: int, pending: PendingRequest) -> Answer:
        if pending.reads:
            return _read(request, pending)
        if Uploaded in pending.expects:
            return Uploaded(request)
        if pending.mesh is not None:
            return self._queried(pending, pending.mesh)
        reply = next((reply for _, reply in pending.replies if isinstance(reply, Failed)), pending.replies[0][1])
        if isinstance(reply, Traffic):
            received = {worker: reply.received for worker, reply in pending.replies if isinstance(reply, Traffic)}
            collectives = self._state.take_collectives(self._state.sessions[session_of(request)])
            ways = [way for _, reply in pending.replies if isinstance(reply, Traffic) for way in reply.ways]
            return TrafficRead(request, received, collectives, tuple(dict.fromkeys(ways)))
        if isinstance(reply, Stats):
            stats = {worker: reply.stats for worker, reply in pending.replies if isinstance(reply, Stats)}
            return StatsRead(request, stats, self._state.sessions[session_of(request)].plans_made)
        if isinstance(reply, MemoryReport):
            memory = [(worker, reply.memory) for worker, reply in pending.replies if isinstance(reply, MemoryReport)]
            return MemoryRead(request, tuple(sorted(memory, key=itemgetter(0))))
        if isinstance(reply, NonFiniteReport):
            calls = [(worker, reply.calls) for worker, reply in pending.replies if isinstance(reply, NonFiniteReport)]
            return NonFiniteRead(request, tuple(calls))
        if isinstance(reply, TimelineReport):
            timelines = [(worker, reply) for worker, reply in pending.replies if isinstance(reply, TimelineReport)]
            return TimelineRead(
                request, tuple(WorkerTimeline(worker, *astuple(each)[1:]) for worker, each in timelines)
            )
        if isinstance(reply, Versions):
            spans = {worker: dict(reply.spans) for worker, reply in pending.replies if isinstance(reply, Versions)}
            return VersionsRead(request, tuple(self._state.span(ident, spans) for ident in pending.version_ids))
        assert not isinstance(reply, Fetched), "a read has parts"
        return reply

    def _queried(self, pending: PendingRequest, mesh: DeviceMesh) -> Queried | Failed:
        """The answer to a query. If it failed on some worker, the results of the others are freed."""
        done = next((reply for _, reply in pending.replies if isinstance(reply, Queried)), None)
        failure = next((reply for _, reply in pending.replies if isinstance(reply, Failed)), None)
        if failure is None:
            assert done is not None, "a query is answered by its results or by a failure"
            self._add_results(pending, done, mesh)
            return done
        if done is not None and (count := len(_metas(done))):
            made = range(pending.first, pending.first + count)
            self._outgoing.free((ident, mesh) for ident in made)
        return failure

    def _add_results(self, pending: PendingRequest, reply: Queried, mesh: DeviceMesh) -> None:
        """Add the tensors that a query made, and resize those that it wrote, unless they were freed or moved since."""
        state = self._state
        for offset, meta in enumerate(_metas(reply)):
            state.add_tensor(pending.first + offset, TensorRecord.of(meta, whole(mesh, len(meta.shape))))
        for (ident, before), meta in zip(pending.written, reply.written, strict=True):
            tensor = state.tensors.get(ident)
            if tensor is not None and meta != before and tensor.meta == before and tensor.spec.is_whole:
                self._outgoing.free(state.resize(ident, meta))

    def lose_worker(self, worker: int) -> None:
        """Fail the requests that wait for a lost worker. A query waits for the other workers of its mesh, since each of
        them gives the same answer; an upload waits for the others, which still read its bytes."""
        for request, pending in list(self._state.pending.items()):
            others = pending._replace(waiting_for=pending.waiting_for - {worker})
            rest = mesh_without(pending.mesh, worker) if pending.mesh is not None and worker in pending.mesh else None
            if rest is not None:
                self._proceed(request, others._replace(mesh=rest))
            elif worker in pending.waiting_for and Uploaded in pending.expects:
                self._proceed(request, others)
            elif worker in pending.waiting_for:
                if not pending.is_answered:
                    self._outgoing.answer(session_of(request), self._lost(request, worker))
                self._proceed(request, others._replace(is_answered=True, buffers=()))


def _read(request: int, pending: PendingRequest) -> TensorRead | Failed:
    """The parts of a tensor, or the failure of the first part that has failed."""
    replies = dict(pending.replies)
    in_order = [replies[read.worker] for read in pending.reads]
    failed = next((reply for reply in in_order if isinstance(reply, Failed)), None)
    if failed is not None:
        return failed
    byte_ranges: list[ByteRange] = [reply.byte_range for reply in in_order if isinstance(reply, Fetched)]
    return TensorRead(request, tuple(byte_ranges), None if pending.layout is None else pending.layout.record())


def _buffers(pending: PendingRequest, answer: Answer) -> tuple[Buffer, ...]:
    """The bytes beside an answer, in the order of its parts."""
    if not isinstance(answer, TensorRead):
        return ()
    buffers = dict(pending.buffers)
    return tuple([buffers.get(read.worker, b"") for read in pending.reads])


def _require_answer(pending: PendingRequest, reply: Reply) -> None:
    """Raises ProtocolError before the reply changes anything, so that the request stays pending."""
    if not isinstance(reply, pending.expects):
        expected = " or ".join(kind.__name__ for kind in pending.expects)
        what = "a query" if pending.mesh is not None else f"a request that {expected} answers"
        raise ProtocolError(f"{type(reply).__name__} is not an answer to {what}")
    if isinstance(reply, Queried) and len(reply.written) != len(pending.written):
        raise ProtocolError(
            f"a query that writes {len(pending.written)} tensors was answered with {len(reply.written)}"
        )
    if isinstance(reply, Queried) and len(_metas(reply)) > MAX_RESULTS:
        raise ProtocolError(f"{len(_metas(reply))} results of one query are over the limit of {MAX_RESULTS}")


def require_timeline(report: TimelineReport) -> None:
    """Raises ProtocolError if a timeline is longer than a worker may send at a time."""
    if len(report.ran) > RAN_AT_ONCE or len(report.memory) > MAX_SAMPLES:
        raise ProtocolError(f"a timeline of {len(report.ran)} commands is over the limit of {RAN_AT_ONCE}")


def _metas(reply: Queried) -> list[TensorMeta]:
    return [result for result in reply.results if isinstance(result, TensorMeta)]


class TensorReads:
    """Asks the workers for the parts of tensors that clients read."""

    def __init__(self, state: State, outgoing: MessageQueue, requests: Requests) -> None:
        self._state = state
        self._outgoing = outgoing
        self._requests = requests

    def fetch(self, session: SessionRecord, fetch: FetchTensor, _: Buffer | None) -> None:
        """Read a tensor, or an earlier value of it, from the workers that hold its parts. The client puts the parts
        together."""
        if fetch.version == CURRENT:
            tensor = self._state.tensor(fetch.id)
            source = fetch.id, tensor.spec
            ident, spec = source if fetch.worker is not None else self._source(*source, tensor.meta)
            self._read(session, fetch, ident, spec, tensor.meta)
            return
        version = self._state.readable_version(fetch.id)
        if version is None:
            self._state.tensor(fetch.id)  # raises
            return
        self._read(session, fetch, version.ident, version.tensor.spec, version.tensor.meta)

    def _source(self, ident: int, spec: ShardingSpec, meta: TensorMeta) -> tuple[int, ShardingSpec]:
        """The id and layout to read: of the tensor or a copy, with the fewest bytes and then the fewest parts."""
        copies = self._state.copies.get(ident)
        if spec.is_whole or not copies:
            return ident, spec
        known = [(ident, spec), *[(copy, layout) for layout, copy in copies.items()]]
        return min(
            [source for source in known if source[1].is_partition(meta.shape)],
            key=lambda source: _cost(parts_to_read(source[1], meta.shape)),
        )

    def _read(
        self, session: SessionRecord, fetch: FetchTensor, ident: int, spec: ShardingSpec, meta: TensorMeta
    ) -> None:
        """Ask one holder of each part. Those that share memory with the client write to its `place`."""
        workers, sizes = _part_of(fetch.worker, spec, meta) if fetch.worker is not None else _parts(spec, meta)
        layout = None if spec.is_whole and fetch.worker is None else spec
        if spec.is_whole and fetch.id in self._state.may_resize:
            sizes = [-1]
        place, offset = fetch.place, 0
        if place is not None and sum(sizes) > place.nbytes:
            self._state.require_new_request(fetch.request)
            self._outgoing.answer(session.ident, MoreRoomNeeded(fetch.request, sum(sizes)))
            return
        reads: list[ReadPart] = []
        for worker, nbytes in zip(workers, sizes, strict=True):
            shares = place is not None and nbytes > 0 and session.host == self._state.workers[worker].info.host
            own = ByteRange(place.name, nbytes, place.offset + offset) if place is not None and shares else None
            reads.append(ReadPart(worker, nbytes, own))
            self._outgoing.command((worker,), WorkerFetchTensor(fetch.request, ident, fetch.version, own, fetch.site))
            offset += nbytes
        self._require_memory(reads)
        self._requests.wait_for_read(fetch.request, reads, layout)

    def _require_memory(self, reads: Sequence[ReadPart]) -> None:
        """Raise MemoryError if this process cannot take the bytes of a read beside those that are on their way."""
        nbytes = _bytes_in_messages(reads)
        if nbytes < SHARE_BYTES:
            return
        expected = sum([_bytes_in_messages(pending.reads) for pending in self._state.pending.values()])
        try:
            require_memory(_COPIES * (nbytes + expected))
        except MemoryError as error:
            raise MemoryError(
                f"the server has no memory to pass {print_bytes(nbytes)} on to the program that reads them: {error}; "
                f"read parts of the tensor, or give the server more memory"
            ) from None

    def read_versions(self, session: SessionRecord, read: ReadVersions, _: Buffer | None) -> None:
        versions = [self._state.readable_version(ident) for ident in read.ids]
        idents = tuple(version.ident for version in versions if version is not None)
        workers = tuple(self._state.workers)
        if not workers:
            raise NoWorkers
        self._requests.wait_for_versions(read.request, workers, read.ids)
        self._outgoing.command(workers, ReadVersions(read.request, idents))


def _bytes_in_messages(reads: Sequence[ReadPart]) -> int:
    return sum([max(read.nbytes, 0) for read in reads if read.place is None])


def _parts(spec: ShardingSpec, meta: TensorMeta) -> tuple[list[int], list[int]]:
    """A holder of each part of a tensor, and the bytes of the parts."""
    if spec.is_whole:
        return [spec.mesh.workers[0]], [meta.nbytes]
    parts = parts_to_read(spec, meta.shape)
    return [part.workers[0] for part in parts], [part.elements * ITEM_BYTES[meta.dtype] for part in parts]


def _part_of(worker: int, spec: ShardingSpec, meta: TensorMeta) -> tuple[list[int], list[int]]:
    """A worker, and the bytes of the part that it holds."""
    if worker not in spec.mesh:
        raise InvalidInstruction(f"worker {worker} holds no part of a tensor on mesh {spec.mesh}")
    return [worker], [math.prod(compute_local_shape(spec, meta.shape, worker)) * ITEM_BYTES[meta.dtype]]


def _cost(parts: tuple[TensorPart, ...]) -> tuple[int, int]:
    return sum([part.elements for part in parts]), len(parts)
