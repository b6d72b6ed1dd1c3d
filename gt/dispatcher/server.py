"""The thin loop around the office: poll, decode, call, send."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import zmq

from gt.core.errors import ProtocolError
from gt.core.events import Observer
from gt.core.messages import (
    MAX_BATCH,
    Answer,
    Fetched,
    Goodbye,
    Hello,
    Instruction,
    Refused,
    Rejected,
    Report,
    Waiting,
    Welcome,
    WorkerShutdown,
)
from gt.dispatcher.office import Office
from gt.dispatcher.ownership import require_ownership
from gt.dispatcher.post import Outgoing, ToClient, ToWorkers
from gt.version import __version__
from gt.wire import shared
from gt.wire.codec import Decoder, Frame, Payload, encode, encode_once
from gt.wire.processes import is_running, start_mark, this_host
from gt.wire.sockets import open_socket, receive, send

log = logging.getLogger("gt.dispatcher")

TICK_MS = 250
NOTICE_SECONDS = 3.0
Deliver: TypeAlias = Callable[[Answer, Payload | None], None]
_MISTAKES = 3  # malformed messages after which a client is no longer listened to, and a worker is lost


@dataclass
class Peer:
    """Someone who has said hello. `ident` is a session or a worker's id; `progress` shows what a worker is at."""

    hello: Hello
    ident: int
    mark: str
    mistakes: int = 0
    progress: Sequence[int] = (0, 0)


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


class Server:
    """`descriptor` shows that a message may have arrived, to who does not wait in a turn."""

    def __init__(self, endpoint: str, observer: Observer | None = None) -> None:
        self.office = Office(observer)
        self._observer = observer
        self._stopping = False
        self._next_check = self._next_notice = time.monotonic()
        self._context = zmq.Context()
        self._socket = open_socket(self._context, zmq.ROUTER, TICK_MS)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self._socket.close()
            self._context.term()
            raise
        self.descriptor = int(self._socket.getsockopt(zmq.FD))
        self._peers: dict[bytes, Peer] = {}
        self._waiting: dict[bytes, Waiter] = {}
        self._clients: dict[int, bytes] = {}
        self._workers: dict[int, bytes] = {}
        self._here: dict[int, Deliver] = {}
        self._instructions: Decoder[Instruction] = Decoder(Instruction)
        self._reports: Decoder[Report] = Decoder(Report)
        self._hellos: Decoder[Hello] = Decoder(Hello)

    def run(self) -> None:
        while not self._stopping:
            self.turn()
        self.close()

    def turn(self, *, waits: bool = True) -> bool:
        """Deal with a message, if there is one or it comes in time, and with what is due. Gives whether there was."""
        message = receive(self._socket, waits=waits)
        if message is not None:
            self._receive(message[0], message[1:])
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + TICK_MS / 1000
            self._bury_the_dead()
        if now >= self._next_notice:
            self._next_notice = now + NOTICE_SECONDS
            self._explain_waits()
        return message is not None

    def stop(self) -> None:
        """End the loop at its next turn; safe to call from a signal handler."""
        self._stopping = True

    def _receive(self, identity: bytes, frames: Sequence[Frame]) -> None:
        peer = self._peers.get(identity)
        try:
            if peer is None:
                self._greet(identity, frames)
            elif peer.mistakes < _MISTAKES and peer.hello.role == "client":
                self._instruct(peer, frames)
            elif peer.mistakes < _MISTAKES:
                self._report(peer, frames)
        except ProtocolError as error:
            log.warning("refused a message: %s", error)
            self._post(identity, [Refused(f"{error} (server: GT {__version__})")])
            if peer is not None:
                self._count_mistake(peer)
        except Exception:  # a mistake of ours: the other peers are served all the same
            log.exception("a message could not be dealt with")

    def _count_mistake(self, peer: Peer) -> None:
        peer.mistakes += 1
        if peer.mistakes >= _MISTAKES and peer.hello.role == "worker":
            self._dismiss(peer, f"was dismissed after {_MISTAKES} messages that could not be read")

    def _instruct(self, peer: Peer, frames: Sequence[Frame]) -> None:
        batch, payloads = self._instructions.decode(frames)
        for instruction in batch:
            require_ownership(peer.ident, instruction)
        self.instruct(peer.ident, batch, payloads)
        if peer.ident not in self.office.state.sessions:
            self._forget(peer)

    def instruct(self, session: int, batch: Sequence[Instruction], payloads: Sequence[Payload]) -> None:
        try:
            outgoing = self.office.instruct(session, batch, payloads)  # type: ignore[arg-type]
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
        if self._waiting:
            self._welcome_waiting()

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
        if hello.role == "worker":
            self._welcome_worker(identity, hello)
        elif hello.role == "client":
            self._waiting[identity] = Waiter(hello)
        else:
            raise ProtocolError(f"{hello.role!r} is not a role; clients and workers connect here")
        self._welcome_waiting()

    def _welcome_worker(self, identity: bytes, hello: Hello) -> None:
        shares = hello.progress and hello.host == this_host()
        progress: Sequence[int] = shared.take(hello.progress, 16).cast("q") if shares else (0, 0)
        ident, outgoing = self.office.join_worker(hello.device, hello.host, hello.pid)
        peer = Peer(hello, ident, start_mark(hello.pid), progress=progress)
        self._peers[identity] = peer
        self._workers[ident] = identity
        self._post(identity, [Welcome(__version__, ident, os.getpid(), this_host())])
        log.info("worker %d joined (%s, pid %d)", ident, hello.device, hello.pid)
        self._send(outgoing)

    def host(self, deliver: Deliver) -> Welcome:
        """Open a session for this process; its answers are handed over."""
        ident = self.office.open_session(this_host(), os.getpid())
        self._here[ident] = deliver
        return Welcome(__version__, ident, os.getpid(), this_host(), self.office.ready_workers())

    def _welcome_waiting(self) -> None:
        ready = self.office.ready_workers()
        for identity, waiter in list(self._waiting.items()):
            if len(ready) >= max(1, waiter.hello.wants_workers):
                del self._waiting[identity]
                ident = self.office.open_session(waiter.hello.host, waiter.hello.pid)
                self._peers[identity] = Peer(waiter.hello, ident, start_mark(waiter.hello.pid))
                self._clients[ident] = identity
                log_path = "" if self._observer is None else self._observer.path
                self._post(identity, [Welcome(__version__, ident, os.getpid(), this_host(), ready, log_path)])
                log.info("client %d joined (pid %d)", ident, waiter.hello.pid)
            else:
                self._explain_waiting(identity, waiter, len(ready))

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
            at = [self._at(worker) for worker in sorted(workers) if worker in self._workers]
            self._send([ToClient(session, Waiting(f"for {', '.join(at)}"))])

    def _at(self, worker: int) -> str:
        code, site = self._peers[self._workers[worker]].progress
        return f"worker {worker}, which is at {self.office.describe_op(code, site) or 'its start'}"

    # Ends

    def _bury_the_dead(self) -> None:
        """Peers of this machine whose process is gone without a goodbye."""
        for peer in list(self._peers.values()):
            if peer.hello.host == this_host() and not is_running(peer.hello.pid, peer.mark):
                self._bury(peer)

    def _bury(self, peer: Peer) -> None:
        shared.sweep(peer.hello.pid)
        self._forget(peer)
        if peer.hello.role == "worker":
            self._lose(peer, "has ended without a goodbye (killed, or crashed)")
            return
        try:
            self._send(self.office.end_session(peer.ident))
        except Exception:  # a mistake of ours: the other peers are served all the same
            log.exception("the session of client %d could not be ended", peer.ident)

    def _dismiss(self, peer: Peer, reason: str) -> None:
        """A worker that cannot be relied on is asked to end, and nobody waits for it any more."""
        self._post(self._workers[peer.ident], [WorkerShutdown()])
        self._forget(peer)
        self._lose(peer, reason)

    def _lose(self, peer: Peer, reason: str) -> None:
        try:
            last = self.office.describe_op(*peer.progress)
            log.warning("worker %d (pid %d) %s; its last op was %s", peer.ident, peer.hello.pid, reason, last or "none")
            self._send(self.office.lose_worker(peer.ident, reason, last))
        except Exception:  # a mistake of ours: the other peers are served all the same
            log.exception("the loss of worker %d could not be dealt with", peer.ident)
            self._send(self.office.take())

    def close(self) -> None:
        for identity in self._workers.values():
            self._post(identity, [WorkerShutdown()])
        self._socket.close()
        self._context.term()
        if self._observer is not None:
            self._observer.close()

    # Sending

    def _send(self, outgoing: Sequence[Outgoing]) -> None:
        """As few messages per peer as their limit allows. The order of a worker's commands is the order in which the
        office gave them."""
        mail: dict[bytes, Mail] = {}
        for item in outgoing:
            if isinstance(item, ToWorkers):
                message: Any = item.command if len(item.workers) == 1 else encode_once(item.command)
                identities = [self._workers.get(worker) for worker in item.workers]
            elif deliver := self._here.get(item.session):
                deliver(item.answer, item.buffer)  # type: ignore[arg-type]
                continue
            else:
                message, identities = item.answer, [self._clients.get(item.session)]
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

    def _post(self, identity: bytes, messages: Sequence[Any], payloads: Sequence[Payload] = ()) -> None:
        send(self._socket, [identity, *encode(messages, payloads)])
