"""A program's session with a dispatcher: ids, definitions, uploads, reads and its end."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from gt.client.cached_calls import CachedCall
from gt.client.call_sites import Site, Sites
from gt.client.error_text import describe_failure, describe_unread
from gt.client.flow_control import FlowControl
from gt.client.geometry import Geometry, geometry_of, intern_geometry
from gt.client.host_data import payload, strided
from gt.client.inbox import Inbox
from gt.client.interrupts import CriticalSection, require_outside
from gt.client.outbox import Outbox
from gt.client.part_assembly import assemble, write_parts
from gt.client.rule_inference import RuleInference
from gt.client.scope_resolver import ScopeResolver
from gt.client.scope_stack import in_use
from gt.client.segment_matcher import SegmentMatcher
from gt.client.storage import ROOT, Storage, TensorRef
from gt.client.upload_cache import MAX_BYTES, UploadCache
from gt.core.errors import GTError, OpError, SessionError
from gt.core.ids import FIRST_QUERY_ID, MAX_RESULTS, SESSION_SHIFT
from gt.core.message_events import Captures
from gt.core.messages import (
    CURRENT,
    ByteRange,
    CreateTensor,
    DefineOp,
    DefineSite,
    Failure,
    FetchTensor,
    ForgetOps,
    Goodbye,
    Instruction,
    Joined,
    Located,
    LocateTensor,
    Lost,
    MemoryRead,
    MoreRoomNeeded,
    Queried,
    ReadMemory,
    ReadStats,
    ReadTimeline,
    ReadTraffic,
    ReadVersions,
    Redistribute,
    RunOp,
    RunSegment,
    StatsRead,
    Synchronize,
    TensorRead,
    TimelineRead,
    TrafficRead,
    VersionSpan,
    VersionsRead,
    Welcome,
)
from gt.core.meta import dense_strides, is_dense
from gt.core.segments import SegmentBody
from gt.core.settings import DEFAULT_HOT_PATH, HotPathSettings
from gt.core.signatures import Input, Signature
from gt.sharding.distinct_parts import distinct_parts
from gt.sharding.spec import ShardingSpec, spec_of
from gt.wire.client_channel import ClientChannel, Received, Upload, UploadWriter, as_buffer
from gt.wire.codec import Buffer
from gt.wire.shared_memory import SHARE_BYTES

MAX_CACHED_CALLS = 1 << 16
FORGET_AT_ONCE = 1 << 16  # ops that one ForgetOps names
FORKED = (
    "this process was forked from one that uses GT, and a session belongs to one process; let the workers of a data "
    "loader return plain tensors and move these to GT in the parent, or use num_workers=0"
)
FAREWELL_SECONDS = 2.0  # how long close() waits for work, to show its failures

_Answer = TypeVar("_Answer")


class Session:
    """A program's session with a dispatcher.

    - `workers`: the connected workers, as far as the dispatcher has reported
    - `alone`: the session never had more than one worker; `embedded`: its only worker is in this process
    - `cached_calls`: the calls that were inferred before, by op, geometries and constants
    - `rule_inference`: infers calls that differ from inferred ones in sizes only
    - `scope_resolver`: finds the signal scope of each op; None if no op has one
    """

    def __init__(
        self,
        channel: ClientChannel,
        welcome: Welcome,
        auto_shard: bool | None = None,
        hot_path: HotPathSettings = DEFAULT_HOT_PATH,
    ) -> None:
        first = welcome.ident << SESSION_SHIFT
        self.welcome = welcome
        self.workers = welcome.workers
        self.ids = itertools.count(first + 1)
        self.alone = len(welcome.workers) == 1
        self.embedded = self.alone and not channel.is_asynchronous
        self.on_cpu = all(worker.device == "cpu" for worker in welcome.workers)
        self.scope_resolver: ScopeResolver | None = None
        self.cached_calls: dict[tuple[Any, ...], Any] = {}
        self.rule_inference = RuleInference()
        self.signatures: dict[int, Signature] = {}
        self.segment_bodies: dict[int, SegmentBody] = {}  # of the segments that gt.compile has defined
        self.closed_because = ""  # the reason, if the session is closed
        self.quiet_threads = 1  # of this process that never make an op: the one that flushes, and those of the monitor
        self.captures: Captures | None = None  # set by the launcher, which knows where the dispatcher runs
        self.is_recording = False  # whether the workers record the commands they run
        self.is_traced = False  # whether gt.compile records the instructions of a call
        self.is_measuring = False  # whether the workers record the memory of tensors
        self.sites = Sites(self._define_site)
        self.upload_cache = UploadCache(self._upload_operand)
        self.inbox = Inbox(channel, self.sites, self._note_workers)
        self._flow_control = FlowControl(self._request_synchronization, self.inbox.wait)
        self._op_ids = itertools.count(first + 1)
        self.matcher = SegmentMatcher(hot_path, self.new_op_id, lambda: self.signatures)
        self.outbox = Outbox(channel, self.inbox.collect, self._flow_control.count, self._break_off, self.matcher)
        self._auto_shard = auto_shard
        self._channel = channel
        self._query_ids = itertools.count(first + FIRST_QUERY_ID, MAX_RESULTS)
        self._ended = False
        if in_use() or (not self.alone and auto_shard is not False):
            self.resolve_scopes()

    def note_quiet_threads(self, change: int) -> None:
        """Called by a thread that makes no ops, after its start and before its end: while it is not counted, ops take a
        lock that they do not need."""
        self.quiet_threads += change

    def resolve_scopes(self) -> ScopeResolver:
        """Find the scope of each op from now on."""
        if self.scope_resolver is None:
            self.scope_resolver = ScopeResolver(self, self._auto_shard)
        return self.scope_resolver

    def _note_workers(self, news: Joined | Lost) -> None:
        """A worker has joined or was lost: scopes and meshes mean the connected workers from now on, and constants that
        lay on a lost worker, or were uploaded while there was none, are uploaded anew."""
        if isinstance(news, Lost) and all(info.worker != news.worker for info in self.workers):
            return  # an answer to a request told of this loss before
        self.upload_cache.forget()
        others = [info for info in self.workers if not isinstance(news, Lost) or info.worker != news.worker]
        if isinstance(news, Joined):
            others = [*[info for info in others if info.worker != news.worker.worker], news.worker]
            self.on_cpu = self.on_cpu and news.worker.device == "cpu"
        self.workers = tuple(others)
        if len(self.workers) > 1 and self.alone:
            self.alone = False
            if self._auto_shard is not False:
                self.resolve_scopes()

    # Definitions

    def new_op_id(self) -> int:
        """An id for an op or a segment."""
        return next(self._op_ids)

    def define(self, signature: Signature) -> int:
        op_id = self.new_op_id()
        self.signatures[op_id] = signature
        self.outbox.emit(DefineOp(op_id, signature))
        return op_id

    def cache_call(self, key: tuple[Any, ...], call: CachedCall | tuple[int, Geometry]) -> None:
        """Keep an inferred call; when there are too many, forget all and start again."""
        if len(self.cached_calls) >= MAX_CACHED_CALLS:
            *old, newest = self.signatures
            self.matcher.clear()
            self.cached_calls.clear()
            ROOT.children.clear()
            self.signatures = {newest: self.signatures[newest]}
            for start in range(0, len(old), FORGET_AT_ONCE):
                self.outbox.emit(ForgetOps(tuple(old[start : start + FORGET_AT_ONCE])))
        self.cached_calls[key] = call

    def _define_site(self, site_id: int, site: Site) -> None:
        self.outbox.emit(DefineSite(site_id, site.file, site.line, site.function[:512]))

    def reserve_ids(self) -> int:
        """The first of a range of ids for the results of a query."""
        return next(self._query_ids)

    def expand(self, instruction: Instruction) -> Sequence[Instruction]:
        """The instructions of the ops, if `gt.compile` has sent a segment; any other instruction alone."""
        body = self.segment_bodies.get(instruction.segment_id) if isinstance(instruction, RunSegment) else None
        return body.expand(instruction) if body is not None else (instruction,)  # type: ignore[arg-type]

    # Uploads

    def upload(self, tensor: torch.Tensor, layout: ShardingSpec | None = None, *, is_operand: bool = False) -> Storage:
        """A snapshot of a plain tensor's bytes as a new tensor: in a layout, or in that of the scope, or else on one
        worker. It has the strides of the tensor, without gaps, as if torch had copied it to another device. An operand
        of an op is not laid out, as the op says how it needs it, and has exactly the strides of the tensor."""
        self.require_open()
        require_outside()
        plain = strided(tensor)
        stride = plain.stride()
        if not is_operand and not is_dense(plain.shape, stride):
            stride = dense_strides(plain.shape, stride)
        geometry = intern_geometry(plain.shape, stride, 0, plain.dtype)
        if layout is None and not is_operand and self.scope_resolver is not None:
            layout = self.scope_resolver.layout_of_upload(plain.shape)
        partial = layout if layout is not None and layout.partial else None
        layout = partial.replace(partial=()) if partial is not None else layout
        data = self._bytes_of(plain, layout)
        storage = Storage(self, next(self.ids), geometry)
        byte_range = ByteRange("", geometry.nbytes)
        record = layout.record() if layout is not None else None
        instruction = CreateTensor(storage.id, geometry.meta(), byte_range, record, self.sites.current())
        if geometry.nbytes >= SHARE_BYTES and self._channel.is_asynchronous:
            self.inbox.collect_now()  # an answer may tell that the memory of an earlier upload is free
        self.outbox.emit_upload(instruction, data, at_once=geometry.nbytes > MAX_BYTES)
        return storage if partial is None else self.redistribute(storage, partial)

    def _bytes_of(self, plain: torch.Tensor, layout: ShardingSpec | None) -> Upload:
        """The bytes of an upload: the boxes of its layout one after another."""
        parts = distinct_parts(layout, tuple(plain.shape)) if layout is not None else ()
        if len(parts) < 2:
            return payload(plain)
        writer = UploadWriter(plain.numel() * plain.itemsize, functools.partial(write_parts, plain, parts))
        return writer if writer.nbytes > MAX_BYTES else as_buffer(writer)

    def _upload_operand(self, tensor: torch.Tensor) -> Storage:
        return self.upload(tensor, is_operand=True)

    # Reads

    def fetch(self, ref: TensorRef, version: int = CURRENT) -> torch.Tensor:
        """The value of a tensor as a plain one; waits until it is computed. `version` selects an earlier value."""
        self.require_open()
        storage = ref if isinstance(ref, Storage) else self.derive(ref)
        is_direct = self.embedded and version == CURRENT and not self.is_traced
        if is_direct and (data := self._read_directly(storage)) is not None:
            return assemble((data,), None, ref.geometry, is_shared=False)
        nbytes = ref.geometry.nbytes
        read = self._read(storage, version, nbytes)
        if isinstance(read.answer, MoreRoomNeeded):
            read = self._read(storage, version, read.answer.nbytes)
        assert isinstance(read.answer, TensorRead)
        layout = read.answer.layout
        return assemble(read.buffers, None if layout is None else spec_of(layout), ref.geometry, read.is_shared)

    def _read_directly(self, storage: Storage) -> Buffer | None:
        """The bytes of a tensor of the worker in this process; None if a request is necessary."""
        self.outbox.flush()
        self.inbox.require_accepted()
        with CriticalSection():
            data = self._channel.read_directly(storage.id)
        if data is not None:
            self.outbox.tape.append(FetchTensor(0, storage.id))
        return data

    def _read(self, storage: Storage, version: int, nbytes: int) -> Received:
        """Read a tensor, with room for so many bytes."""
        request = next(self.ids)
        site = self.sites.current()
        place = ByteRange("", nbytes) if nbytes >= SHARE_BYTES else None
        self.outbox.submit(lambda ids: FetchTensor(request, ids[0], version, site, place), [storage])
        return self._answer(request)

    def derive(self, ref: TensorRef) -> Storage:
        """The value of a view as a tensor of its own."""
        key = ("derive", ref.storage.geometry, ref.path)
        op_id, geometry = self.cached_calls.get(key, (0, ref.geometry))
        if not op_id:
            steps = ref.path.steps if ref.path is not None else ()
            geometry = geometry_of(ref.geometry.on_meta().clone())
            signature = Signature("aten.clone.default", (Input(0),), {}, (steps,), (), (geometry.meta(),), (0,))
            op_id = self.define(signature)
            self.cache_call(key, (op_id, geometry))
        storage = Storage(self, next(self.ids), geometry)
        site = self.sites.current()
        self.outbox.submit(lambda ids: RunOp(op_id, ids, (storage.id,), (), 0, site), [ref])
        return storage

    def redistribute(self, ref: TensorRef, spec: ShardingSpec) -> Storage:
        """A tensor with the same value in another layout."""
        self.require_open()
        source = ref if isinstance(ref, Storage) else self.derive(ref)
        storage = Storage(self, next(self.ids), source.geometry)
        site = self.sites.current()
        self.outbox.submit(lambda ids: Redistribute(ids[0], storage.id, spec.record(), site), [source])
        return storage

    def read_traffic(self, watch: bool) -> TrafficRead:
        """The bytes moved between workers; `watch`: record collectives from now on."""
        return self._ask(lambda request: ReadTraffic(request, watch), TrafficRead)

    def read_stats(self) -> StatsRead:
        """Counters of each worker, and the memory it holds."""
        return self._ask(ReadStats, StatsRead)

    def read_memory(self, watch: bool) -> MemoryRead:
        """The memory that tensors of this session took on each worker; `watch`: record it from now on."""
        self.outbox.flush()  # frees the tensors that were collected
        return self._ask(lambda request: ReadMemory(request, watch), MemoryRead)

    def read_timeline(self, limit: int) -> TimelineRead:
        """Take commands that the workers have recorded; `limit`: how many each may keep from now on."""
        return self._ask(lambda request: ReadTimeline(request, limit), TimelineRead)

    def read_query(self, request: int) -> Queried:
        """The answer to a QueryOp that was submitted."""
        answer = self._answer(request).answer
        assert isinstance(answer, Queried)
        return answer

    def read_versions(self, storages: Sequence[Storage]) -> tuple[VersionSpan, ...]:
        """For each tensor, the VersionSpan of its readable values."""
        self.require_open()
        request = next(self.ids)
        self.outbox.submit(lambda ids: ReadVersions(request, ids), storages)
        answer = self._answer(request).answer
        assert isinstance(answer, VersionsRead)
        return answer.spans

    def locate(self, ref: TensorRef) -> ShardingSpec:
        """The layout of a tensor; for a view, the layout that its value would have."""
        storage = ref if isinstance(ref, Storage) else self.derive(ref)
        request = next(self.ids)
        self.outbox.submit(lambda ids: LocateTensor(request, ids[0]), [storage])
        answer = self._answer(request).answer
        assert isinstance(answer, Located)
        return spec_of(answer.layout)

    def synchronize(self) -> None:
        """Wait for all work. Raises failures that no read has shown, so that none is lost."""
        self.require_open()
        self.wait_for_work()
        if failures := self.inbox.take_unread_failures():
            raise OpError("\n\n".join(map(self._describe, failures)))

    def wait_for_work(self) -> None:
        """Wait until every worker has run its commands. Raises WorkerLost if one is lost meanwhile; the dispatcher has
        noted the loss then."""
        self._answer(self._request_synchronization())

    def _describe(self, failure: Failure) -> str:
        return describe_failure(failure, self.sites.lookup(failure.site))

    def _ask(self, make: Callable[[int], Instruction], kind: type[_Answer]) -> _Answer:
        """The answer, of a kind, to the request that `make` makes of its number."""
        request = next(self.ids)
        self.outbox.emit(make(request))
        answer = self._answer(request).answer
        assert isinstance(answer, kind)
        return answer

    def _answer(self, request: int) -> Received:
        self.outbox.flush()
        return self.inbox.wait(request)

    def _request_synchronization(self) -> int:
        """Ask for an answer when all work so far is done."""
        request = next(self.ids)
        self.outbox.emit(Synchronize(request))
        return request

    # The end

    def require_open(self) -> None:
        if self.closed_because:
            raise SessionError(self.closed_because)

    def close(self, reason: str) -> None:
        """End the session: show failures that no read has shown, say goodbye, and refuse every use with a reason."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(GTError):
            self._show_failures()
            self.outbox.emit(Goodbye())
            self.outbox.flush()
        self._break_off(reason)
        self.outbox.close()
        self._channel.close()

    def _show_failures(self) -> None:
        """Print failures that were never read; waits a while for unfinished work."""
        request = self._request_synchronization()
        self.outbox.flush()
        try:
            self.inbox.wait(request, FAREWELL_SECONDS)
        except TimeoutError:
            print("gt: workers were still at work at the end; what fails of that is not shown", file=sys.stderr)
        for failure in self.inbox.take_unread_failures():
            print(f"gt: {describe_unread(failure, self.sites.lookup(failure.site))}", file=sys.stderr)

    def leave_to_parent(self) -> None:
        """Close the copy of the session in a forked process, which must not touch sockets and memory that the parent
        goes on using."""
        self._ended = True
        self._break_off(FORKED)

    def _break_off(self, reason: str) -> None:
        """Refuse every use from now on."""
        self.closed_because = reason
        self.outbox.refuse(reason)
