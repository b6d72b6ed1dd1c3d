"""The server: a thin loop around the dispatcher that polls, decodes, calls and sends, and notices dead peers."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from gt.core.errors import OP_NOT_ALLOWED, ProtocolError, RefusalKind
from gt.core.ids import session_of
from gt.core.message_events import Observer
from gt.core.message_fields import PAYLOAD_RECORDS
from gt.core.messages import (
    Activity,
    Failed,
    Goodbye,
    Hello,
    OpFailed,
    Refused,
    Report,
    Resume,
    SessionEnded,
    TakeFrames,
    Welcome,
    WorkerShutdown,
)
from gt.core.program_view import ProgramStatus
from gt.core.settings import Limits
from gt.dispatcher.client_messages import ClientMessages
from gt.dispatcher.delivery import Deliver, Delivery
from gt.dispatcher.departures import MAX_MALFORMED, Departures, PendingConnections
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.handshakes import Greeting, Handshakes, internal_errors_logged
from gt.dispatcher.message_queue import Outgoing
from gt.dispatcher.peers import Peer, PeerTable
from gt.dispatcher.session_leases import SessionLeases
from gt.dispatcher.status import DispatcherView
from gt.dispatcher.worker_activity import WorkerActivity
from gt.version import __version__
from gt.wire.addresses import is_own_address
from gt.wire.codec import MAX_HELLO, Decoder, Frame, Payload
from gt.wire.connections import Router
from gt.wire.message_stream import MessageGap
from gt.wire.process_identity import is_running, this_host
from gt.wire.refusals import shorten
from gt.wire.server_keys import ServerKeys

log = logging.getLogger("gt.dispatcher")

TICK_MS = 250
READING_SECONDS = 0.02  # messages are read this long before any is carried out: those of all keys come in one queue
NOTICE_SECONDS = 3.0
POSTED_SECONDS = 10.0  # another thread waits at most this long for its turn
DISMISSING_SECONDS = 1.0  # time for workers to close their connections when they are shut down
DRAINING_SECONDS = 30.0  # time for the answers that clients wait for when the server is asked to end


class Server:
    """Polls connections, calls the dispatcher and sends its messages. `descriptor` becomes readable when a message may
    have arrived, for a caller that does not block in `turn`. A worker that is silent for `silence` seconds is dropped
    (0: never), a client `lease` seconds later. With `keys` only peers that have them are admitted. `copy_limit`,
    `limits`: see Dispatcher. `greeting`: what new peers are sent. `turned_at` is the time of the last turn."""

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
        self._drained_at = float("inf")  # the time at which the server ends, even if clients wait for answers
        self._observer = observer
        self._stopping = False
        self._are_dismissed = self._is_closed = False
        self._reading_until = self._next_check = self._next_notice = self.turned_at = time.monotonic()
        self.descriptor = self._router.descriptor
        self.dispatcher = Dispatcher(observer, copy_limit, limits)
        self.dispatcher.keeps_sites = True
        self.dispatcher.note_rejection = self._note_rejection
        self.peers = PeerTable()
        self.delivery = Delivery(self._router, self.peers)
        self.activity = WorkerActivity(self.dispatcher, self.peers, self.delivery, self._router, silence)
        self.dispatcher.set_worker_description(self.activity.describe_state)
        self.view = DispatcherView(self.dispatcher, self.activity.read_progress, self.refusals.read)
        self._leases = SessionLeases(self.peers, lease)
        greeting = (greeting or Greeting())._replace(
            log_path="" if observer is None else observer.path, server=self._leases.server, lease=lease
        )
        self._handshakes = Handshakes(self.dispatcher, self.peers, self.delivery, greeting)
        self._pending_connections = PendingConnections()
        self._posted: deque[Callable[[], None]] = deque()  # calls posted by other threads
        self.departures = Departures(
            self.dispatcher,
            self.peers,
            self.delivery,
            self._leases,
            self._pending_connections,
            self.activity,
            self.refusals,
            silence,
        )
        self.client_messages = ClientMessages(self.dispatcher, self.peers, self.delivery, self.departures)
        self._reports: Decoder[Report | Activity | TakeFrames] = Decoder(Report | Activity | TakeFrames)
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
        """Set the command by which workers join; clients that wait for more workers are shown it."""
        self._handshakes.greeting = self._handshakes.greeting._replace(worker_command=command)

    def turn(self, *, waits: bool = True) -> bool:
        """Receive one message, waiting a tick for it if `waits`, and do the periodic checks that are due. Returns
        whether there was a message."""
        message = self._router.receive(waits=waits and not self.client_messages.runnable)
        if message is not None:
            self._receive(*message)
        if time.monotonic() > self._reading_until or not self._router.has_message():
            self.client_messages.proceed()
            self._reading_until = time.monotonic() + READING_SECONDS
        while self._posted:
            self._posted.popleft()()
        self.turned_at = now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + TICK_MS / 1000
            self._check_all(now)
        if now >= self._next_notice:
            self._next_notice = now + NOTICE_SECONDS
            with internal_errors_logged("telling clients for whom they wait"):
                self.activity.explain_waits()
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
        self.is_draining = self._handshakes.is_ending = self.client_messages.is_draining = True

    def _is_drained(self) -> bool:
        if not self.is_draining:
            return False
        is_waited_for = (
            self.dispatcher.state.pending
            or self.peers.held
            or any(peer.stream.has_waiting for peer in self.peers.connected_clients())
            or self._router.has_message()
        )
        return not is_waited_for or time.monotonic() > self._drained_at

    def read_status(self) -> ProgramStatus:
        """The status of workers and sessions; any thread may ask."""
        return self.view.read_status()

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
                    self.client_messages.receive(peer, frames)
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
            self.departures.give_up_client(peer, f"was ended after {MAX_MALFORMED} messages that could not be read")
        else:
            self.departures.dismiss(peer, f"was dismissed after {MAX_MALFORMED} messages that could not be read")

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
        try:
            self._handshakes.greet(identity, hello, self._router.key_of(identity), self._router.process_of(identity))
        except ProtocolError:
            self._pending_connections.close_soon(identity, time.monotonic())
            raise
        self._router.admit(identity)

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

    def _receive_reports(self, peer: Peer, frames: Sequence[Frame]) -> None:
        reports, payloads = self._reports.decode(frames)
        remaining = iter(payloads)
        for report in reports:
            payload = next(remaining) if type(report) in PAYLOAD_RECORDS else None
            if isinstance(report, Activity):
                self.activity.note(peer, report)
            elif isinstance(report, TakeFrames):
                self._router.send_held(self.peers.workers[peer.ident], report.start, report.stop)
            elif not self._use_report(peer, report, payload):
                break
            if isinstance(report, Goodbye):
                self.departures.forget(peer)
                break  # nothing that a worker says after it is used
        self.client_messages.proceed_all()
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
            self.departures.dismiss(peer, f"was dismissed: its {kind} cannot be used ({type(error).__name__}: {error})")
            return False
        return True

    # Checks

    def _check_all(self, now: float) -> None:
        """Check the processes and connections of all peers."""
        for peer in list(self.peers.by_identity.values()):
            with internal_errors_logged(f"the check of {peer.hello.role} {peer.ident}"):
                self._check(peer)
        for identity in self._pending_connections.take_due(now):
            self._router.drop(identity)
        for identity in self._router.take_lost():
            self._handshakes.forget(identity)
            self.departures.note_connection_end(identity)
        with internal_errors_logged("failures that were deferred until this check"):
            self.delivery.send(self.dispatcher.note_process_check())

    def _check(self, peer: Peer) -> None:
        """Give up a peer that has gone without a Goodbye."""
        if peer.is_of_this_machine and not is_running(peer.hello.pid, peer.start_time):
            self.departures.reap(peer)
        elif peer.is_client and time.monotonic() >= peer.kept_until:
            self.departures.give_up_lease(peer)
        elif peer.is_client:
            self.client_messages.check_backpressure(peer)
        elif peer.lost:
            self.departures.give_up_worker(peer)
        elif not peer.is_of_this_machine:
            self.activity.note_silence(peer)
