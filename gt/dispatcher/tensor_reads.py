"""Reads of tensors by clients: of the present value, and of versions before a failed write or step."""

from __future__ import annotations

from gt.core.messages import CURRENT, Failed, Fetched, FetchTensor, ReadVersions, WorkerFetchTensor, WorkerReviveTensor
from gt.dispatcher.errors import NoWorkers
from gt.dispatcher.message_queue import Buffer, MessageQueue
from gt.dispatcher.redistribution import Redistributor
from gt.dispatcher.requests import Requests
from gt.dispatcher.session_records import SessionRecord
from gt.dispatcher.state import State
from gt.sharding.spec import ShardingSpec, whole


class TensorReads:
    def __init__(self, state: State, outgoing: MessageQueue, redistributor: Redistributor, requests: Requests) -> None:
        self._state = state
        self._outgoing = outgoing
        self._redistributor = redistributor
        self._requests = requests

    def fetch(self, session: SessionRecord, fetch: FetchTensor, _: Buffer | None) -> None:
        """Read a tensor from a worker that holds it whole; a sharded tensor is gathered on one worker first, and the
        gathered copy is not kept."""
        if fetch.version != CURRENT:
            self._fetch_version(session, fetch)
            return
        tensor = self._state.tensor(fetch.id)
        spec, source, is_gathered = tensor.spec, fetch.id, False
        if not spec.is_whole:
            copy = next((copy for copy in self._state.copies.get(fetch.id, ()) if copy.is_whole), None)
            is_gathered = copy is None
            spec = copy or self._whole_on_first_worker(spec)
            source = self._redistributor.in_layout(session, fetch.id, spec, "fetch", fetch.site)
        nbytes = -1 if fetch.id in self._state.may_resize else tensor.meta.nbytes
        self._read(session, fetch, source, spec, nbytes)
        if is_gathered:
            self._redistributor.drop_copy(fetch.id, spec)

    def _fetch_version(self, session: SessionRecord, fetch: FetchTensor) -> None:
        """Read an earlier value; a sharded one is gathered first."""
        version = self._state.readable_version(fetch.id)
        if version is None:
            self._state.tensor(fetch.id)  # raises
            return
        ident, tensor, _ = version
        if tensor.spec.is_whole:
            self._read(session, fetch, ident, tensor.spec, tensor.meta.nbytes)
            return
        revived, gathered = self._state.new_id(session), self._state.new_id(session)
        self._outgoing.command(tensor.spec.mesh.workers, WorkerReviveTensor(ident, revived, fetch.version))
        spec = self._whole_on_first_worker(tensor.spec)
        self._redistributor.move(session, tensor, revived, gathered, spec, "fetch", fetch.site)
        self._read(session, fetch, gathered, spec, tensor.meta.nbytes)
        self._outgoing.free([(revived, tensor.spec.mesh), (gathered, spec.mesh)])

    def _whole_on_first_worker(self, spec: ShardingSpec) -> ShardingSpec:
        return whole(self._state.workers[spec.mesh.workers[0]].solo_mesh, len(spec.dims))

    def _read(self, session: SessionRecord, fetch: FetchTensor, ident: int, spec: ShardingSpec, nbytes: int) -> None:
        """Let the first worker of a whole tensor send it. `nbytes` is its size, -1 if that is not known yet."""
        worker = spec.mesh.workers[0]
        shared = session.host == self._state.workers[worker].info.host
        self._requests.wait(fetch.request, (worker,), Fetched, Failed, nbytes=nbytes)
        self._outgoing.command((worker,), WorkerFetchTensor(fetch.request, ident, shared, fetch.version))

    def read_versions(self, session: SessionRecord, read: ReadVersions, _: Buffer | None) -> None:
        versions = [self._state.readable_version(ident) for ident in read.ids]
        idents = tuple(version.ident for version in versions if version is not None)
        workers = tuple(self._state.workers)
        if not workers:
            raise NoWorkers
        self._requests.wait_for_versions(read.request, workers, read.ids)
        self._outgoing.command(workers, ReadVersions(read.request, idents))
