"""Instructions, reports, joins and losses in; messages for workers and clients out. No sockets, clocks or threads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from gt.core.errors import RefusalKind
from gt.core.ids import ALL_SESSIONS, session_of
from gt.core.message_events import Observer
from gt.core.message_fields import PAYLOAD_RECORDS, owner_of
from gt.core.messages import (
    TOLD_TO_END,
    Failed,
    Goodbye,
    Instruction,
    Leaving,
    Progress,
    ReadStory,
    Rejected,
    Report,
    RunProgram,
    Synchronized,
    TimelineReport,
    WorkerInfo,
    WorkerReportProgress,
)
from gt.core.settings import Limits
from gt.dispatcher.fair_queue import FairQueue, Mark
from gt.dispatcher.gradient_buckets import GradientBuckets
from gt.dispatcher.group_store import GroupStore
from gt.dispatcher.instructions import Instructions
from gt.dispatcher.membership import Membership
from gt.dispatcher.message_capture import CaptureRequests, MessageCapture
from gt.dispatcher.message_queue import MessageQueue, Outgoing, ToClient, ToWorkers
from gt.dispatcher.plan_cache import PlanCache
from gt.dispatcher.plan_records import plan_observer
from gt.dispatcher.programs import Programs, RunPart, Single
from gt.dispatcher.recent_batches import RecentBatches
from gt.dispatcher.redistribution import Redistributor
from gt.dispatcher.rejection import OP_OF_ANOTHER, reject, reject_internal_error
from gt.dispatcher.reports import Reports
from gt.dispatcher.requests import Requests
from gt.dispatcher.state import State
from gt.dispatcher.state_records import LOOPBACK, DeadWorker, SessionRecord
from gt.dispatcher.tensor_records import TensorRecord
from gt.dispatcher.tensor_stories import RecentMessages, tell_story
from gt.dispatcher.transactions import Transactions
from gt.dispatcher.worker_drains import WorkerDrains
from gt.wire.codec import Buffer
from gt.wire.refusals import shorten

log = logging.getLogger("gt.dispatcher")


class Dispatcher:
    """Turns instructions and reports into messages to send, in the one order that all workers follow. The `observer`,
    if there is one, sees each message. `copy_limit` is the most bytes of copies on a worker (None: half of the memory
    of the smallest worker), and `limits` are those of each session. `recent` is set while a tool asks for the lines of
    tensors. `note_rejection` gets the session, the kind and the reason of each invalid instruction."""

    def __init__(
        self, observer: Observer | None = None, copy_limit: int | None = None, limits: Limits | None = None
    ) -> None:
        self.limits = limits or Limits()
        state = self.state = State(limits=self.limits if self.limits.counts_tensors else None)
        outgoing = self._outgoing = MessageQueue(state, observer)
        self._transactions = Transactions(state, outgoing)
        plans_seen = plan_observer()
        redistributor = Redistributor(state, outgoing, plans_seen)
        plan_cache = PlanCache(state, outgoing, redistributor, plans_seen)
        store = GroupStore(state, outgoing)
        self._requests = Requests(state, outgoing)
        self._fair_queue = FairQueue(state)
        self._reports = Reports(state, outgoing, self._transactions, self._requests, store)
        programs = self._programs = Programs(state, outgoing, plan_cache, plans_seen)
        self._membership = Membership(
            state,
            outgoing,
            self._transactions,
            redistributor,
            plan_cache,
            programs,
            self._fair_queue,
            store,
            copy_limit,
        )
        buckets = GradientBuckets(state, redistributor, plan_cache)
        self._drains = WorkerDrains(state, outgoing, self._transactions, redistributor, programs, buckets)
        self._instructions = Instructions(state, outgoing, redistributor, self._requests, plan_cache, programs, buckets)
        self._instructions.actions[Goodbye] = self._goodbye
        self._instructions.actions[ReadStory] = self._read_story
        self._recent_messages: dict[int, RecentMessages] = {}
        self.keeps_sites = False  # whether the sites of old tensors are kept, for workers that may be lost
        self.captures = CaptureRequests()
        self.failures = outgoing.failures
        self.recent: RecentBatches | None = None
        self.note_rejection: Callable[[int, RefusalKind, str], None] | None = None

    # Workers and sessions

    def join_worker(
        self,
        device: str,
        host: str,
        pid: int,
        memory: int = 0,
        *,
        overlaps: bool = False,
        hostname: str = "",
        address: str = LOOPBACK,
    ) -> tuple[int, list[Outgoing]]:
        """A new worker gets an id that no other worker had. `memory` are the bytes of its device (0: not known); with
        `overlaps` it computes while its exchanges go on; others reach it at `address`."""
        ident = self._membership.join_worker(
            device, host, pid, memory, overlaps=overlaps, hostname=hostname, address=address
        )
        return ident, self._outgoing.take()

    def make_ready(self, worker: int) -> None:
        """Let a worker in this process get commands immediately: it needs no store. Its messages stay queued."""
        self._membership.make_ready(worker)

    def ready_workers(self) -> tuple[WorkerInfo, ...]:
        return tuple([self.state.workers[ident].info for ident in self.state.staying()])

    def lose_worker(self, ident: int, reason: str, last_op: str, op_id: int = 0) -> list[Outgoing]:
        """Requests that wait for the worker fail now; its tensors fail when they are next used. `op_id` is that of its
        last op."""
        if ident not in self.state.workers:
            return []
        dead = self._dead_worker(ident, reason, last_op, op_id)
        self._membership.lose_worker(ident, dead, self._reports, self._find_sites)
        self.captures.lose_worker(ident)
        self._drains.lose_worker(ident)
        return [*self._outgoing.take(), *self._take_turns()]

    def _dead_worker(self, ident: int, reason: str, last_op: str, op_id: int) -> DeadWorker:
        session = self.state.sessions.get(session_of(op_id))
        op_key = session.key if session is not None else None
        pid, is_drained = self.state.workers[ident].info.pid, self._drains.is_done(ident)
        return DeadWorker(pid, shorten(reason), shorten(last_op), op_key, is_drained)

    def _drain(self, ident: int, last_op: str, op_id: int) -> list[Outgoing]:
        """A worker was asked to end: it goes on until its tensors are with others."""
        self._drains.begin(ident, self._dead_worker(ident, f"left: {TOLD_TO_END}", last_op, op_id))
        return self._outgoing.take()

    def _find_sites(self, session: SessionRecord, idents: Iterable[int]) -> dict[int, int]:
        messages = self._recent_messages.get(session.ident)
        return messages.find_sites(session, idents) if messages is not None else {}

    def open_session(self, host: str, pid: int, key: str = "") -> int:
        """Open a session for a client that was admitted by the key with the name `key`."""
        session = self._membership.open_session(host, pid, key)
        self._recent_messages[session] = RecentMessages(self.state.tensors if self.keeps_sites else ())
        return session

    def end_session(self, ident: int) -> list[Outgoing]:
        """A client has left, with or without a Goodbye: free everything of its session."""
        self._membership.end_session(ident)
        self._recent_messages.pop(ident, None)
        return self._outgoing.take()

    def _goodbye(self, session: SessionRecord, goodbye: Goodbye, _: Buffer | None) -> None:
        self._membership.remove_session(session.ident)
        self._recent_messages.pop(session.ident, None)

    def _read_story(self, session: SessionRecord, read: ReadStory, _: Buffer | None) -> None:
        self.state.require_new_request(read.request)
        commands = self._recent_messages[session.ident].commands(session)
        failures = self.failures.by_origin(session.ident)
        self._outgoing.answer(session.ident, tell_story(self.state, session, commands, failures, read))

    def take(self) -> list[Outgoing]:
        """Messages queued before an unexpected exception."""
        return self._outgoing.take()

    def set_worker_description(self, describe: Callable[[int], str]) -> None:
        """Set the function that gives the state of a ready worker as text."""
        self._instructions.describe_worker = describe

    # Instructions

    def submit(self, ident: int, batch: Sequence[Instruction], buffers: Sequence[Buffer]) -> list[Outgoing]:
        """Queue instructions of a client that shares the workers, and carry out those whose turn it is. A
        Goodbye is carried out immediately, and drops the client's queued instructions."""
        if any(type(instruction) is Goodbye for instruction in batch):
            self._fair_queue.forget_session(ident)
            return self.instruct(ident, [Goodbye()], ())
        self._fair_queue.add(ident, batch, buffers)
        return self._take_turns()

    def is_waiting(self, ident: int) -> bool:
        """Whether instructions of a client are queued."""
        return self._fair_queue.is_waiting(ident)

    def _take_turns(self) -> list[Outgoing]:
        """Carry out the queued instructions whose turn it is."""
        outgoing: list[Outgoing] = []
        while (turn := self._fair_queue.next()) is not None:
            sent = self.instruct(turn.session, turn.batch, turn.buffers)
            outgoing += sent
            # Commands for the same workers share a tuple: the cost must not grow with ops times workers.
            groups = {id(out.workers): out.workers for out in sent if type(out) is ToWorkers}
            workers = tuple(dict.fromkeys(chain.from_iterable(groups.values())))
            if turn.cost and workers and (mark := self._fair_queue.begin(turn, workers)) is not None:
                outgoing.append(_request(mark))
        outgoing += map(_request, self._fair_queue.overdue_marks())
        return outgoing

    def instruct(self, ident: int, batch: Sequence[Instruction], buffers: Sequence[Buffer]) -> list[Outgoing]:
        """Carry out instructions immediately, each in its own transaction. Hot path: a transaction as in
        `Transactions.begin`, without its calls."""
        session = self.state.sessions.get(ident)
        if session is None:
            return [ToClient(ident, Rejected(0, f"session {ident} has ended"))]
        self._programs.limit_plans(session)
        capture = self.captures.current
        start_time = capture.clock() if capture is not None else 0
        remaining = iter(buffers)
        actions, outgoing = self._instructions.actions, self._outgoing
        inverses, queued = self.state.undo.inverses, outgoing.queued
        observed = outgoing.observer is not None
        created: dict[int, TensorRecord] = {}
        singles: Iterable[Single] = batch
        if RunProgram in map(type, batch):
            singles = self._programs.expanded(session, batch)
        for instruction in singles:
            start = len(queued)
            if observed:
                self._observe_received(ident, instruction)
            buffer = next(remaining) if buffers and type(instruction) in PAYLOAD_RECORDS else None
            try:
                actions[type(instruction)](session, instruction, buffer)
            except Exception as error:
                self._transactions.roll_back(start)
                self._reject(session, instruction, error)
            if inverses:
                self.state.commit()
            if observed:
                outgoing.observe_from(start)
            if capture is not None:
                created |= outgoing.created_from(start)
            if type(instruction) is Goodbye:
                break
        sent = outgoing.take()
        if sent and (messages := self._recent_messages.get(ident)) is not None:
            messages.add(sent, has_bytes=bool(buffers))
        if capture is not None:
            capture.note_batch(session, batch, sent, start_time, created)
        if (recent := self.recent) is not None:
            recent.note(session, batch)
        return sent

    def _observe_received(self, ident: int, instruction: Single) -> None:
        for received in instruction.instructions() if type(instruction) is RunPart else (instruction,):
            self._outgoing.observe("RECV", f"client {ident}", received)  # type: ignore[arg-type]

    def _reject(self, session: SessionRecord, single: Single, error: Exception) -> None:
        instruction = single.run if isinstance(single, RunPart) else single
        start = len(self._outgoing.queued)
        try:
            rejection = reject(self.state, session, instruction, error)
            self._outgoing.free(rejection.freed)
            for answer in rejection.answers:
                self._outgoing.answer(session.ident, answer)
            if rejection.mistake is not None and self.note_rejection is not None:
                self.note_rejection(session.ident, rejection.mistake.kind, str(rejection.mistake))
        except Exception as internal_error:
            log.exception("%s of client %d could not be refused", type(instruction).__name__, session.ident)
            self._transactions.roll_back(start)
            self._outgoing.answer(session.ident, reject_internal_error(instruction, internal_error))

    # Reports

    def report(
        self, worker: int, report: Report, buffer: Buffer | None, progress: Sequence[int] = (0, 0)
    ) -> list[Outgoing]:
        """Handle a worker's report. `progress` is the op id and the site of its last op. A report that does not fit
        raises ProtocolError and changes nothing."""
        if self._outgoing.observer is not None:
            self._outgoing.observe("WORKER_RECV", f"worker {worker}", report)
        if isinstance(report, TimelineReport) and session_of(report.request) == ALL_SESSIONS:
            return self.captures.take_timeline(worker, report)
        if isinstance(report, Goodbye):
            return self.lose_worker(worker, f"left: {report.reason}", self.describe_op(*progress), progress[0])
        if isinstance(report, Leaving):
            return self._drain(worker, self.describe_op(*progress), progress[0])
        if isinstance(report, Synchronized | Failed) and session_of(report.request) == ALL_SESSIONS:
            self._drains.note_done(worker, report.request)
            return self._outgoing.take()
        if isinstance(report, Progress):
            self._fair_queue.finish(worker, report.mark, report.nanoseconds)
            return self._take_turns()
        capture = self.captures.current
        owner = self.state.sessions.get(owner_of(report)) if capture is not None else None
        self._reports.take(worker, report, buffer)
        sent = self._outgoing.take()
        if capture is not None:
            capture.note_report(owner, worker, report, sent)
        return sent

    def may_read_directly(self, ident: int) -> bool:
        """Whether a caller that shares the process with the only worker may read a tensor from it without a message: it
        has a value, and no observer waits for the message."""
        return self._outgoing.observer is None and ident in self.state.tensors

    def note_process_check(self) -> list[Outgoing]:
        """The processes of workers were checked once more."""
        self._reports.note_process_check()
        self._drains.note_process_check()
        return self._outgoing.take()

    # Captures

    def begin_capture(self, capture: MessageCapture) -> list[Outgoing]:
        """Note all messages from now on, and let the workers record their commands."""
        return self.captures.begin(capture, tuple(self.state.workers))

    def end_capture(self) -> list[Outgoing]:
        """Note no more messages, and ask the workers for the commands that they have recorded."""
        return self.captures.end(tuple(self.state.workers))

    # Descriptions for people

    def waits(self) -> dict[int, set[int]]:
        """The workers that each session waits for."""
        waits = self._requests.waits()
        for session, workers in self._fair_queue.waits().items():
            waits.setdefault(session, set()).update(workers)
        return waits

    def queued(self) -> dict[int, int]:
        """The number of instructions of each session that wait for their turn."""
        return self._fair_queue.queued()

    def describe_op(self, op_id: int, site_id: int) -> str:
        """A worker's last op and its site; empty if the worker has run none."""
        op, site = self.find_op(op_id, site_id)
        return shorten(f"{op} ({site})" if site else op)

    def describe_op_to(self, reader: int, op_id: int, site_id: int) -> str:
        """A worker's last op, as shown to a session: ops of programs of other keys are hidden."""
        session = self.state.sessions.get(session_of(op_id))
        if session is not None and session.key != self.state.sessions[reader].key:
            return OP_OF_ANOTHER
        return self.describe_op(op_id, site_id)

    def find_op(self, op_id: int, site_id: int) -> tuple[str, str]:
        """The names of a worker's last op and of its site; empty if there is none."""
        session = self.state.sessions.get(session_of(op_id))
        if not op_id:
            return "", ""
        if session is None:
            return "an op of a session that has ended", ""
        part = session.program_parts.get(op_id)
        if part is not None:  # a worker that replays a part shows the position in it
            op = part.program.ops[max(0, min(site_id, len(part.program.steps) - 1))]
            op_id, site_id = op.op_id, op.site
        site = session.site(site_id) if site_id in session.sites else ""  # a move may have no site
        return session.op_name(op_id) or "an op that was forgotten", site


def _request(mark: Mark) -> ToWorkers:
    return ToWorkers(tuple(mark.costs), WorkerReportProgress(mark.number))
