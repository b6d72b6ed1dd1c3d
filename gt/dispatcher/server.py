"""The thin loop around the office: poll, decode, call, send."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gt.core.errors import ProtocolError
from gt.core.events import Observer
from gt.core.messages import (
    MAX_BATCH,
    Answer,
    CreateTensor,
    Failed,
    Fetched,
    Goodbye,
    Hello,
    Instruction,
    Lost,
    Received,
    Refused,
    Rejected,
    Report,
    Taken,
    Waiting,
    Welcome,
    WorkerInfo,
    WorkerShutdown,
)
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.outgoing import Outgoing, ToClient, ToWorkers
from gt.dispatcher.ownership import require_ownership
from gt.dispatcher.read_limits import ReadLimits
from gt.dispatcher.unknown_peers import MISTAKES, Strangers
from gt.version import __version__
from gt.wire import shared_memory
from gt.wire.codec import (
    MAX_HELLO,
    MAX_INSTRUCTIONS,
    Decoder,
    Frame,
    Payload,
    encode_batches,
    encode_once,
    uncounted_bytes,
)
from gt.wire.keys import ServerKeys
from gt.wire.links import Router
from gt.wire.liveness import is_running, is_stopped, start_mark, this_host

log = logging.getLogger("gt.dispatcher")

TICK_MS = 250
NOTICE_SECONDS = 3.0
Deliver: TypeAlias = Callable[[Answer, Payload | None], None]


@dataclass
class Peer:
    """A client or worker that has said hello. `ident` is a session or a worker's id; `progress` shows what a worker is
    at; `token` is the secret of a session. The connection of one that is `lost` has ended."""

    hello: Hello
    ident: int
    mark: str
    mistakes: int = 0
    progress: Sequence[int] = (0, 0)
    token: str = ""
    reading: ReadLimits = field(default_factory=ReadLimits)
    lost: bool = False

    @property
    def is_of_this_machine(self) -> bool:
        return self.hello.host == this_host()


@dataclass
class Waiter:
    """A client that was not welcomed yet, because too few workers are there."""

    hello: Hello
    told: str = ""


@dataclass
class Mail:
    """Messages for one peer, to be sent as one."""

    messages: list[Any] = field(default_factory=list)
    payloads: list[Payload] = field(default_factory=list)


@contextmanager
def _surviving(what: str) -> Generator[None]:
    """Around everything that is done for one peer: a mistake of ours there must not end what is done for others."""
    try:
        yield
    except Exception:
        log.exception("%s could not be dealt with", what)


class Server:
    """`descriptor` shows that a message may have arrived, to who does not wait in a turn. A peer that is silent for
    `silence` seconds is given up (0: never); `ended` are the processes of workers that were ended for that. With `keys`
    only those are let in that have them."""

    def __init__(
        self, endpoint: str, observer: Observer | None = None, *, silence: float = 0, keys: ServerKeys | None = None
    ) -> None:
        self._router = Router(endpoint, keys, TICK_MS, silence)
        self._silence = silence
        self.ended: set[int] = set()
        self.office = Dispatcher(observer)
        self._observer = observer
        self._stopping = False
        self._next_check = self._next_notice = time.monotonic()
        self.descriptor = self._router.descriptor
        self._peers: dict[bytes, Peer] = {}
        self._waiting: dict[bytes, Waiter] = {}
        self._strangers = Strangers()
        self._clients: dict[int, bytes] = {}
        self._workers: dict[int, bytes] = {}
        self._local_sessions: dict[int, Deliver] = {}
        self._instructions: Decoder[Instruction | Received | Taken] = Decoder(
            Instruction | Received | Taken, MAX_INSTRUCTIONS
        )
        self._reports: Decoder[Report] = Decoder(Report)
        self._hellos: Decoder[Hello] = Decoder(Hello, MAX_HELLO)

    @property
    def endpoint(self) -> str:
        """The address at which the server listens, with the port that the system chose where 0 was asked for."""
        return self._router.endpoint

    def run(self) -> None:
        while not self._stopping:
            self.turn()
        self.close()

    def turn(self, *, waits: bool = True) -> bool:
        """Deal with a message, if there is one or it comes in time, and with what is due. Gives whether there was."""
        message = self._router.receive(waits=waits)
        if message is not None:
            self._receive(*message)
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + TICK_MS / 1000
            for peer in list(self._peers.values()):
                with _surviving(f"the check of {peer.hello.role} {peer.ident}"):
                    self._check(peer)
            for identity in self._strangers.take_due(now):
                self._router.drop(identity)
            for identity in self._router.take_lost():
                self._note_loss(identity)
            with _surviving("what was kept back until this check"):
                self._send(self.office.note_checks())
        if now >= self._next_notice:
            self._next_notice = now + NOTICE_SECONDS
            with _surviving("telling clients for whom they wait"):
                self._explain_waits()
        return message is not None

    def stop(self) -> None:
        """End the loop at its next turn; safe to call from a signal handler."""
        self._stopping = True

    def _receive(self, identity: bytes, frames: Sequence[Frame]) -> None:
        if identity in self._strangers.leaving:
            return
        peer = self._peers.get(identity)
        try:
            if peer is None:
                self._greet(identity, frames)
            elif peer.hello.role == "client":
                self._instruct(peer, frames)
            else:
                self._report(peer, frames)
        except ProtocolError as error:
            log.warning("refused a message: %s", error)
            with _surviving("a refusal"):
                self._post(identity, [Refused(f"{error} (server: GT {__version__})")])
                self._count_mistake(identity, peer)
        except Exception:  # a mistake of ours: the other peers are served all the same
            log.exception("a message could not be dealt with")

    def _count_mistake(self, identity: bytes, peer: Peer | None) -> None:
        """A peer that makes too many is not listened to any more, and its connection is closed."""
        if peer is None:
            self._strangers.note_mistake(identity, time.monotonic())
            return
        peer.mistakes += 1
        if peer.mistakes >= MISTAKES and peer.hello.role == "worker":
            self._dismiss(peer, f"was dismissed after {MISTAKES} messages that could not be read")
        elif peer.mistakes >= MISTAKES:
            self._give_up_client(peer, f"was ended after {MISTAKES} messages that could not be read")

    def _instruct(self, peer: Peer, frames: Sequence[Frame]) -> None:
        batch, payloads = self._instructions.decode(frames)
        instructions: list[Instruction] = []
        for instruction in batch:
            require_ownership(peer.ident, instruction)
            if isinstance(instruction, Received):
                peer.reading.end(instruction.request)
                continue
            if isinstance(instruction, Taken):
                peer.reading.note_taken(instruction.nbytes)
                continue
            if isinstance(instruction, CreateTensor) and instruction.segment.name:
                _require_own_segment(peer, instruction.segment.name)
            instructions.append(instruction)
        if any(type(instruction) is Goodbye for instruction in instructions):
            self.instruct(peer.ident, [Goodbye()], (), self.office.submit)
            self._forget(peer)
            return
        try:
            peer.reading.hold(instructions, payloads)
        except ProtocolError as error:
            self._give_up_client(peer, f"was ended: {error}")
            return
        self._proceed(peer)

    def _proceed(self, peer: Peer) -> None:
        """Do what a session has asked for, as far as it may read. How much a read brings is known when its turn has
        come."""
        reading = peer.reading
        while peer.ident in self.office.state.sessions and not self.office.is_waiting(peer.ident):
            if reading.asked is not None and reading.asked.id in self.office.state.tensors:
                reading.begin(reading.asked.request, self.office.state.tensors[reading.asked.id].meta.nbytes)
            part = reading.next()
            reading.asked = part.read if part is not None else None
            if part is None:
                return
            self.instruct(peer.ident, part.instructions, part.payloads, self.office.submit)

    def instruct(
        self,
        session: int,
        batch: Sequence[Instruction],
        payloads: Sequence[Payload],
        carry_out: Callable[[int, Any, Any], list[Outgoing]] | None = None,
    ) -> None:
        """`carry_out`: how clients that share the workers take turns; at once, if it is not given."""
        try:
            outgoing = (carry_out or self.office.instruct)(session, batch, payloads)  # type: ignore[arg-type]
        except Exception as error:  # a mistake of ours: the other clients are served all the same
            log.exception("an instruction of client %d failed", session)
            rejected = Rejected(0, f"a mistake of GT: {type(error).__name__}: {error}")
            outgoing = [*self.office.take(), ToClient(session, rejected)]
        self._send(outgoing)

    def _report(self, peer: Peer, frames: Sequence[Frame]) -> None:
        reports, payloads = self._reports.decode(frames)
        remaining = iter(payloads)
        for report in reports:
            payload = next(remaining) if isinstance(report, Fetched) else None
            if not self._use(peer, report, payload):
                break
            if isinstance(report, Goodbye):
                self._forget(peer)
        self._proceed_all()
        if self._waiting:
            self._welcome_waiting()

    def _proceed_all(self) -> None:
        """Sessions whose turn may have come."""
        for identity in list(self._clients.values()):
            if identity in self._peers:
                self._proceed(self._peers[identity])

    def _use(self, peer: Peer, report: Report, payload: Payload | None) -> bool:
        """A report that does not fit what the office knows may be what somebody waits for, so its worker is lost."""
        try:
            self._send(self.office.report(peer.ident, report, payload, peer.progress))  # type: ignore[arg-type]
        except Exception as error:
            kind = type(report).__name__
            log.exception("%s of worker %d cannot be used", kind, peer.ident)
            self._dismiss(peer, f"was dismissed: its {kind} cannot be used ({type(error).__name__}: {error})")
            return False
        return True

    def _forget(self, peer: Peer) -> None:
        identities = self._clients if peer.hello.role == "client" else self._workers
        identity = identities.pop(peer.ident, None)
        if identity is not None:
            del self._peers[identity]
        log.info("%s %d has left", peer.hello.role, peer.ident)

    # Handshake

    def _greet(self, identity: bytes, frames: Sequence[Frame]) -> None:
        (hello, *_), _ = self._hellos.decode(frames)
        if hello.role in ("client", "worker"):
            self._router.admit(identity)
        if hello.role == "worker":
            self._welcome_worker(identity, hello)
        elif hello.role == "client":
            self._waiting[identity] = Waiter(hello)
        else:
            raise ProtocolError(f"{hello.role!r} is not a role; clients and workers connect here")
        self._welcome_waiting()

    def _welcome_worker(self, identity: bytes, hello: Hello) -> None:
        shares = hello.progress and hello.host == this_host()
        if shares and not hello.progress.startswith(f"gt-{hello.pid}-"):
            raise ProtocolError(f"segment {hello.progress} is not one of process {hello.pid}")
        progress: Sequence[int] = shared_memory.take(hello.progress, 16).cast("q") if shares else (0, 0)
        mark = start_mark(hello.pid)  # before anything is noted of it: this fails where too many files are open
        ident, outgoing = self.office.join_worker(hello.device, hello.host, hello.pid)
        peer = Peer(hello, ident, mark, progress=progress)
        self._peers[identity] = peer
        self._workers[ident] = identity
        self._post(identity, [Welcome(__version__, ident, os.getpid(), this_host())])
        log.info("worker %d joined (%s, pid %d)", ident, hello.device, hello.pid)
        self._send(outgoing)

    def host(self, deliver: Deliver) -> Welcome:
        """Open a session for this process; its answers are handed over."""
        ident = self.office.open_session(this_host(), os.getpid())
        self._local_sessions[ident] = deliver
        return Welcome(__version__, ident, os.getpid(), this_host(), self.office.ready_workers())

    def _welcome_waiting(self) -> None:
        ready = self.office.ready_workers()
        for identity, waiter in list(self._waiting.items()):
            with _surviving("the welcome of a client"):
                if len(ready) >= max(1, waiter.hello.wants_workers):
                    del self._waiting[identity]
                    self._welcome_client(identity, waiter.hello, ready)
                else:
                    self._explain_waiting(identity, waiter, len(ready))

    def _welcome_client(self, identity: bytes, hello: Hello, ready: tuple[WorkerInfo, ...]) -> None:
        mark = start_mark(hello.pid)
        ident = self.office.open_session(hello.host, hello.pid)
        peer = self._peers[identity] = Peer(hello, ident, mark, token=secrets.token_hex(16))
        self._clients[ident] = identity
        log_path = "" if self._observer is None else self._observer.path
        self._post(identity, [Welcome(__version__, ident, os.getpid(), this_host(), ready, peer.token, log_path)])
        log.info("client %d joined (pid %d)", ident, hello.pid)

    def _explain_waiting(self, identity: bytes, waiter: Waiter, ready: int) -> None:
        reason = (
            f"{ready} of {waiter.hello.wants_workers} workers have joined the server; "
            f"start more with: python -m gt.worker --host localhost -p PORT"
        )
        if reason != waiter.told:
            waiter.told = reason
            self._post(identity, [Waiting(reason)])

    def _explain_waits(self) -> None:
        """Tell clients that wait for an answer whom they wait for, and what that worker is at."""
        for session, workers in self.office.waits().items():
            with _surviving(f"telling client {session} for whom it waits"):
                at = [self._at(worker) for worker in sorted(workers) if worker in self._workers]
                self._send([ToClient(session, Waiting(f"for {', '.join(at)}"))])

    def _at(self, worker: int) -> str:
        code, site = self._peers[self._workers[worker]].progress
        return f"worker {worker}, which is at {self.office.describe_op(code, site) or 'its start'}"

    # Ends

    def _note_loss(self, identity: bytes) -> None:
        """A connection has ended. Its peer is given up at the next check: what it has sent before is read first."""
        self._waiting.pop(identity, None)
        self._strangers.forget(identity)
        peer = self._peers.get(identity)
        if peer is not None:
            peer.lost = True

    def _check(self, peer: Peer) -> None:
        """A peer may be gone without a goodbye."""
        if peer.is_of_this_machine and not is_running(peer.hello.pid, peer.mark):
            self._reap(peer)
        elif peer.lost and peer.hello.role == "worker":
            self._give_up_worker(peer)
        elif peer.lost:
            self._give_up_client(peer, f"is gone: its connection was closed, or silent for {self._silence:g} s")
        elif peer.hello.role == "client":
            self._check_reading(peer)

    def _check_reading(self, peer: Peer) -> None:
        try:
            peer.reading.require_taken()
        except ProtocolError as error:
            self._give_up_client(peer, f"was ended: {error}")
            return
        self._proceed(peer)

    def _reap(self, peer: Peer) -> None:
        """The process of a peer is gone."""
        self._forget(peer)
        with _surviving("the removal of shared memory"):
            if not start_mark(peer.hello.pid):  # unless another process has its number by now
                shared_memory.sweep(peer.hello.pid)
        if peer.hello.role == "worker":
            self._lose(peer, "has ended without a goodbye (killed, or crashed)")
            return
        with _surviving(f"the end of client {peer.ident}"):
            self._send(self.office.end_session(peer.ident))

    def _give_up_worker(self, peer: Peer) -> None:
        """Others may be in the middle of an exchange with a worker that is stopped, so its process is ended. One that
        is not finds out by itself and joins again."""
        reason = f"is gone: its connection was closed, or silent for {self._silence:g} s (GT_HEARTBEAT_TIMEOUT)"
        if peer.is_of_this_machine and is_stopped(peer.hello.pid):
            reason = f"was stopped for {self._silence:g} s (GT_HEARTBEAT_TIMEOUT), and ended for that"
            self.ended.add(peer.hello.pid)
            with _surviving(f"the end of worker {peer.ident}"):
                os.kill(peer.hello.pid, signal.SIGKILL)
        self._forget(peer)
        self._lose(peer, reason)

    def _give_up_client(self, peer: Peer, reason: str) -> None:
        log.warning("client %d (pid %d) %s", peer.ident, peer.hello.pid, reason)
        identity = self._clients[peer.ident]
        with _surviving("a refusal"):
            self._post(identity, [Refused(f"the session {reason} (server: GT {__version__})")])
        self._forget(peer)
        if not peer.lost:
            self._strangers.part(identity, time.monotonic())
        with _surviving(f"the end of client {peer.ident}"):
            self._send(self.office.end_session(peer.ident))

    def _dismiss(self, peer: Peer, reason: str) -> None:
        """A worker that cannot be relied on is asked to end, and nobody waits for it any more."""
        identity = self._workers[peer.ident]
        self._post(identity, [WorkerShutdown()])
        self._forget(peer)
        self._strangers.part(identity, time.monotonic())
        self._lose(peer, reason)

    def _lose(self, peer: Peer, reason: str) -> None:
        try:
            last = self.office.describe_op(*peer.progress)
            log.warning("worker %d (pid %d) %s; its last op was %s", peer.ident, peer.hello.pid, reason, last or "none")
            self._send(self.office.lose_worker(peer.ident, reason, last))
        except Exception:  # a mistake of ours: the other peers are served all the same
            log.exception("the loss of worker %d could not be dealt with", peer.ident)
            with _surviving("what was to be said of it"):
                self._send(self.office.take())

    def close(self) -> None:
        for identity in self._workers.values():
            with _surviving("the end of a worker"):
                self._post(identity, [WorkerShutdown()])
        self._router.close()
        if self._observer is not None:
            self._observer.close()

    # Sending

    def _send(self, outgoing: Sequence[Outgoing]) -> None:
        """As few messages per peer as their limit allows. The order of a worker's commands is the order in which the
        office gave them."""
        mail: dict[bytes, Mail] = {}
        for item in outgoing:
            if isinstance(item, ToWorkers):
                once = len(item.workers) > 1 and item.buffer is None
                message: Any = encode_once(item.command) if once else item.command
                identities = [self._workers.get(worker) for worker in item.workers]
            elif deliver := self._local_sessions.get(item.session):
                deliver(item.answer, item.buffer)  # type: ignore[arg-type]
                continue
            else:
                message, identities = item.answer, [self._clients.get(item.session)]
                self._note_answer(item)
            for identity in identities:
                if identity is not None:
                    box = mail.setdefault(identity, Mail())
                    if len(box.messages) == MAX_BATCH:
                        self._post(identity, box.messages, box.payloads)
                        box = mail[identity] = Mail()
                    box.messages.append(message)
                    if item.buffer is not None:
                        box.payloads.append(item.buffer)  # type: ignore[arg-type]
        for identity, box in mail.items():
            self._post(identity, box.messages, box.payloads)

    def _note_answer(self, item: ToClient) -> None:
        """A read that has failed brings no bytes."""
        if item.session not in self._clients:
            return
        reading = self._peers[self._clients[item.session]].reading
        if isinstance(item.answer, Failed | Lost | Rejected):
            reading.end(item.answer.request)
        elif isinstance(item.answer, Fetched):
            reading.note_fetched(item.answer)

    def _post(self, identity: bytes, messages: Sequence[Any], payloads: Sequence[Payload] = ()) -> None:
        batches = encode_batches(messages, payloads)
        for frames in batches:
            self._router.send(identity, frames)
        peer = self._peers.get(identity)
        if peer is not None and peer.hello.role == "client":
            peer.reading.note_sent(uncounted_bytes(messages, [frame for frames in batches for frame in frames]))


def _require_own_segment(peer: Peer, name: str) -> None:
    if not shared_memory.is_made_with(name, peer.token):
        raise ProtocolError(f"segment {name} is not one of session {peer.ident}")
