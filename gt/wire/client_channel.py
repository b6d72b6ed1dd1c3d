"""A client's channel to a dispatcher in another process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import zmq

from gt.core.errors import ProtocolError, ServerLost, SessionError
from gt.core.messages import Answer, Fetched, Hello, Instruction, Refused, Waiting, Welcome
from gt.version import __version__
from gt.wire import shared
from gt.wire.channel import CLOSED, Buffer
from gt.wire.codec import Decoder, encode
from gt.wire.parcels import Fill, pack, unpack
from gt.wire.processes import is_running, start_mark, this_host
from gt.wire.sockets import open_socket, receive, send, wait

_CHECK_SECONDS = 0.5


class SocketChannel:
    """`fill`: memory is shared with workers of this machine. Raises ServerLost when the server is gone."""

    remote = True

    def __init__(self, endpoint: str, fill: Fill | None) -> None:
        self._endpoint = endpoint
        self._context = zmq.Context()
        self._socket = open_socket(self._context, zmq.DEALER, 0)
        self._socket.connect(endpoint)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._lock = threading.Lock()
        self._decoder: Decoder[Answer] = Decoder(Answer)
        self._fill = fill
        self._server = (0, "")
        self._checked = time.monotonic()

    def greet(self, wants_workers: int, timeout: float) -> Welcome:
        """Shake hands, which takes until so many workers are there."""
        hello = Hello(__version__, "client", this_host(), os.getpid(), wants_workers=wants_workers)
        send(self._socket, encode([hello]))
        deadline = time.monotonic() + timeout
        reason = f"no server answers at {self._endpoint}; start one with: python -m gt.server"
        while time.monotonic() < deadline:
            for answer, _ in self.receive():
                if isinstance(answer, Welcome):
                    self._note_server(answer)
                    return answer
                if isinstance(answer, Refused):
                    raise ProtocolError(answer.reason)
                if isinstance(answer, Waiting):
                    reason = answer.reason
            self.wait()
        raise ServerLost(f"after {timeout:g} s of waiting: {reason}")

    def _note_server(self, welcome: Welcome) -> None:
        if welcome.host == this_host():
            self._server = (welcome.pid, start_mark(welcome.pid))
        else:
            self._fill = None

    def send(self, batch: Sequence[Instruction], buffers: Sequence[Buffer]) -> None:
        frames = encode(*pack(batch, buffers, self._fill))
        with self._lock:
            self._require_open()
            send(self._socket, frames)

    def wait(self) -> None:
        wait(self._descriptor)

    def receive(self) -> list[tuple[Answer, Buffer | None]]:
        with self._lock:
            self._require_open()
            frames = receive(self._socket, waits=False)
        if frames is None:
            self._check_server()
            return []
        answers, payloads = self._decoder.decode(frames)
        remaining = iter(payloads)
        return [unpack(answer, next(remaining) if isinstance(answer, Fetched) else None) for answer in answers]

    def _require_open(self) -> None:
        if self._socket.closed:
            raise SessionError(CLOSED)

    def _check_server(self) -> None:
        pid, mark = self._server
        if not pid or time.monotonic() - self._checked < _CHECK_SECONDS:
            return
        self._checked = time.monotonic()
        if not is_running(pid, mark):
            raise ServerLost(
                f"the server at {self._endpoint} (pid {pid}) has ended; the session and its tensors are lost"
            )

    def how_it_ended(self, pid: int) -> str:
        return ""

    def close(self) -> None:
        with self._lock:
            self._socket.close()
        self._context.term()
        shared.sweep(os.getpid())
