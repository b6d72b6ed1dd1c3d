"""A client's channel to a dispatcher in another process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from gt.core.errors import ProtocolError, ServerLost, SessionError
from gt.core.messages import Answer, CreateTensor, Fetched, Hello, Instruction, Refused, Segment, Waiting, Welcome
from gt.version import __version__
from gt.wire import shared
from gt.wire.channel import Buffer
from gt.wire.codec import Decoder, Payload, encode, join
from gt.wire.processes import is_running, start_mark, this_host
from gt.wire.sockets import open_socket, receive, send

_SLICE_MS = 2  # how long a receiver holds the socket before a sender of another thread gets it
_CHECK_SECONDS = 0.5

Ending = Callable[[int], str]
Fill = Callable[[memoryview, Buffer], None]


class SocketChannel:
    """`fill` copies bytes into a segment, as fast as the client can; `ending` tells how a process that this side
    started has ended. Raises ServerLost when the server is gone."""

    remote = True

    def __init__(self, endpoint: str, *, share: bool, fill: Fill, ending: Ending = lambda pid: "") -> None:
        self._endpoint = endpoint
        self._context = zmq.Context()
        self._socket = open_socket(self._context, zmq.DEALER, _SLICE_MS)
        self._socket.connect(endpoint)
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # held by a sender that waits for the socket, or a receiver would take it again
        self._decoder: Decoder[Answer] = Decoder(Answer)
        self._share = share
        self._fill = fill
        self._ending = ending
        self._server = (0, "")
        self._checked = time.monotonic()

    def greet(self, wants_workers: int, timeout: float, watch: Callable[[], None] = lambda: None) -> Welcome:
        """Shake hands. `watch` is called while waiting and raises when it is in vain."""
        hello = Hello(__version__, "client", this_host(), os.getpid(), wants_workers=wants_workers)
        send(self._socket, encode([hello]))
        deadline = time.monotonic() + timeout
        reason = f"no server answers at {self._endpoint}; start one with: python -m gt.server"
        while time.monotonic() < deadline:
            for answer, _ in self.receive(0.1):
                if isinstance(answer, Welcome):
                    self._server = (answer.pid, start_mark(answer.pid)) if answer.host == this_host() else (0, "")
                    self._share = self._share and answer.host == this_host()
                    return answer
                if isinstance(answer, Refused):
                    raise ProtocolError(answer.reason)
                if isinstance(answer, Waiting):
                    reason = answer.reason
            watch()
        raise ServerLost(f"after {timeout:g} s of waiting: {reason}")

    def send(self, batch: Sequence[Instruction], buffers: Sequence[Buffer]) -> None:
        remaining = iter(buffers)
        messages: list[Instruction] = []
        payloads: list[list[Buffer]] = []
        for instruction in batch:
            if isinstance(instruction, CreateTensor):
                instruction, payload = self._pack(instruction, next(remaining))
                payloads.append(payload)
            messages.append(instruction)
        frames = encode(messages, payloads)
        with self._turn, self._lock:
            send(self._socket, frames)

    def _pack(self, created: CreateTensor, buffer: Buffer) -> tuple[CreateTensor, list[Buffer]]:
        """Large tensors go through shared memory where the workers are on this machine."""
        nbytes = created.segment.nbytes
        if not self._share or nbytes < shared.SHARE_BYTES:
            return created, [buffer]
        try:
            name, segment = shared.create(nbytes)
        except OSError:  # there is too little shared memory
            return created, [buffer]
        self._fill(segment, buffer)
        return msgspec.structs.replace(created, segment=Segment(name, nbytes)), []

    def receive(self, timeout: float) -> list[tuple[Answer, Buffer | None]]:
        deadline = time.monotonic() + timeout
        while True:
            with self._turn:
                pass
            with self._lock:
                if self._socket.closed:
                    raise SessionError("the session was closed while it was waited on")
                frames = receive(self._socket, waits=timeout > 0)
            if frames is not None:
                answers, payloads = self._decoder.decode(frames)
                remaining = iter(payloads)
                return [
                    (answer, self._unpack(answer.segment, next(remaining)) if isinstance(answer, Fetched) else None)
                    for answer in answers
                ]
            self._check_server()
            if time.monotonic() >= deadline:
                return []

    def _unpack(self, segment: Segment, payload: Payload) -> Buffer:
        if segment.name:
            return shared.take(segment.name, segment.nbytes)
        return bytearray(join(payload)) if segment.nbytes else b""

    def _check_server(self) -> None:
        pid, mark = self._server
        if not pid or time.monotonic() - self._checked < _CHECK_SECONDS:
            return
        self._checked = time.monotonic()
        if not is_running(pid, mark):
            ending = self._ending(pid) or "has ended"
            raise ServerLost(
                f"the server at {self._endpoint} (pid {pid}) {ending}; the session and its tensors are lost"
            )

    def how_it_ended(self, pid: int) -> str:
        return self._ending(pid)

    def close(self) -> None:
        with self._lock:
            self._socket.close()
        self._context.term()
        shared.sweep(os.getpid())
