"""Reads of tensors by clients: of the present value, and of versions before a failed write or step."""

from __future__ import annotations

import math

from gt.core.messages import CURRENT, ByteRange, FetchTensor, MoreRoomNeeded, ReadVersions, WorkerFetchTensor
from gt.core.meta import ITEM_BYTES, TensorMeta
from gt.dispatcher.instruction_errors import InvalidInstruction, NoWorkers
from gt.dispatcher.message_queue import MessageQueue
from gt.dispatcher.requests import Requests
from gt.dispatcher.state import State
from gt.dispatcher.state_records import ReadPart, SessionRecord
from gt.sharding.held_parts import TensorPart, parts_to_read
from gt.sharding.spec import ShardingSpec, compute_local_shape
from gt.wire.codec import Buffer


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
        self._requests.wait_for_read(fetch.request, reads, layout)

    def read_versions(self, session: SessionRecord, read: ReadVersions, _: Buffer | None) -> None:
        versions = [self._state.readable_version(ident) for ident in read.ids]
        idents = tuple(version.ident for version in versions if version is not None)
        workers = tuple(self._state.workers)
        if not workers:
            raise NoWorkers
        self._requests.wait_for_versions(read.request, workers, read.ids)
        self._outgoing.command(workers, ReadVersions(read.request, idents))


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
