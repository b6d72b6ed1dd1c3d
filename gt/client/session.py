"""A client's conversation with a dispatcher: ids, definitions, host data going in and values coming out."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gt.bootstrap import load_launcher
from gt.client.call_cache import CachedCall
from gt.client.error_text import describe_failure, describe_unread
from gt.client.geometry import Geometry, forget_geometries, geometry_of, intern_geometry
from gt.client.host_data import as_tensor, payload, strided
from gt.client.inbox import Inbox
from gt.client.outbox import Outbox
from gt.client.scopes import ScopeResolver, in_use, push
from gt.client.sites import Sites
from gt.client.storage import ROOT, Node, Storage
from gt.core.errors import GTError, OpError, SessionError
from gt.core.ids import FIRST_RUN, MAX_RESULTS, SESSION_SHIFT
from gt.core.messages import (
    CURRENT,
    CreateTensor,
    DefineOp,
    DefineSite,
    Failure,
    Fetched,
    FetchTensor,
    ForgetOps,
    Goodbye,
    Instruction,
    Joined,
    Located,
    LocateTensor,
    Lost,
    Queried,
    ReadStats,
    ReadTimeline,
    ReadTraffic,
    ReadVersions,
    Redistribute,
    RunOp,
    Segment,
    Span,
    StatsRead,
    Synchronize,
    TimelineRead,
    TrafficRead,
    VersionsRead,
    Welcome,
)
from gt.core.meta import dense_strides, is_dense
from gt.core.signatures import Input, Signature
from gt.sharding.spec import ShardingSpec, spec_of
from gt.wire.channel import ClientChannel

INTERN_BYTES = 1 << 16  # larger host tensors are sent at once and not interned
INTERNED = 512
MEMO_SIZE = 1 << 16
FAREWELL_SECONDS = 2.0  # how long the end waits for work, to show what fails of it
PACE, MARKS = 4096, 4  # how many instructions make a mark, and how many marks the workers may be behind


class Session:
    """`workers` are those that are there, as far as the dispatcher has told. `alone`: there never was more than one
    worker, and where it is `embedded`, in this process. `scoping` says in which signal scope an op is; None where
    nothing has to be said about that. What names tensors is enqueued under the lock, then emitted;
    `emit` does both for what does not, and for programs of one thread."""

    def __init__(self, channel: ClientChannel, welcome: Welcome, auto_shard: bool | None = None) -> None:
        first = welcome.ident << SESSION_SHIFT
        self.welcome = welcome
        self.workers = welcome.workers
        self.ids = itertools.count(first + 1)
        self.alone = len(welcome.workers) == 1
        self.embedded = self.alone and not channel.remote
        self.on_cpu = all(worker.device == "cpu" for worker in welcome.workers)
        self.scoping: ScopeResolver | None = None
        self._auto_shard = auto_shard
        self.memo: dict[tuple[Any, ...], Any] = {}
        self.signatures: dict[int, Signature] = {}
        self.sites = Sites(self._define_site)
        self.inbox = Inbox(channel, self.sites, self._note_workers)
        self.outbox = Outbox(channel, self.inbox.collect, self._pace, self._break_off)
        self.lock = self.outbox.lock
        self.emit: Callable[[Instruction], None] = self.outbox.emit
        self.enqueue: Callable[[Instruction], None] = self.outbox.queue.append
        self.emitted: Callable[[], None] = self.outbox.emitted
        self.release: Callable[[int, int], None] = self.outbox.release
        self.closed = ""
        self.records = False  # the workers record what they run
        self._channel = channel
        self._codes = itertools.count(first + 1)
        self._runs = itertools.count(first + FIRST_RUN, MAX_RESULTS)
        self._constants: OrderedDict[tuple[Any, ...], Storage] = OrderedDict()
        self._unmarked = 0
        self._marks: deque[int] = deque()
        self._marking = threading.RLock()
        self._interning = threading.RLock()
        self._ended = False
        if in_use() or (not self.alone and auto_shard is not False):
            self.start_scoping()

    def start_scoping(self) -> ScopeResolver:
        """From now on ops say in which scope they are."""
        if self.scoping is None:
            self.scoping = ScopeResolver(self, self._auto_shard)
        return self.scoping

    def _note_workers(self, news: Joined | Lost) -> None:
        """A worker has come or gone: from now on scopes and meshes mean the workers that are there."""
        others = [info for info in self.workers if not isinstance(news, Lost) or info.worker != news.worker]
        if isinstance(news, Joined):
            others = [*[info for info in others if info.worker != news.worker.worker], news.worker]
            self.on_cpu = self.on_cpu and news.worker.device == "cpu"
        self.workers = tuple(others)
        if len(self.workers) > 1 and self.alone:
            self.alone = False
            if self._auto_shard is not False:
                self.start_scoping()

    # What the dispatcher is told once

    def define(self, signature: Signature) -> int:
        code = next(self._codes)
        self.signatures[code] = signature
        self.emit(DefineOp(code, signature))
        return code

    def remember(self, key: tuple[Any, ...], learned: CachedCall | tuple[int, Geometry]) -> None:
        """Keep what was learned about a call; when that is too much, forget everything and start again."""
        if len(self.memo) >= MEMO_SIZE:
            *old, newest = self.signatures
            self.memo.clear()
            ROOT.children.clear()
            self.signatures = {newest: self.signatures[newest]}
            for start in range(0, len(old), INTERN_BYTES):
                self.emit(ForgetOps(tuple(old[start : start + INTERN_BYTES])))
        self.memo[key] = learned

    def _define_site(self, code: int, file: str, line: int, function: str) -> None:
        self.emit(DefineSite(code, file, line, function[:512]))

    def reserve_ids(self) -> int:
        """The first of a run of ids for the results of a query."""
        return next(self._runs)

    # Host data in

    def upload(self, tensor: torch.Tensor, is_operand: bool = False) -> Storage:
        """A snapshot of a plain tensor's bytes as a new tensor on a worker, or laid out as the scope says. It has the
        strides of the tensor, without gaps, as if torch had copied it to another device. An operand of an op is not
        laid out, as the op says how it needs it, and has exactly the strides of the tensor."""
        self.require_open()
        plain = strided(tensor)
        stride = plain.stride()
        if not is_operand and not is_dense(plain.shape, stride):
            stride = dense_strides(plain.shape, stride)
        geometry = intern_geometry(plain.shape, stride, 0, plain.dtype)
        data = payload(plain)
        base = Storage(self, next(self.ids), geometry)
        large = geometry.nbytes > INTERN_BYTES
        scope = 0 if is_operand or self.scoping is None else self.scoping.of((base,), None)
        instruction = CreateTensor(base.id, geometry.meta(), Segment("", geometry.nbytes), scope, self.sites.here())
        self.outbox.emit_upload(instruction, data, at_once=large)
        return base

    def constant(self, tensor: torch.Tensor) -> Storage:
        """A plain tensor as an operand. Small ones are interned by content: models make the same masks and numbers
        again and again. By content and not by identity, because NumPy may write to a tensor's memory unseen."""
        if tensor.numel() * tensor.itemsize > INTERN_BYTES:
            return self.upload(tensor, is_operand=True)
        plain = strided(tensor)
        key = (plain.dtype, plain.shape, plain.stride(), bytes(payload(plain)))
        with self._interning:
            base = self._constants.get(key)
            if base is None:
                base = self._constants[key] = self.upload(plain, is_operand=True)
                if len(self._constants) > INTERNED:
                    self._constants.popitem(last=False)
            else:
                self._constants.move_to_end(key)
        return base

    # Values out

    def fetch(self, node: Node, version: int = CURRENT) -> torch.Tensor:
        """The value of a tensor as a plain one; waits until it is computed. `version`: a value that it had before."""
        self.require_open()
        base = node if isinstance(node, Storage) else self.derive(node)
        request = next(self.ids)
        site = self.sites.here()
        with self.lock:
            self.enqueue(FetchTensor(request, base.id, version, site))
        answer, buffer = self._answer(request)
        assert isinstance(answer, Fetched) and buffer is not None
        assert answer.segment.nbytes == node.geometry.nbytes, "a worker's tensor has another size than its handle"
        return as_tensor(buffer, node.geometry)

    def derive(self, node: Node) -> Storage:
        """The value of a view as a tensor of its own."""
        key = ("derive", node.base.geometry, node.path)
        code, geometry = self.memo.get(key, (0, node.geometry))
        if not code:
            steps = node.path.steps if node.path is not None else ()
            geometry = geometry_of(node.geometry.on_meta().clone())
            signature = Signature("aten.clone.default", (Input(0),), {}, (steps,), (), (geometry.meta(),), (0,))
            code = self.define(signature)
            self.remember(key, (code, geometry))
        base = Storage(self, next(self.ids), geometry)
        site = self.sites.here()
        with self.lock:
            self.enqueue(RunOp(code, (node.base.id,), (base.id,), (), 0, site))
        self.emitted()
        return base

    def redistribute(self, node: Node, spec: ShardingSpec) -> Storage:
        """A tensor with the same value, laid out as said."""
        self.require_open()
        source = node if isinstance(node, Storage) else self.derive(node)
        base = Storage(self, next(self.ids), source.geometry)
        site = self.sites.here()
        with self.lock:
            self.enqueue(Redistribute(source.id, base.id, spec.record(), site))
        self.emitted()
        return base

    def read_traffic(self, watch: bool) -> TrafficRead:
        """What has moved between workers; `watch`: remember collectives from now on."""
        request = next(self.ids)
        self.emit(ReadTraffic(request, watch))
        answer, _ = self._answer(request)
        assert isinstance(answer, TrafficRead)
        return answer

    def read_stats(self) -> StatsRead:
        """What each worker has done and holds."""
        request = next(self.ids)
        self.emit(ReadStats(request))
        answer, _ = self._answer(request)
        assert isinstance(answer, StatsRead)
        return answer

    def read_timeline(self, limit: int) -> TimelineRead:
        """Take some of what the workers have recorded; `limit`: how many commands each may hold from now on."""
        request = next(self.ids)
        self.emit(ReadTimeline(request, limit))
        answer, _ = self._answer(request)
        assert isinstance(answer, TimelineRead)
        return answer

    def ask(self, request: int) -> Queried:
        answer, _ = self._answer(request)
        assert isinstance(answer, Queried)
        return answer

    def read_versions(self, bases: Sequence[Storage]) -> tuple[Span, ...]:
        """Since when and until when tensors had the values that can still be had of them."""
        self.require_open()
        request = next(self.ids)
        with self.lock:
            self.enqueue(ReadVersions(request, tuple([base.id for base in bases])))
        answer, _ = self._answer(request)
        assert isinstance(answer, VersionsRead)
        return answer.spans

    def locate(self, node: Node) -> ShardingSpec:
        """How a tensor is laid out; for a view, how its value would be."""
        base = node if isinstance(node, Storage) else self.derive(node)
        request = next(self.ids)
        with self.lock:
            self.enqueue(LocateTensor(request, base.id))
        answer, _ = self._answer(request)
        assert isinstance(answer, Located)
        return spec_of(answer.layout)

    def synchronize(self) -> None:
        """Wait for all work. A failure that no read has shown yet is raised here, so that none is lost."""
        self.require_open()
        self.wait_for_work()
        if failures := self.inbox.unshown():
            raise OpError("\n\n".join(map(self._describe, failures)))

    def wait_for_work(self) -> None:
        """Wait until every worker has done what it was given. Raises WorkerLost if one is lost meanwhile; the
        dispatcher knows of it then."""
        request = next(self.ids)
        self.emit(Synchronize(request))
        self._answer(request)

    def _describe(self, failure: Failure) -> str:
        return describe_failure(failure, self.sites.place(failure.site))

    def _answer(self, request: int) -> Any:
        self.outbox.flush()
        return self.inbox.wait(request)

    def _pace(self, sent: int) -> None:
        """Keep the workers from falling behind without limit: every so often a mark is sent along, and when too many
        marks have not come back, wait for the oldest."""
        self._unmarked += sent
        if self._unmarked < PACE:
            return
        self._unmarked = 0
        mark = next(self.ids)
        self.emit(Synchronize(mark))
        with self._marking:
            self._marks.append(mark)
            late = [self._marks.popleft() for _ in range(len(self._marks) - MARKS)]
        for mark in late:
            self.inbox.wait(mark)

    # The end

    def require_open(self) -> None:
        if self.closed:
            raise SessionError(self.closed)

    def close(self, reason: str) -> None:
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(GTError):
            self._show_failures()
            self.emit(Goodbye())
            self.outbox.flush()
        self._break_off(reason)
        self.outbox.close()
        self._channel.close()

    def _show_failures(self) -> None:
        """What has failed and was never read; waits for the work that is not done, for a while."""
        request = next(self.ids)
        self.emit(Synchronize(request))
        self.outbox.flush()
        try:
            self.inbox.wait(request, FAREWELL_SECONDS)
        except TimeoutError:
            print("gt: workers were still at work at the end; what fails of that is not shown", file=sys.stderr)
        for failure in self.inbox.unshown():
            print(f"gt: {describe_unread(failure, self.sites.place(failure.site))}", file=sys.stderr)

    def leave_to_parent(self) -> None:
        """This is a copy of the session in a forked process, which must not touch what the parent goes on using."""
        self._ended = True
        self.lock = threading.RLock()  # a thread that the child does not have may hold the other
        self._break_off(
            "this process was forked from one that uses GT, and a session belongs to one process; start workers of "
            "a data loader with the 'spawn' method, or move tensors to GT in the parent"
        )

    def _break_off(self, reason: str) -> None:
        """From now on every use is refused."""
        self.closed = reason
        self.emit = self.enqueue = self._refuse
        self.release = _ignore

    def _refuse(self, *_: object) -> None:
        raise SessionError(self.closed)


def _ignore(*_: object) -> None:
    """Tensors of a closed session were freed with it."""


_connect: Callable[[], Session] | None = None
_connecting = threading.RLock()
active: Session | None = None


def set_connector(connect: Callable[[], Session]) -> None:
    """Say how the first op of a program gets its session; whoever starts workers calls this."""
    global _connect
    _connect = connect


def enter_scope(name: str, backward: str | None = None, owner: object = None) -> None:
    """Enter a signal scope; from then on the ops of the session, if there is one already, say in which they are."""
    push(name, backward, owner)
    if active is not None:
        active.start_scoping()


def activate(session: Session | None) -> None:
    global active
    active = session
    forget_geometries()
    ROOT.children.clear()


def current() -> Session:
    with _connecting:  # several threads may be the first
        if active is None:
            if _connect is None:
                load_launcher()
            assert _connect is not None, "gt.launch sets the connector when it is loaded"
            activate(_connect())
        assert active is not None
        return active


def _leave_to_parent() -> None:
    global _connecting
    _connecting = threading.RLock()
    if active is not None:
        active.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
