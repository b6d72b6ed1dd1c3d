"""Sends the dispatcher's messages to their peers, in as few messages on the wire as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gt.core.messages import MAX_BATCH, Answer, Failed, Lost, MoreRoomNeeded, Rejected, TensorRead
from gt.dispatcher.message_queue import Outgoing, ToClient, ToWorkers
from gt.dispatcher.peers import PeerTable
from gt.wire.codec import Payload, encode_batches, encode_once, uncounted_bytes
from gt.wire.connections import Router

Deliver: TypeAlias = Callable[[Answer, Sequence[Payload]], None]


@dataclass
class _Batch:
    """Messages for one peer that are sent together."""

    messages: list[Any] = field(default_factory=list)
    payloads: list[Payload] = field(default_factory=list)


class Delivery:
    """`local_sessions` are sessions of this process, whose answers are handed over by a call."""

    def __init__(self, router: Router, peers: PeerTable) -> None:
        self._router = router
        self._peers = peers
        self.local_sessions: dict[int, Deliver] = {}

    def send(self, outgoing: Sequence[Outgoing]) -> None:
        """Each worker gets its commands in the order of the dispatcher. A command for several workers is encoded once.
        Hot path: every command of every op passes here."""
        batches: dict[bytes, _Batch] = {}
        workers = self._peers.workers
        for item in outgoing:
            if isinstance(item, ToWorkers):
                payloads: Sequence[Any] = () if item.buffer is None else (item.buffer,)
                is_shared = len(item.workers) > 1 and not payloads
                message: Any = encode_once(item.command) if is_shared else item.command
                identities = [workers.get(worker) for worker in item.workers]
            elif deliver := self.local_sessions.get(item.session):
                deliver(item.answer, item.buffers)  # type: ignore[arg-type]
                continue
            else:
                self._count_read(item)
                payloads = item.buffers
                message, identities = item.answer, [self._peers.clients.get(item.session)]
            for identity in identities:
                if identity is None:
                    continue
                batch = batches.get(identity)
                if batch is None or len(batch.messages) == MAX_BATCH:
                    batch = self._new_batch(batches, identity)
                batch.messages.append(message)
                if payloads:
                    batch.payloads.extend(payloads)
        for identity, batch in batches.items():
            self.send_to(identity, batch.messages, batch.payloads)

    def _new_batch(self, batches: dict[bytes, _Batch], identity: bytes) -> _Batch:
        """Begin a batch for a peer, after sending the one that is full."""
        if identity in batches:
            self.send_to(identity, batches[identity].messages, batches[identity].payloads)
        batches[identity] = _Batch()
        return batches[identity]

    def _count_read(self, item: ToClient) -> None:
        """Tell the read limits of a session that a read was answered, or has failed."""
        peer = self._peers.client(item.session)
        if peer is None:
            return
        if isinstance(item.answer, Failed | Lost | Rejected | MoreRoomNeeded):
            peer.reading.end(item.answer.request)
        elif isinstance(item.answer, TensorRead):
            peer.reading.note_read(item.answer)

    def send_to(self, identity: bytes, messages: Sequence[Any], payloads: Sequence[Payload] = ()) -> None:
        batches = encode_batches(messages, payloads)
        for frames in batches:
            self._router.send(identity, frames)
        peer = self._peers.by_identity.get(identity)
        if peer is not None and peer.is_client:
            peer.reading.note_sent(uncounted_bytes(messages, [frame for frames in batches for frame in frames]))
