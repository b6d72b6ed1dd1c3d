"""A client's channel to a dispatcher in another process."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from gt.core.errors import ConnectionLost, ProtocolError, ServerLost, SessionError, SessionLost
from gt.core.messages import (
    ACKNOWLEDGED_BYTES,
    COUNTED_BYTES,
    AckBytes,
    AckRead,
    Answer,
    Hello,
    Instruction,
    Refused,
    SessionEnded,
    TensorRead,
    Waiting,
    Welcome,
)
from gt.core.progress import ProgressDisplay
from gt.version import __version__
from gt.wire import shared_memory
from gt.wire.addresses import LOOPBACK
from gt.wire.client_channel import CLOSED, Received, Upload
from gt.wire.cluster_keys import CLIENT_FILE
from gt.wire.codec import MAX_INSTRUCTIONS, Decoder, Frame, encode, encode_batches, read_bytes, uncounted_bytes
from gt.wire.connections import Link, NoConnection, open_link
from gt.wire.long_waits import LongWait
from gt.wire.payloads import CopyBytes, Payloads
from gt.wire.process_identity import host_name, is_running, program_name, start_mark, this_host
from gt.wire.wakeups import MessageWait

_CHECK_SECONDS = 0.5
_RETRY_SECONDS = 0.1


class SocketChannel:
    """A connection over a socket. `copy` writes to memory shared with workers of this machine (None: none is shared).
    `keys` is the directory of the servers' keys (None: without encryption). A server that is silent for `silence`
    seconds is given up. Raises ServerLost when the server has ended."""

    is_asynchronous = True

    def __init__(self, endpoint: str, copy: CopyBytes | None, keys: Path | None, silence: float) -> None:
        self._endpoint = endpoint
        self._payloads = Payloads(copy)
        self._keys = keys
        self._silence = silence
        self._link: Link | None = None
        self._unacknowledged = 0  # bytes received that are not yet acknowledged to the server
        self._lock = threading.Lock()
        self._waiting = MessageWait(self._lock)
        self._decoder: Decoder[Answer] = Decoder(Answer)
        self._server = (0, "")
        self._checked = time.monotonic()

    def greet(self, wants_workers: int, timeout: float, display: ProgressDisplay | None = None) -> Welcome:
        """Shake hands with the server, which answers when so many workers have joined it. The `display` shows for what
        a long wait is."""
        hello = Hello(
            __version__,
            "client",
            this_host(),
            os.getpid(),
            wants_workers=wants_workers,
            hostname=host_name(),
            program=program_name(),
        )
        deadline = time.monotonic() + timeout
        reason = self._describe_absence()

        def describe_wait() -> str:
            return reason

        with LongWait(display) as wait:
            while time.monotonic() < deadline:
                wait.tell(describe_wait)
                if self._link is None or self._link.is_lost():
                    reason = self._reopen(hello) or reason
                    continue
                frames = self._link.receive(waits=False)
                for answer, *_ in self._unpack(frames)[0] if frames is not None else ():
                    if isinstance(answer, Welcome):
                        self._note_server(answer)
                        return answer
                    if isinstance(answer, Refused):
                        raise ProtocolError(answer.reason)
                    if isinstance(answer, Waiting):
                        reason = answer.reason
                self.wait()
        raise ServerLost(f"after {timeout:g} s of waiting: {reason}")

    def _describe_absence(self) -> str:
        if self._keys is None:
            return f"no server without encryption answers at {self._endpoint}; start one with: python -m gt.server"
        text = (
            f"no server of this user answers at {self._endpoint}, or its keys are not in {self._keys}; start one with: "
            f"python -m gt.server"
        )
        if self._endpoint.startswith(f"tcp://{LOOPBACK}:"):
            return text
        return (
            f"{text}; a server of another machine needs a client key in {self._keys / CLIENT_FILE} (python -m gt.keys)"
        )

    def _reopen(self, hello: Hello) -> str:
        """Try to connect; returns why that was not possible, if it is known."""
        if self._link is not None:
            self._link.close()
            self._link = None
        try:
            self._link = open_link(self._endpoint, self._keys, 0, self._silence)
        except NoConnection as error:
            time.sleep(_RETRY_SECONDS)
            return str(error)
        if self._link is None:
            time.sleep(_RETRY_SECONDS)
            return ""
        with contextlib.suppress(ConnectionLost):
            self._link.send(encode([hello]))
        return ""

    def _note_server(self, welcome: Welcome) -> None:
        is_here = welcome.host == this_host()
        self._payloads.open(welcome.session_secret, shares_memory=is_here)
        if is_here:
            self._server = (welcome.pid, start_mark(welcome.pid))

    def send(self, batch: Sequence[Instruction], uploads: Sequence[Upload]) -> None:
        packed, payloads = self._payloads.pack(batch, uploads)
        messages = encode_batches(packed, payloads, MAX_INSTRUCTIONS)
        with self._lock:
            link = self._open_link()
            try:
                for frames in messages:
                    link.send(frames)
            except ConnectionLost:
                raise self._loss() from None
            finally:
                self._waiting.wake()

    def wait(self) -> None:
        with self._lock:
            link = self._link
            if link is None or link.closed or link.has_message():
                return
            self._waiting.begin()
        self._waiting.wait(link.descriptor)

    def read_directly(self, ident: int) -> None:
        return None

    def receive(self) -> list[Received]:
        with self._lock:
            link = self._open_link()
            frames = link.receive(waits=False)
            self._waiting.wake()
            if frames is None:
                self._check_server(link)
                return []
        answers, acks = self._unpack(frames)
        if acks:
            with self._lock, contextlib.suppress(ConnectionLost):  # the next `receive` raises it
                self._open_link().send(encode(acks))
        return answers

    def _unpack(self, frames: Sequence[Frame]) -> tuple[list[Received], list[AckRead | AckBytes]]:
        """The answers with their bytes, and the acknowledgements to send to the server."""
        answers, payloads = self._decoder.decode(frames)
        remaining = iter(payloads)
        counts = [len(answer.byte_ranges) if isinstance(answer, TensorRead) else 0 for answer in answers]
        unpacked = [
            self._payloads.unpack(answer, [next(remaining) for _ in range(count)])
            for answer, count in zip(answers, counts, strict=True)
        ]
        reads = [answer for answer in answers if isinstance(answer, TensorRead)]
        acks: list[AckRead | AckBytes] = [AckRead(read.request) for read in reads if read_bytes(read) >= COUNTED_BYTES]
        self._unacknowledged += uncounted_bytes(answers, frames)
        if self._unacknowledged >= ACKNOWLEDGED_BYTES:
            acks.append(AckBytes(self._unacknowledged))
            self._unacknowledged = 0
        return unpacked, acks

    def _open_link(self) -> Link:
        if self._link is None or self._link.closed:
            raise SessionError(CLOSED)
        return self._link

    def _check_server(self, link: Link) -> None:
        if time.monotonic() - self._checked < _CHECK_SECONDS:
            return
        self._checked = time.monotonic()
        pid, mark = self._server
        if link.is_lost() or (pid and not is_running(pid, mark)):
            raise self._loss()

    def _loss(self) -> ServerLost:
        """The error of a lost server. Waits a moment, since its process may end shortly after its connections. A server
        that has ended the session has said so before."""
        while self._link is not None and (frames := self._link.receive(waits=False)) is not None:
            for answer, *_ in self._unpack(frames)[0]:
                if isinstance(answer, SessionEnded):
                    return SessionLost(answer.reason)
        pid, mark = self._server
        end = time.monotonic() + _CHECK_SECONDS
        while pid and is_running(pid, mark) and time.monotonic() < end:
            time.sleep(0.01)
        if pid and not is_running(pid, mark):
            return ServerLost(
                f"the server at {self._endpoint} (pid {pid}) has ended; the session and its tensors are lost"
            )
        return ServerLost(
            f"the connection to the server at {self._endpoint} was lost: it was closed, or silent for "
            f"{self._silence:g} s (GT_HEARTBEAT_TIMEOUT); the session and its tensors are lost. Start again with "
            f"gt.shutdown() and gt.connect()"
        )

    def how_it_ended(self, pid: int) -> str:
        return ""

    def close(self) -> None:
        with self._lock:
            if self._link is not None:
                self._link.close()
            self._waiting.close()
        self._payloads.close()
        shared_memory.sweep(os.getpid())
