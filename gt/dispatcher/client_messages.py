"""Messages of clients: checked, queued by the backpressure of their session, and passed to the dispatcher."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any, TypeAlias

import msgspec

from gt.core.errors import ProtocolError
from gt.core.ids import session_of
from gt.core.message_fields import require_ownership
from gt.core.messages import (
    AckBytes,
    AckMessages,
    AckRead,
    ByteRange,
    CreateTensor,
    EndSession,
    FetchTensor,
    Goodbye,
    Instruction,
    ListedSession,
    ReadSessions,
    Rejected,
    SessionEnded,
    SessionsRead,
    Uploaded,
)
from gt.dispatcher.backpressure import BatchSlice, QueuedInstruction
from gt.dispatcher.delivery import Delivery
from gt.dispatcher.departures import Departures
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.handshakes import internal_errors_logged
from gt.dispatcher.message_queue import Outgoing, ToClient
from gt.dispatcher.peers import Peer, PeerTable
from gt.wire import shared_memory
from gt.wire.authentication import OWN_USER
from gt.wire.codec import MAX_INSTRUCTIONS, Decoder, Frame, Payload
from gt.wire.process_identity import host_name

LIST_SECONDS = 0.2  # a list of this age is given again: adding up all tensors takes time


class SessionAdministration:
    """The list of sessions, and the times at which they began."""

    def __init__(self, dispatcher: Dispatcher, peers: PeerTable) -> None:
        self._dispatcher = dispatcher
        self._peers = peers
        self._listed: tuple[ListedSession, ...] = ()
        self._listed_at = float("-inf")

    def list_for(self, asker: Peer) -> tuple[ListedSession, ...]:
        """All sessions of other processes, without that of the asker."""
        now = time.monotonic()
        if now - self._listed_at > LIST_SECONDS:
            self._listed, self._listed_at = tuple(self._list(now)), now
        return tuple([each for each in self._listed if each.session != asker.ident])

    def _list(self, now: float) -> list[ListedSession]:
        state = self._dispatcher.state
        tensors = Counter(map(session_of, state.tensors))
        held: dict[int, Counter[int]] = {}
        copies = [(copy, state.tensors[ident].meta, spec) for copy, (ident, spec) in state.copy_order.items()]
        records = [(ident, tensor.nbytes, tensor.spec) for ident, tensor in state.tensors.items()]
        records += [(copy, state.copy_size(meta, spec), spec) for copy, meta, spec in copies]
        for ident, nbytes, spec in records:
            counted = held.setdefault(session_of(ident), Counter())
            for worker in spec.mesh.workers:
                counted[worker] += nbytes
        requests, queued = Counter(map(session_of, state.pending)), self._dispatcher.queued()
        peers = [peer for peer in self._peers.by_identity.values() if peer.is_client]
        found = []
        for peer in sorted(peers, key=lambda peer: peer.ident):
            in_flight = peer.backpressure.queued + queued.get(peer.ident, 0) + requests[peer.ident]
            found.append(
                ListedSession(
                    peer.ident,
                    peer.key,
                    peer.hello.hostname or host_name(),
                    peer.hello.pid,
                    peer.hello.program,
                    now - peer.joined_at,
                    tensors[peer.ident],
                    tuple(sorted(held.get(peer.ident, {}).items())),
                    in_flight,
                    "lost" if peer.lost else "working" if in_flight else "idle",
                )
            )
        return found

    def find(self, asker: Peer, session: int) -> Peer | str:
        """The client of a session that the asker may end; or why it may not."""
        if session == asker.ident:
            return f"session {session} is that of the client that asks; it ends by a goodbye"
        peer = self._peers.client(session)
        if peer is None:
            return f"there is no session {session}; list them with: python -m gt.scripts.sessions"
        if asker.key not in (peer.key, OWN_USER):
            return (
                f"session {session} is one of the key {peer.key!r}, and this is the key {asker.key!r}; a session is "
                f"ended by its own key, or by the user of the server on the server's machine"
            )
        return peer


ClientMessage: TypeAlias = QueuedInstruction | AckRead | AckBytes | AckMessages

TURN_SECONDS = 0.01  # time for instructions of the sessions of a key, before messages of other peers are read

log = logging.getLogger("gt.dispatcher")


class ClientMessages:
    """Checks and queues the messages of clients, and passes them to the dispatcher. While the server `is_draining`,
    only what frees memory or ends a session is carried out. Clients in `runnable` have instructions for the next turn:
    each key gets the same time there, however many clients it has."""

    def __init__(self, dispatcher: Dispatcher, peers: PeerTable, delivery: Delivery, departures: Departures) -> None:
        self._dispatcher = dispatcher
        self._peers = peers
        self._delivery = delivery
        self._departures = departures
        self._administration = SessionAdministration(dispatcher, peers)
        self._buffers = shared_memory.AttachedBuffers()
        self._decoder: Decoder[ClientMessage] = Decoder(ClientMessage, MAX_INSTRUCTIONS)
        self.is_draining = False
        self.runnable: dict[int, Peer] = {}

    def receive(self, peer: Peer, frames: Sequence[Frame]) -> None:
        batch, payloads = self._decoder.decode(frames)
        if self.is_draining:
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
            self.instruct(peer.ident, [Goodbye()], (), self._dispatcher.submit)
            self._departures.forget(peer)
            return
        try:
            peer.backpressure.queue(instructions, payloads)
        except ProtocolError as error:
            self._departures.give_up_over_limit(peer, error)
            return
        self.runnable.setdefault(peer.ident, peer)

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
                reason = f"was ended by {who}{why}; its tensors are freed"
                self._departures.give_up_client(found, reason, SessionEnded)
        self._delivery.send_to(self._peers.clients[peer.ident], [answer])

    def _passed_on(
        self, peer: Peer, create: CreateTensor, number: int, payloads: MutableSequence[Payload]
    ) -> CreateTensor:
        """An upload in shared memory, if there are workers that do not share it: its bytes go with the messages, as the
        payload with a number."""
        byte_range = create.byte_range
        workers = self._dispatcher.state.workers.values()
        if not byte_range.name or all(worker.info.host == peer.hello.host for worker in workers):
            return create
        payloads[number] = [bytes(self._buffers.view(byte_range.name, byte_range.offset, byte_range.nbytes))]
        self._delivery.send_to(self._peers.clients[peer.ident], [Uploaded(create.id)])
        return msgspec.structs.replace(create, byte_range=ByteRange("", byte_range.nbytes))

    def check_backpressure(self, peer: Peer) -> None:
        """Give up a client that takes no answers, and proceed with the instructions of any other."""
        try:
            peer.backpressure.require_taken()
            peer.stream.require_acknowledged()
        except ProtocolError as error:
            self._departures.give_up_over_limit(peer, error)
            return
        self.runnable.setdefault(peer.ident, peer)

    def proceed_all(self) -> None:
        """A progress report may let queued instructions proceed."""
        self.runnable = {**self.runnable, **self._peers.held}

    def proceed(self) -> None:
        """Carry out instructions of runnable clients, for TURN_SECONDS of each key. Those that are left go on at the
        next turn, before the ones that had theirs."""
        ends: dict[str, float] = {}
        waiting: dict[int, Peer] = {}
        runnable, self.runnable = self.runnable, {}
        for ident, client in runnable.items():
            if client.key in ends and time.monotonic() >= ends[client.key]:
                waiting[ident] = client
                continue
            end = ends.setdefault(client.key, time.monotonic() + TURN_SECONDS)
            with internal_errors_logged(f"the instructions of client {ident}"):
                self._proceed(client, end)
        self.runnable = {**waiting, **self.runnable}

    def _proceed(self, peer: Peer, end: float) -> None:
        """Carry out the instructions of a session as far as its backpressure allows, until a time. The size of a read
        is known only after the instructions before it."""
        backpressure, state = peer.backpressure, self._dispatcher.state
        self._peers.held[peer.ident] = peer
        while peer.ident in state.sessions and not self._dispatcher.is_waiting(peer.ident):
            if backpressure.asked is not None and backpressure.asked.request in state.pending:
                reads = state.pending[backpressure.asked.request].reads
                backpressure.begin(backpressure.asked.request, sum(max(read.nbytes, 0) for read in reads))
            batch_slice = backpressure.next()
            backpressure.asked = batch_slice.read if batch_slice is not None else None
            if batch_slice is None:
                break
            self._carry_out(peer, batch_slice)
            if time.monotonic() >= end and not backpressure.is_empty:
                self.runnable[peer.ident] = peer
                break
        if peer.ident not in state.sessions or backpressure.is_empty:
            self._peers.held.pop(peer.ident, None)

    def _carry_out(self, peer: Peer, batch_slice: BatchSlice) -> None:
        request, batch = batch_slice.administration, batch_slice.instructions
        if request is not None:
            batch = batch[:-1]
        if batch:
            self.instruct(peer.ident, batch, batch_slice.payloads, self._dispatcher.submit)  # type: ignore[arg-type]
        if request is not None and peer.ident in self._dispatcher.state.sessions:
            self._administer(peer, request)

    def instruct(
        self,
        session: int,
        batch: Sequence[Instruction],
        payloads: Sequence[Payload],
        carry_out: Callable[[int, Any, Any], list[Outgoing]] | None = None,
    ) -> None:
        """Pass a batch to `carry_out`: `Dispatcher.submit` for clients that share workers, by default `instruct`."""
        try:
            outgoing = (carry_out or self._dispatcher.instruct)(session, batch, payloads)  # type: ignore[arg-type]
        except Exception as error:  # an internal error: the other clients are served
            log.exception("an instruction of client %d failed", session)
            rejected = Rejected(0, f"a mistake of GT: {type(error).__name__}: {error}")
            outgoing = [*self._dispatcher.take(), ToClient(session, rejected)]
        self._delivery.send(outgoing)


def _require_own_buffer(peer: Peer, name: str) -> None:
    if name:
        shared_memory.require_name(name)
    if name and not shared_memory.is_made_with(name, peer.session_secret):
        raise ProtocolError(f"shared buffer {name} is not one of session {peer.ident}", "foreign")
