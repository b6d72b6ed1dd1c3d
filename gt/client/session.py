"""A program's session with a dispatcher: ids, definitions, uploads, requests and its end."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from gt.client.cached_calls import CachedCall
from gt.client.call_log import open_call_log
from gt.client.call_sites import Site, Sites
from gt.client.error_text import describe_failure, describe_unread
from gt.client.flow_control import FlowControl
from gt.client.inbox import Inbox
from gt.client.interrupts import require_outside
from gt.client.outbox import Outbox
from gt.client.program_matcher import ProgramMatcher
from gt.client.recordings import CommandRecordings, TrafficRecordings
from gt.client.rule_inference import RuleInference
from gt.client.scope_resolver import ScopeResolver
from gt.client.scope_stack import in_use
from gt.client.storage import ROOT, Geometry, Storage, TensorRef, geometry_of, intern_geometry
from gt.client.torch_patches.dispatch import unintercepted
from gt.client.torch_strides import strides_without_gaps
from gt.client.transfers import MAX_BYTES, UploadCache, payload, strided, write_parts
from gt.core.errors import GTError, LimitError, OpError, SessionError
from gt.core.ids import FIRST_QUERY_ID, MAX_RESULTS, SESSION_SHIFT
from gt.core.message_events import Captures
from gt.core.messages import (
    ByteRange,
    CreateTensor,
    DefineOp,
    DefineSite,
    Failure,
    ForgetOps,
    Goodbye,
    Instruction,
    Joined,
    Left,
    Lost,
    PlaceTensor,
    Queried,
    ReadTimeline,
    ReadTraffic,
    Redistribute,
    RunOp,
    RunProgram,
    Synchronize,
    TimelineRead,
    TrafficRead,
    Welcome,
)
from gt.core.program import Program
from gt.core.progress import ProgressDisplay
from gt.core.settings import DEFAULT_HOT_PATH, HotPathSettings
from gt.core.signatures import Input, Signature, as_name, as_text
from gt.core.tables import print_bytes
from gt.sharding.held_parts import distinct_parts
from gt.sharding.spec import ShardingSpec
from gt.wire.client_channel import ClientChannel, Received, Upload, UploadWriter, as_buffer
from gt.wire.long_waits import told_in_background
from gt.wire.shared_memory import SHARE_BYTES

MAX_CACHED_CALLS = 1 << 16
FORGET_AT_ONCE = 1 << 16  # ops that one ForgetOps names
FORKED = (
    "this process was forked from one that uses GT, and a session belongs to one process; let the workers of a data "
    "loader return plain tensors and move these to GT in the parent, or use num_workers=0"
)
LARGE_UPLOAD = 1 << 28  # bytes of an upload that may take seconds
FAREWELL_SECONDS = 2.0  # how long close() waits for work, to show its failures

_Answer = TypeVar("_Answer")


class Session:
    """A program's session with a dispatcher.

    - `workers`: the connected workers, as far as the dispatcher has reported; `known_workers`: also those that were
      lost
    - `alone`: the session never had more than one worker; `embedded`: its only worker is in this process
    - `cached_calls`: the calls that were inferred before, by op, geometries and constants; `calls_inferred` counts them
    - `asked`: the keys of those whose geometries a worker has told
    - `rule_inference`: infers calls that differ from inferred ones in sizes only
    - `scope_resolver`: finds the signal scope of each op; None if no op has one
    - `computes`: False if ops are only planned, so that no tensor has a value; `assumed` are the ops whose shapes a
      worker would have told
    - `display`: shows a person how long waits go on; None if nobody looks
    - `call_log`: writes the table of GT_DEBUG_CLIENT; None if nobody reads it
    """

    def __init__(
        self,
        channel: ClientChannel,
        welcome: Welcome,
        auto_shard: bool | None = None,
        hot_path: HotPathSettings = DEFAULT_HOT_PATH,
        display: ProgressDisplay | None = None,
        *,
        computes: bool = True,
    ) -> None:
        first = welcome.ident << SESSION_SHIFT
        self.welcome = welcome
        self.workers = welcome.workers
        self.known_workers = {info.worker for info in welcome.workers}
        self.ids = itertools.count(first + 1)
        self.alone = len(welcome.workers) == 1
        self.embedded = self.alone and not channel.is_asynchronous
        self.computes = computes
        self.assumed: set[str] = set()
        self.asked: set[tuple[Any, ...]] = set()
        self.on_cpu = all(worker.device == "cpu" for worker in welcome.workers)
        self.scope_resolver: ScopeResolver | None = None
        self.cached_calls: dict[tuple[Any, ...], Any] = {}
        self.calls_inferred = 0
        self.rule_inference = RuleInference()
        self.signatures: dict[int, Signature] = {}
        self.programs: dict[int, Program] = {}  # those that gt.compile has defined, by id
        self.closed_because = ""  # the reason, if the session is closed
        self.quiet_threads = 1  # threads that never make an op: the one that flushes, and those of the monitor
        self.captures: Captures | None = None  # set by the launcher, which knows where the dispatcher runs
        self.recordings = CommandRecordings(self._read_timeline)
        self.traffic_recordings = TrafficRecordings(self._read_traffic)
        self.is_traced = False  # whether gt.compile records the instructions of a call
        self.check_value: Callable[[torch.Tensor], None] | None = None  # called with each value that is read
        self.is_measuring = False  # whether the workers record the memory of tensors
        self.sites = Sites(self._define_site)
        self.call_log = open_call_log(self.sites, lambda: self.signatures)
        self.upload_cache = UploadCache(self._upload_operand)
        self.display = display
        self.inbox = Inbox(channel, self.sites, self._note_workers, display)
        self._flow_control = FlowControl(
            self._request_synchronization, self.inbox.wait, welcome.max_in_flight, self.inbox.wait_for_room
        )
        self._op_ids = itertools.count(first + 1)
        self.matcher = ProgramMatcher(hot_path, self.new_op_id, lambda: self.signatures)
        self.outbox = Outbox(
            channel, self.inbox.collect, self._flow_control.count, self._break_off, self.matcher, self.call_log
        )
        self._auto_shard = auto_shard
        self.channel = channel
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

    def _note_workers(self, news: Joined | Lost | Left) -> None:
        """Scopes and meshes mean the present workers from now on, and constants are uploaded anew."""
        if not isinstance(news, Joined) and all(info.worker != news.worker for info in self.workers):
            return  # an earlier answer reported this
        self.upload_cache.forget()
        others = [info for info in self.workers if isinstance(news, Joined) or info.worker != news.worker]
        if isinstance(news, Joined):
            others = [*[info for info in others if info.worker != news.worker.worker], news.worker]
            self.on_cpu = self.on_cpu and news.worker.device == "cpu"
            self.known_workers.add(news.worker.worker)
        self.workers = tuple(others)
        if len(self.workers) > 1 and self.alone:
            self.alone = False
            if self._auto_shard is not False:
                self.resolve_scopes()

    # Definitions

    def new_op_id(self) -> int:
        """An id for an op or a program."""
        return next(self._op_ids)

    def define(self, signature: Signature) -> int:
        op_id = self.new_op_id()
        self.signatures[op_id] = signature
        self.outbox.emit(DefineOp(op_id, signature))
        return op_id

    def cache_call(self, key: tuple[Any, ...], call: CachedCall | tuple[int, Geometry]) -> None:
        """Keep an inferred call; when there are too many, forget all and start again."""
        self.calls_inferred += 1
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
        self.outbox.emit(DefineSite(site_id, as_text(site.file), site.line, as_name(site.function)))

    def reserve_ids(self) -> int:
        """The first of a range of ids for the results of a query."""
        return next(self._query_ids)

    def expand(self, instruction: Instruction) -> Sequence[Instruction]:
        """The steps of a program that `gt.compile` has run; any other instruction alone."""
        program = self.programs.get(instruction.program_id) if isinstance(instruction, RunProgram) else None
        return program.expand(instruction) if program is not None else (instruction,)  # type: ignore[arg-type]

    # Uploads

    @unintercepted
    def upload(self, tensor: torch.Tensor, layout: ShardingSpec | None = None, *, is_operand: bool = False) -> Storage:
        """A snapshot of a plain tensor's bytes as a new tensor: in a layout, or in that of the scope, or else on one
        worker. It has the strides of the tensor's `clone()`, as if torch had copied it to another device. An operand
        of an op is not laid out, as the op says how it needs it, and has exactly the strides of the tensor."""
        self.require_open()
        plain = strided(tensor)
        if not is_operand or plain.numel() * plain.itemsize > MAX_BYTES:  # it may wait
            require_outside()
        stride = plain.stride() if is_operand else strides_without_gaps(plain)
        geometry = intern_geometry(plain.shape, stride, 0, plain.dtype)
        if layout is None and not is_operand and self.scope_resolver is not None:
            layout = self.scope_resolver.layout_of_upload(plain.shape)
        partial = layout if layout is not None and layout.partial else None
        layout = partial.replace(partial=()) if partial is not None else layout
        data = self._bytes_of(plain, stride, layout)
        storage = Storage(self, next(self.ids), geometry)
        byte_range = ByteRange("", geometry.nbytes)
        record = layout.record() if layout is not None else None
        instruction = CreateTensor(storage.id, geometry.meta(), byte_range, record, self.sites.current())
        if geometry.nbytes >= SHARE_BYTES and self.channel.is_asynchronous:
            self.inbox.collect_now()  # an answer may tell that the memory of an earlier upload is free
        with self._told_of_upload(geometry.nbytes):
            self.outbox.emit_upload(instruction, data, at_once=geometry.nbytes > MAX_BYTES)
        return storage if partial is None else self.redistribute(storage, partial)

    def _told_of_upload(self, nbytes: int) -> contextlib.AbstractContextManager[None]:
        """Tells a person of an upload that may take long. Others are not worth a thread."""
        if self.display is None or nbytes < LARGE_UPLOAD:
            return contextlib.nullcontext()
        return told_in_background(self.display, lambda: f"uploading {print_bytes(nbytes)}")

    def _bytes_of(self, plain: torch.Tensor, stride: tuple[int, ...], layout: ShardingSpec | None) -> Upload:
        """The bytes of an upload in the order of `stride`: the boxes of its layout one after another."""
        parts = distinct_parts(layout, tuple(plain.shape)) if layout is not None else ()
        if len(parts) < 2:
            return payload(plain, stride)
        writer = UploadWriter(plain.numel() * plain.itemsize, functools.partial(write_parts, plain, stride, parts))
        return writer if writer.nbytes > MAX_BYTES else as_buffer(writer)

    def _upload_operand(self, tensor: torch.Tensor) -> Storage:
        return self.upload(tensor, is_operand=True)

    # Tensors that are made of others

    def derive(self, ref: TensorRef) -> Storage:
        """The value of a view as a separate tensor."""
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

    def place(self, storage: Storage, spec: ShardingSpec) -> None:
        """Give a tensor another layout, for good; its value stays."""
        site = self.sites.current()
        self.outbox.submit(lambda ids: PlaceTensor(ids[0], spec.record(), site), [storage])

    # Requests

    def read_query(self, request: int, site: int) -> Queried:
        """The answer to a QueryOp that was submitted."""
        answer = self.wait_for(request, site).answer
        assert isinstance(answer, Queried)
        return answer

    def synchronize(self) -> None:
        """Wait for all work. Raises failures that no read has shown, so that none is lost."""
        self.require_open()
        self.wait_for(self._request_synchronization(), self.sites.current() if self.recordings else 0)
        if failures := self.inbox.take_unread_failures():
            kind = LimitError if all(failure.kind == LimitError.__name__ for failure in failures) else OpError
            raise kind("\n\n".join(map(self._describe, failures)))

    def wait_for_work(self) -> None:
        """Wait until every worker has run its commands. Raises WorkerLost if one is lost meanwhile; the dispatcher has
        noted the loss then."""
        self.answer(self._request_synchronization())

    def _describe(self, failure: Failure) -> str:
        return describe_failure(failure, self.sites.lookup(failure.site))

    def ask(self, make: Callable[[int], Instruction], kind: type[_Answer]) -> _Answer:
        """The answer, of a kind, to the request that `make` makes of its number."""
        request = next(self.ids)
        self.outbox.emit(make(request))
        answer = self.answer(request).answer
        assert isinstance(answer, kind)
        return answer

    def answer(self, request: int) -> Received:
        """Send the queued instructions, and wait for the answer to a request."""
        self.outbox.flush()
        return self.inbox.wait(request)

    def wait_for(self, request: int, site: int) -> Received:
        """The answer that a line of the program waits for; recordings note the wait."""
        if not self.recordings:
            return self.answer(request)
        start = time.monotonic_ns()
        try:
            return self.answer(request)
        finally:
            self.recordings.note_wait(start, time.monotonic_ns(), site)

    def _read_timeline(self, limit: int) -> TimelineRead:
        """Take commands that the workers have recorded; `limit`: how many each may keep from now on."""
        return self.ask(lambda request: ReadTimeline(request, limit), TimelineRead)

    def _read_traffic(self, watch: bool) -> TrafficRead:
        """The bytes moved between workers, and new collectives; `watch`: note collectives from now on."""
        return self.ask(lambda request: ReadTraffic(request, watch), TrafficRead)

    def _request_synchronization(self) -> int:
        """Ask for an answer when all work so far is done."""
        request = next(self.ids)
        self.outbox.emit(Synchronize(request))
        return request

    # The end

    def require_open(self) -> None:
        if self.closed_because:
            raise SessionError(self.closed_because)

    def require_values(self, need: str) -> None:
        """Raise if nothing is computed. `need` says what a value is needed for."""
        if not self.computes:
            raise SessionError(
                f"{self.sites.text(self.sites.current())}: {need}, but nothing is computed in gt.init(mode='shapes'); "
                "leave it out of the step that is planned, or use mode='virtual'"
            )

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
        self.channel.close()

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
