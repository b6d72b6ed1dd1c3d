"""The server: a thin loop around the dispatcher that polls, decodes, calls and sends, and notices dead peers."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from gt.core import worker_progress
from gt.core.errors import ProtocolError
from gt.core.ids import session_of
from gt.core.limits import Limits
from gt.core.message_events import Observer
from gt.core.message_fields import PAYLOAD_RECORDS
from gt.core.messages import (
    AckBytes,
    AckMessages,
    AckRead,
    Activity,
    ByteRange,
    CreateTensor,
    EndSession,
    Failed,
    FetchTensor,
    Goodbye,
    Hello,
    Instruction,
    OpFailed,
    ReadSessions,
    Refused,
    Rejected,
    Report,
    Resume,
    SessionEnded,
    SessionsRead,
    Uploaded,
    Waiting,
    Welcome,
    WorkerShutdown,
)
from gt.core.program_status import ProgramStatus
from gt.core.refusal_kinds import OP_NOT_ALLOWED, RefusalKind
from gt.dispatcher.backpressure import BatchSlice, QueuedInstruction
from gt.dispatcher.delivery import Deliver, Delivery
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.handshakes import Greeting, Handshakes, internal_errors_logged
from gt.dispatcher.message_queue import Outgoing, ToClient
from gt.dispatcher.ownership import require_ownership
from gt.dispatcher.peers import NO_PROGRESS, Peer, PeerTable
from gt.dispatcher.pending_connections import MAX_MALFORMED, PendingConnections
from gt.dispatcher.program_view import DispatcherView
from gt.dispatcher.session_administration import SessionAdministration
from gt.dispatcher.session_leases import SessionLeases
from gt.dispatcher.status import read_unlocked
from gt.version import __version__
from gt.wire import shared_memory
from gt.wire.addresses import is_own_address
from gt.wire.codec import MAX_HELLO, MAX_INSTRUCTIONS, Decoder, Frame, Payload
from gt.wire.connections import Router
from gt.wire.message_stream import MessageGap
from gt.wire.process_identity import host_name, is_running, is_stopped, start_mark, this_host
from gt.wire.refusals import shorten
from gt.wire.server_keys import ServerKeys

log = logging.getLogger("gt.dispatcher")

TICK_MS = 250
NOTICE_SECONDS = 3.0
POSTED_SECONDS = 10.0  # that another thread waits for its turn
TURN_SECONDS = 0.01  # in which instructions of a session are carried out before other peers are heard
DISMISSING_SECONDS = 1.0  # for workers to close their connections when they are told to end
MAX_DESCRIBED = 16  # workers that a client waits for, of which it is told what they do
BUSY_NANOSECONDS = 1_000_000_000  # with the same commands, after which a worker is listed as busy
DRAINING_SECONDS = 30.0  # for the answers that clients wait for when the server is told to end


class Server:
    """`descriptor` becomes readable when a message may have arrived, for a caller that does not block in `turn`. A peer
    that is silent for `silence` seconds is given up (0: never), and a client `lease` seconds later; `ended` are the
    processes of workers that were killed for that. With `keys` only peers that have them are let in. `copy_limit`,
    `limits`: see Dispatcher. `greeting`: what those who join are told. `turned_at` is the time of the last turn."""

    def __init__(
        self,
        endpoint: str,
        observer: Observer | None = None,
        *,
        silence: float = 0,
        lease: float = 0,
        keys: ServerKeys | None = None,
        copy_limit: int | None = None,
        greeting: Greeting | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._router = Router(endpoint, keys, TICK_MS, silence)
        self.refusals = self._router.refusals
        self._silence = silence
        self.is_draining = False
        self._drained_at = float("inf")  # the time at which the server ends, whoever waits for an answer
        self._buffers = shared_memory.AttachedBuffers()
        self._observer = observer
        self._stopping = False
        self._are_dismissed = self._is_closed = False
        self._next_check = self._next_notice = self.turned_at = time.monotonic()
        self.ended: set[int] = set()
        self.descriptor = self._router.descriptor
        self.dispatcher = Dispatcher(observer, copy_limit, limits)
        self.dispatcher.keeps_sites = True
        self.dispatcher.set_worker_description(self._describe_state)
        self.dispatcher.note_rejection = self._note_rejection
        self.view = DispatcherView(self.dispatcher, self._read_progress, self.refusals.read)
        self.peers = PeerTable()
        self.delivery = Delivery(self._router, self.peers)
        self._leases = SessionLeases(self.peers, lease)
        greeting = (greeting or Greeting())._replace(
            log_path="" if observer is None else observer.path, server=self._leases.server, lease=lease
        )
        self._handshakes = Handshakes(self.dispatcher, self.peers, self.delivery, greeting)
        self._pending_connections = PendingConnections()
        self._posted: deque[Callable[[], None]] = deque()  # by other threads
        self._held: dict[int, Peer] = {}  # clients with instructions that wait for their backpressure or their turn
        self._interrupted: dict[int, Peer] = {}  # those of them whose time was over: they go on at the next turn
        self._instructions: Decoder[Instruction | AckRead | AckBytes | AckMessages | ReadSessions | EndSession] = (
            Decoder(Instruction | AckRead | AckBytes | AckMessages | ReadSessions | EndSession, MAX_INSTRUCTIONS)
        )
        self._administration = SessionAdministration(self.dispatcher, self.peers)
        self._reports: Decoder[Report | Activity] = Decoder(Report | Activity)
        self._hellos: Decoder[Hello | Resume] = Decoder(Hello | Resume, MAX_HELLO)

    @property
    def endpoint(self) -> str:
        """The address at which the server listens, with the port that the system chose if 0 was asked for."""
        return self._router.endpoint

    def run(self) -> None:
        while not self._stopping and not self._is_drained():
            self.turn()
        self._dismiss_all()
        self._await_dismissed(time.monotonic() + DISMISSING_SECONDS)
        self.close()

    def _dismiss_all(self) -> None:
        """Tell all workers to end and all clients that the server does, once."""
        if self._are_dismissed:
            return
        self._are_dismissed = True
        for identity in self.peers.workers.values():
            with internal_errors_logged("the end of a worker"):
                self.delivery.send_to(identity, [WorkerShutdown()])
        for identity in self.peers.clients.values():
            with internal_errors_logged("a goodbye to a client"):
                self.delivery.send_last(identity, Goodbye("the server has ended"))

    def _await_dismissed(self, end: float) -> None:
        """Read until the workers have closed their connections. One that is closed here first, with a message that was
        not read, is reset, and the worker may lose the message that tells it to end."""
        waited_for = set(self.peers.workers.values())
        while waited_for and not self._stopping and time.monotonic() < end:
            self._router.receive()
            waited_for.difference_update(self._router.take_lost())

    def set_worker_command(self, command: str) -> None:
        """The command by which workers join, of which clients are told that wait for more of them."""
        self._handshakes.greeting = self._handshakes.greeting._replace(worker_command=command)

    def turn(self, *, waits: bool = True) -> bool:
        """Receive one message, waiting a tick for it if `waits`, and do the periodic checks that are due. Returns
        whether there was a message."""
        message = self._router.receive(waits=waits and not self._interrupted)
        if message is not None:
            self._receive(*message)
        interrupted, self._interrupted = self._interrupted, {}
        for client in interrupted.values():
            with internal_errors_logged(f"the instructions of client {client.ident}"):
                self._proceed(client)
        while self._posted:
            self._posted.popleft()()
        self.turned_at = now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + TICK_MS / 1000
            self._check_all(now)
        if now >= self._next_notice:
            self._next_notice = now + NOTICE_SECONDS
            with internal_errors_logged("telling clients for whom they wait"):
                self._explain_waits()
        return message is not None

    def has_message(self) -> bool:
        return self._router.has_message()

    def with_dispatcher(self, act: Callable[[Dispatcher], Sequence[Outgoing]]) -> None:
        """Let another thread use the dispatcher: `act` runs in the thread of `run`, at its next turn, and returns the
        messages to deliver. Raises what `act` raises."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                self.delivery.send(act(self.dispatcher))
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        self._posted.append(run)
        done.result(POSTED_SECONDS)

    def stop(self) -> None:
        """End the loop at its next turn; safe to call from a signal handler."""
        self._stopping = True

    def drain(self) -> None:
        """Let in nobody from now on, answer the requests of clients that have arrived, and end the loop then, or after
        DRAINING_SECONDS. Safe to call from a signal handler."""
        self._drained_at = time.monotonic() + DRAINING_SECONDS
        self.is_draining = self._handshakes.is_ending = True

    def _is_drained(self) -> bool:
        if not self.is_draining:
            return False
        is_waited_for = (
            self.dispatcher.state.pending
            or self._held
            or any(peer.stream.has_waiting for peer in self.peers.connected_clients())
            or self._router.has_message()
        )
        return not is_waited_for or time.monotonic() > self._drained_at

    def read_status(self) -> ProgramStatus:
        """The status of workers and sessions; any thread may ask."""
        return self.view.read_status()

    def _read_progress(self) -> dict[int, Sequence[int]]:
        peers = read_unlocked(lambda: list(self.peers.by_identity.values()))
        return {peer.ident: peer.progress for peer in peers if not peer.is_client and peer.progress is not NO_PROGRESS}

    def open_local_session(self, deliver: Deliver) -> Welcome:
        """Open a session for this process. Its answers are passed to `deliver`."""
        return self._handshakes.open_local_session(deliver)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._dismiss_all()
        self._router.close()
        if self._observer is not None:
            self._observer.close()

    # Messages of peers

    def _receive(self, identity: bytes, frames: Sequence[Frame]) -> None:
        if identity in self._pending_connections.leaving or identity in self.peers.replaced:
            return
        peer = self.peers.by_identity.get(identity)
        try:
            if peer is None:
                self._greet(identity, frames)
            elif peer.is_client:
                if peer.stream.accept(frames):
                    self._receive_instructions(peer, frames)
                self.delivery.proceed(identity, peer.stream)
            else:
                self._receive_reports(peer, frames)
        except MessageGap:
            self._router.drop(identity)  # the client connects again, and sends what is missing
        except ProtocolError as error:
            self._note_refusal(identity, error)
            with internal_errors_logged("a refusal"):
                self.delivery.send_to(identity, [Refused(f"{shorten(str(error))} (server: GT {__version__})")])
                self._count_malformed_message(identity, peer)
        except Exception:  # an internal error: the other peers are served
            log.exception("a message could not be dealt with")

    def _note_refusal(self, identity: bytes, error: ProtocolError) -> None:
        peer, address = self.peers.by_identity.get(identity), self._router.address_of(identity)
        sender = f"{peer.hello.role} {peer.ident}" if peer is not None else address or "a connection"
        self.refusals.note(error.kind, identity.hex(), f"a message of {sender}: {error}")

    def _note_rejection(self, session: int, kind: RefusalKind, reason: str) -> None:
        """An instruction of a client was refused."""
        self.refusals.note(kind, f"client {session}", f"an instruction of client {session}: {reason}")

    def _count_malformed_message(self, identity: bytes, peer: Peer | None) -> None:
        """Disconnect a peer after MAX_MALFORMED malformed messages."""
        if peer is None:
            self._pending_connections.note_malformed_message(identity, time.monotonic())
            if identity in self._pending_connections.leaving:
                self._handshakes.forget(identity)
            return
        peer.malformed_messages += 1
        if peer.malformed_messages < MAX_MALFORMED:
            return
        if peer.is_client:
            self._give_up_client(peer, f"was ended after {MAX_MALFORMED} messages that could not be read")
        else:
            self._dismiss(peer, f"was dismissed after {MAX_MALFORMED} messages that could not be read")

    def _greet(self, identity: bytes, frames: Sequence[Frame]) -> None:
        (hello, *_), _ = self._hellos.decode(frames)
        if self._handshakes.is_waiting(identity):
            raise ProtocolError(f"a client that waits for workers has sent another {type(hello).__name__}")
        if isinstance(hello, Resume):
            self._resume(identity, hello)
            return
        address = self._router.address_of(identity)
        if hello.host == this_host() and address and not is_own_address(address):
            raise ProtocolError(f"a {hello.role} at {address} says that it is a process of this machine", "foreign")
        if hello.role in ("client", "worker"):
            self._router.admit(identity)
        self._handshakes.greet(identity, hello, self._router.key_of(identity))

    def _resume(self, identity: bytes, resume: Resume) -> None:
        """A client goes on with its session, over a new connection."""
        peer = self._leases.find(resume, self._router.key_of(identity))
        if isinstance(peer, str):
            self.delivery.send_to(identity, [SessionEnded(peer)])
            self._pending_connections.close_soon(identity, time.monotonic())
            return
        peer.stream.restart(resume.received)
        self._router.admit(identity)
        self._router.drop(self.peers.clients[peer.ident])
        self.peers.move(peer, identity)
        self._leases.end(peer, time.monotonic())
        self.delivery.resume(identity, peer.stream)

    def _receive_instructions(self, peer: Peer, frames: Sequence[Frame]) -> None:
        batch, payloads = self._instructions.decode(frames)
        if self.is_draining:  # only what frees memory or ends a session: new work would never be done
            batch, payloads = [each for each in batch if isinstance(each, AckRead | AckBytes | Goodbye)], []
        instructions: list[QueuedInstruction] = []
        uploads = 0
        for instruction in batch:
            if isinstance(instruction, AckMessages):
                continue  # its header was read
            require_ownership(peer.ident, instruction)
            if isinstance(instruction, AckRead):
                peer.backpressure.acknowledge(instruction.request)
                continue
            if isinstance(instruction, AckBytes):
                peer.backpressure.note_taken(instruction.nbytes)
                continue
            if isinstance(instruction, CreateTensor):
                _require_own_buffer(peer, instruction.byte_range.name)
                instruction = self._passed_on(peer, instruction, uploads, payloads)
                uploads += 1
            elif isinstance(instruction, FetchTensor) and instruction.place is not None:
                _require_own_buffer(peer, instruction.place.name)
            instructions.append(instruction)
        if any(type(instruction) is Goodbye for instruction in instructions):
            self.instruct(peer.ident, [Goodbye()], (), self.dispatcher.submit)
            self._forget(peer)
            return
        try:
            peer.backpressure.queue(instructions, payloads)
        except ProtocolError as error:
            self._note_refusal(self.peers.clients[peer.ident], error)
            self._give_up_client(peer, f"was ended: {error}")
            return
        self._proceed(peer)

    def _administer(self, peer: Peer, request: ReadSessions | EndSession) -> None:
        """List the sessions, or end one."""
        sessions = self._administration.list_for(peer)
        answer: SessionsRead | Rejected = SessionsRead(request.request, sessions)
        if isinstance(request, EndSession):
            found = self._administration.find(peer, request.session)
            if isinstance(found, str):
                answer = Rejected(request.request, found)
            else:
                listed = tuple([each for each in sessions if each.session == request.session])
                answer = SessionsRead(request.request, listed)
                who = f"{peer.key or 'a client'} ({peer.process} on {peer.hello.hostname or host_name()})"
                why = f": {request.reason}" if request.reason else ""
                self._give_up_client(found, f"was ended by {who}{why}; its tensors are freed", SessionEnded)
        self.delivery.send_to(self.peers.clients[peer.ident], [answer])

    def _passed_on(
        self, peer: Peer, create: CreateTensor, number: int, payloads: MutableSequence[Payload]
    ) -> CreateTensor:
        """An upload in shared memory, if there are workers that do not share it: its bytes go with the messages, as the
        payload with a number."""
        byte_range = create.byte_range
        workers = self.dispatcher.state.workers.values()
        if not byte_range.name or all(worker.info.host == peer.hello.host for worker in workers):
            return create
        payloads[number] = [bytes(self._buffers.view(byte_range.name, byte_range.offset, byte_range.nbytes))]
        self.delivery.send_to(self.peers.clients[peer.ident], [Uploaded(create.id)])
        return msgspec.structs.replace(create, byte_range=ByteRange("", byte_range.nbytes))

    def _proceed(self, peer: Peer) -> None:
        """Carry out the instructions of a session as far as its backpressure allows, for TURN_SECONDS. The size of a
        read is known only after the instructions before it."""
        backpressure, state = peer.backpressure, self.dispatcher.state
        self._held[peer.ident] = peer
        end = time.monotonic() + TURN_SECONDS
        while peer.ident in state.sessions and not self.dispatcher.is_waiting(peer.ident):
            if backpressure.asked is not None and backpressure.asked.request in state.pending:
                reads = state.pending[backpressure.asked.request].reads
                backpressure.begin(backpressure.asked.request, sum(max(read.nbytes, 0) for read in reads))
            batch_slice = backpressure.next()
            backpressure.asked = batch_slice.read if batch_slice is not None else None
            if batch_slice is None:
                break
            self._carry_out(peer, batch_slice)
            if time.monotonic() >= end and not backpressure.is_empty:
                self._interrupted[peer.ident] = peer
                break
        if peer.ident not in state.sessions or backpressure.is_empty:
            self._held.pop(peer.ident, None)

    def _carry_out(self, peer: Peer, batch_slice: BatchSlice) -> None:
        request, batch = batch_slice.administration, batch_slice.instructions
        if request is not None:
            batch = batch[:-1]
        if batch:
            self.instruct(peer.ident, batch, batch_slice.payloads, self.dispatcher.submit)  # type: ignore[arg-type]
        if request is not None and peer.ident in self.dispatcher.state.sessions:
            self._administer(peer, request)

    def instruct(
        self,
        session: int,
        batch: Sequence[Instruction],
        payloads: Sequence[Payload],
        carry_out: Callable[[int, Any, Any], list[Outgoing]] | None = None,
    ) -> None:
        """`carry_out` is `Dispatcher.submit` for clients that share the workers; `Dispatcher.instruct` by default."""
        try:
            outgoing = (carry_out or self.dispatcher.instruct)(session, batch, payloads)  # type: ignore[arg-type]
        except Exception as error:  # an internal error: the other clients are served
            log.exception("an instruction of client %d failed", session)
            rejected = Rejected(0, f"a mistake of GT: {type(error).__name__}: {error}")
            outgoing = [*self.dispatcher.take(), ToClient(session, rejected)]
        self.delivery.send(outgoing)

    def _receive_reports(self, peer: Peer, frames: Sequence[Frame]) -> None:
        reports, payloads = self._reports.decode(frames)
        remaining = iter(payloads)
        for report in reports:
            payload = next(remaining) if type(report) in PAYLOAD_RECORDS else None
            if isinstance(report, Activity):
                self._note_activity(peer, report)
            elif not self._use_report(peer, report, payload):
                break
            if isinstance(report, Goodbye):
                self._forget(peer)
                break  # nothing that a worker says after it is used
        for client in list(self._held.values()):  # a progress report may let queued instructions proceed
            if client.ident not in self._interrupted:
                self._proceed(client)
        self._handshakes.welcome_waiting()

    def _use_report(self, peer: Peer, report: Report, payload: Payload | None) -> bool:
        """Pass a report on to the dispatcher, and dismiss its worker if it does not fit the state: a client may wait
        for it. Returns whether the report was used."""
        try:
            outgoing = self.dispatcher.report(peer.ident, report, payload, peer.progress[:2])  # type: ignore[arg-type]
            if isinstance(report, OpFailed | Failed) and report.failure.kind == OP_NOT_ALLOWED:
                session = session_of(report.failure.origin)
                self._note_rejection(session, "op", report.failure.message)
            self.delivery.send(outgoing)
        except Exception as error:
            kind = type(report).__name__
            if isinstance(error, ProtocolError):
                self.refusals.note("report", f"worker {peer.ident}", f"{kind} of worker {peer.ident}: {error}")
            else:
                log.exception("%s of worker %d cannot be used", kind, peer.ident)
            self._dismiss(peer, f"was dismissed: its {kind} cannot be used ({type(error).__name__}: {error})")
            return False
        return True

    def _note_activity(self, peer: Peer, activity: Activity) -> None:
        """A worker of another machine says what it does. Those of this machine show it in shared memory."""
        if len(activity.words) != worker_progress.LENGTH:
            raise ProtocolError(f"{len(activity.words)} words do not say what a worker does")
        if not peer.is_of_this_machine:
            words = list(activity.words)
            words[worker_progress.SINCE] = time.monotonic_ns() - words[worker_progress.SINCE]
            peer.progress = tuple(words)

    def _explain_waits(self) -> None:
        """Tell waiting clients which workers they wait for, and the current op of each."""
        for session, workers in self.dispatcher.waits().items():
            peer = self.peers.client(session)
            if peer is not None and peer.lost:
                continue
            with internal_errors_logged(f"telling client {session} for whom it waits"):
                present = [worker for worker in sorted(workers) if worker in self.peers.workers]
                described = [self._describe(worker, session) for worker in present[:MAX_DESCRIBED]]
                if len(present) > MAX_DESCRIBED:
                    described.append(f"and {len(present) - MAX_DESCRIBED} more")
                self.delivery.send([ToClient(session, Waiting(f"for {', '.join(described)}"))])

    def _describe(self, worker: int, session: int) -> str:
        """What a worker does, for a session that waits for it."""
        peer = self.peers.by_identity[self.peers.workers[worker]]
        described = self.dispatcher.describe_op_to(session, *peer.progress[:2])
        is_at = "was stopped at" if peer.is_of_this_machine and is_stopped(peer.hello.pid) else "is at"
        where = "" if peer.is_of_this_machine else f" on {peer.hello.hostname or 'another machine'}"
        return f"worker {worker}{where}, which {is_at} {described or 'its start'}"

    def _describe_state(self, worker: int) -> str:
        """The state of a worker that is ready, for `gt.workers()`."""
        identity = self.peers.workers.get(worker)
        if identity is None:
            return "ready"
        peer = self.peers.by_identity[identity]
        self._note_silence(peer)
        if self._is_long(peer.silence):
            return f"silent for {peer.silence:.0f} s"
        if peer.is_of_this_machine and is_stopped(peer.hello.pid):
            return "stopped"
        lasts = time.monotonic_ns() - peer.progress[worker_progress.SINCE]
        is_busy = peer.progress[worker_progress.STATE] != worker_progress.IDLE and lasts > BUSY_NANOSECONDS
        return "busy" if is_busy else "ready"

    def _is_long(self, silence: float) -> bool:
        """Whether heartbeats were not answered. They are sent four times within the limit."""
        return 0 < self._silence / 2 < silence

    # Peers that leave

    def _check_all(self, now: float) -> None:
        """Check the processes and connections of all peers."""
        for peer in list(self.peers.by_identity.values()):
            with internal_errors_logged(f"the check of {peer.hello.role} {peer.ident}"):
                self._check(peer)
        for identity in self._pending_connections.take_due(now):
            self._router.drop(identity)
        for identity in self._router.take_lost():
            self._note_connection_end(identity)
        with internal_errors_logged("failures that were deferred until this check"):
            self.delivery.send(self.dispatcher.note_process_check())

    def _note_connection_end(self, identity: bytes) -> None:
        """A worker is given up at the next check, after its earlier messages were read; a client after its lease."""
        self._handshakes.forget(identity)
        self._pending_connections.forget(identity)
        peer = self.peers.by_identity.get(identity)
        if peer is None or peer.lost:
            return
        peer.lost = True
        if peer.is_client:
            cause = f"its connection was closed, or silent for {self._silence:g} s (GT_HEARTBEAT_TIMEOUT)"
            self._leases.begin(peer, time.monotonic(), cause)

    def _check(self, peer: Peer) -> None:
        """Give up a peer that has gone without a Goodbye."""
        if peer.is_of_this_machine and not is_running(peer.hello.pid, peer.start_time):
            self._reap(peer)
        elif peer.is_client and time.monotonic() >= peer.kept_until:
            self._give_up_client(peer, self._leases.describe_end(peer, self.dispatcher.state))
        elif peer.is_client:
            self._check_backpressure(peer)
        elif peer.lost:
            self._give_up_worker(peer)
        elif not peer.is_of_this_machine:
            self._note_silence(peer)

    def _note_silence(self, peer: Peer) -> None:
        silence = None if peer.is_of_this_machine else self._router.silence_of(self.peers.workers[peer.ident])
        if silence is not None:
            peer.silence = silence

    def _check_backpressure(self, peer: Peer) -> None:
        try:
            peer.backpressure.require_taken()
            peer.stream.require_acknowledged()
        except ProtocolError as error:
            self._note_refusal(self.peers.clients[peer.ident], error)
            self._give_up_client(peer, f"was ended: {error}")
            return
        self._proceed(peer)

    def _reap(self, peer: Peer) -> None:
        """The process of a peer has ended."""
        self._forget(peer)
        with internal_errors_logged("the removal of shared memory"):
            if not start_mark(peer.hello.pid):  # no new process has its pid
                shared_memory.sweep(peer.hello.pid)
        if peer.is_client:
            self._end_session(peer)
        else:
            self._lose_worker(peer, "has ended without a goodbye (killed, or crashed)")

    def _give_up_worker(self, peer: Peer) -> None:
        """A stopped worker is killed, because others may be in the middle of an exchange with it. Any other worker
        notices that its connection has ended and joins again."""
        reason = f"is gone: its connection was closed, or silent for {self._silence:g} s (GT_HEARTBEAT_TIMEOUT)"
        if peer.is_of_this_machine and is_stopped(peer.hello.pid):
            reason = f"was stopped for {self._silence:g} s (GT_HEARTBEAT_TIMEOUT), and ended for that"
            self.ended.add(peer.hello.pid)
            with internal_errors_logged(f"the end of worker {peer.ident}"):
                os.kill(peer.hello.pid, signal.SIGKILL)
        elif not peer.is_of_this_machine:
            reason = "is gone: its connection was closed (it was killed, or has crashed)"
            if self._is_long(peer.silence):
                reason = (
                    f"was silent for {self._silence:g} s (GT_HEARTBEAT_TIMEOUT): its machine or network is down, or it "
                    f"was stopped"
                )
        self._forget(peer)
        self._lose_worker(peer, reason)

    def _give_up_client(self, peer: Peer, reason: str, kind: type[Refused] | type[SessionEnded] = Refused) -> None:
        log.warning("client %d (%s) %s", peer.ident, peer.process, reason)
        identity = self.peers.clients[peer.ident]
        with internal_errors_logged("a refusal"):
            self.delivery.send_last(identity, kind(f"the session {reason} (server: GT {__version__})"))
        self._leases.note_ended(peer, reason)
        self._forget(peer)
        if not peer.lost:
            self._pending_connections.close_soon(identity, time.monotonic())
        self._end_session(peer)

    def _dismiss(self, peer: Peer, reason: str) -> None:
        """Ask an unreliable worker to end, and treat it as lost."""
        identity = self.peers.workers[peer.ident]
        self.delivery.send_to(identity, [WorkerShutdown()])
        self._forget(peer)
        self._pending_connections.close_soon(identity, time.monotonic())
        self._lose_worker(peer, reason)

    def _forget(self, peer: Peer) -> None:
        self.peers.remove(peer)
        if peer.is_client:
            self._held.pop(peer.ident, None)
        log.info("%s %d has left", peer.hello.role, peer.ident)

    def _end_session(self, peer: Peer) -> None:
        with internal_errors_logged(f"the end of client {peer.ident}"):
            self.delivery.send(self.dispatcher.end_session(peer.ident))

    def _lose_worker(self, peer: Peer, reason: str) -> None:
        if not peer.is_of_this_machine:
            reason = f"on {peer.hello.hostname or 'another machine'} {reason}"
        try:
            last = self.dispatcher.describe_op(*peer.progress[:2])
            log.warning("worker %d (pid %d) %s; its last op was %s", peer.ident, peer.hello.pid, reason, last or "none")
            self.delivery.send(self.dispatcher.lose_worker(peer.ident, reason, last, peer.progress[0]))
        except Exception:  # an internal error: the other peers are served
            log.exception("the loss of worker %d could not be dealt with", peer.ident)
            with internal_errors_logged("the messages about a lost worker"):
                self.delivery.send(self.dispatcher.take())


def _require_own_buffer(peer: Peer, name: str) -> None:
    if name:
        shared_memory.require_name(name)
    if name and not shared_memory.is_made_with(name, peer.session_secret):
        raise ProtocolError(f"shared buffer {name} is not one of session {peer.ident}", "foreign")
