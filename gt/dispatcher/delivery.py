"""Sends the dispatcher's messages to their peers, in as few messages on the wire as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from gt.core.messages import (
    Answer,
    Failed,
    Goodbye,
    Lost,
    MoreRoomNeeded,
    Refused,
    Rejected,
    Resumed,
    SessionEnded,
    TensorRead,
)
from gt.dispatcher.message_queue import Outgoing, ToClient, ToWorkers
from gt.dispatcher.peers import PeerTable
from gt.wire.codec import (
    EncodedRecords,
    Frame,
    Payload,
    counted_bytes,
    divide,
    encode,
    encode_batches,
    encode_records,
    join_records,
)
from gt.wire.connections import Router
from gt.wire.message_stream import MessageStream
from gt.wire.sockets import SentFrame, keepable

Deliver: TypeAlias = Callable[[Answer, Sequence[Payload]], None]


class _CommandRun(NamedTuple):
    """Consecutive commands for the same workers, with the bytes beside them."""

    workers: tuple[int, ...]
    commands: list[Any]
    payloads: list[Payload]


class Delivery:
    """Sends messages to clients and workers; to `local_sessions`, those of this process, by a call."""

    def __init__(self, router: Router, peers: PeerTable) -> None:
        self._router = router
        self._peers = peers
        self.local_sessions: dict[int, Deliver] = {}

    def send(self, outgoing: Sequence[Outgoing]) -> None:
        """Send each worker its commands in the order of the dispatcher, and each client its answers. Hot path: the cost
        of a command must not grow with the number of its workers."""
        runs: list[_CommandRun] = []
        answers: dict[bytes, list[ToClient]] = {}
        workers: tuple[int, ...] | None = None
        for item in outgoing:
            if type(item) is not ToWorkers:
                self._add_answer(answers, item)  # type: ignore[arg-type]
                continue
            if item.workers != workers:
                workers = item.workers
                runs.append(_CommandRun(workers, [], []))
                commands = runs[-1].commands
            commands.append(item.command)
            if item.buffer is not None:
                runs[-1].payloads.append(item.buffer)  # type: ignore[arg-type]
        if runs:
            self._send_runs(runs)
        for identity, items in answers.items():
            payloads: list[Any] = [buffer for item in items for buffer in item.buffers]
            self.send_to(identity, [item.answer for item in items], payloads)

    def _add_answer(self, answers: dict[bytes, list[ToClient]], item: ToClient) -> None:
        deliver = self.local_sessions.get(item.session)
        if deliver is not None:
            deliver(item.answer, item.buffers)  # type: ignore[arg-type]
            return
        self._count_read(item)
        identity = self._peers.clients.get(item.session)
        if identity is not None:
            answers.setdefault(identity, []).append(item)

    def _send_runs(self, runs: Sequence[_CommandRun]) -> None:
        """Send each worker its runs in one message. A run is encoded once, and so is a message that several workers
        get."""
        encoded = [encode_records(run.commands) for run in runs]
        by_worker: dict[int, list[int]] = {}
        for number, run in enumerate(runs):
            for worker in run.workers:
                by_worker.setdefault(worker, []).append(number)
        messages: dict[tuple[int, ...], list[tuple[Sequence[Frame], Sequence[SentFrame]]]] = {}
        for worker, numbers in by_worker.items():
            identity = self._peers.workers.get(worker)
            if identity is None:
                continue
            key = tuple(numbers)
            if key not in messages:
                messages[key] = self._join(runs, encoded, numbers)
            for frames, held in messages[key]:
                if held:
                    self._router.hold(identity, held)
                self._router.send(identity, frames)

    def _join(
        self, runs: Sequence[_CommandRun], encoded: Sequence[EncodedRecords], numbers: Sequence[int]
    ) -> list[tuple[Sequence[Frame], Sequence[SentFrame]]]:
        """The messages of some runs, each as the frames that are sent now, and those that are held for its workers."""
        payloads = [payload for number in numbers for payload in runs[number].payloads]
        joined = join_records([encoded[number] for number in numbers], payloads)
        batches = [joined] if joined is not None else None
        if batches is None:
            batches = encode_batches([command for number in numbers for command in runs[number].commands], payloads)
        return [(begun, keepable(held)) for begun, held in map(divide, batches)]

    def _count_read(self, item: ToClient) -> None:
        """Tell the backpressure of a session that a read was answered, or has failed."""
        peer = self._peers.client(item.session)
        if peer is None:
            return
        if isinstance(item.answer, Failed | Lost | Rejected | MoreRoomNeeded):
            peer.backpressure.end(item.answer.request)
        elif isinstance(item.answer, TensorRead):
            peer.backpressure.note_read(item.answer)

    def send_to(self, identity: bytes, messages: Sequence[Any], payloads: Sequence[Payload] = ()) -> None:
        """Send messages. Those of a session are kept until its client has acknowledged them, and wait while it has
        acknowledged too few of the earlier ones."""
        peer = self._peers.by_identity.get(identity)
        if peer is None or not peer.is_client:
            for frames in encode_batches(messages, payloads):
                self._router.send(identity, frames)
            return
        stream = peer.stream
        kept_bytes = stream.kept_bytes
        for sendable in stream.encode(messages, payloads):
            self._router.send(identity, sendable)
        peer.backpressure.note_sent(stream.kept_bytes - kept_bytes - counted_bytes(messages))

    def send_last(self, identity: bytes, message: Goodbye | Refused | SessionEnded) -> None:
        """Send the last message of a session. It does not wait for the messages before it, which a client that is told
        why its session has ended needs no more."""
        self._router.send(identity, encode([message]))

    def proceed(self, identity: bytes, stream: MessageStream) -> None:
        """Send a client the messages that waited for its acknowledgements, and acknowledge its own, if it sends much
        and is sent nothing."""
        if stream.has_waiting:
            for sendable in stream.take_sendable():
                self._router.send(identity, sendable)
        if stream.owes_acknowledgement:
            self._router.send(identity, stream.encode_acknowledgement())

    def resume(self, identity: bytes, stream: MessageStream) -> None:
        """Send a client over its new connection what it has not received."""
        self._router.send(identity, encode([Resumed(stream.received)]))
        for sendable in stream.take_sendable():
            self._router.send(identity, sendable)
