"""A client's channel to a dispatcher in another process."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from gt.core.errors import ConnectionLost, ProtocolError, ServerLost, SessionError
from gt.core.messages import (
    ACKNOWLEDGED_BYTES,
    COUNTED_BYTES,
    AckBytes,
    AckMessages,
    AckRead,
    Answer,
    Goodbye,
    Hello,
    Instruction,
    Refused,
    TensorRead,
    Waiting,
    Welcome,
)
from gt.core.progress import ProgressDisplay
from gt.version import __version__
from gt.wire import shared_memory
from gt.wire.addresses import LOOPBACK
from gt.wire.client_channel import CLOSED, Received, Upload
from gt.wire.codec import MAX_INSTRUCTIONS, Decoder, Frame, counted_bytes, encode, numbers_of, read_bytes
from gt.wire.connections import Link, NoConnection, open_link
from gt.wire.long_waits import LongWait
from gt.wire.message_stream import MessageGap, MessageStream
from gt.wire.payloads import CopyBytes, Payloads
from gt.wire.process_identity import ServerProcess, host_name, program_name, this_host
from gt.wire.reconnection import Reconnection
from gt.wire.server_keys import CLIENT_FILE
from gt.wire.sockets import MessageWait, SentFrame

log = logging.getLogger("gt.wire")

_CHECK_SECONDS = 0.1
_RETRY_SECONDS = 0.1
_CUT_OFF_SECONDS = 0.02  # between looks for a new connection


class SocketChannel:
    """A connection over a socket. `copy` writes to memory shared with workers of this machine (None: none is shared).
    `keys` is the directory of the servers' keys (None: without encryption). A connection that is silent for `silence`
    seconds is lost. A thread of the channel then connects again, and both ends send what the other has not received.
    Raises ServerLost when the server has ended, and when it could not be reached for the time of the session's lease.
    """

    is_asynchronous = True

    def __init__(self, endpoint: str, copy: CopyBytes | None, keys: Path | None, silence: float) -> None:
        self._endpoint = endpoint
        self._payloads = Payloads(copy)
        self._keys = keys
        self._silence = silence
        self._link: Link | None = None  # None while the client is cut off
        self._stream = MessageStream()
        self._unacknowledged = 0  # bytes received that are not yet acknowledged to the server
        self._lock = threading.Lock()
        self._waiting = MessageWait(self._lock)
        self._decoder: Decoder[Answer] = Decoder(Answer)
        self._server = ServerProcess(endpoint)
        self._reconnection: Reconnection | None = None
        self._failure: ServerLost | None = None
        self._is_closed = False
        self._said_goodbye = False
        self._checked = time.monotonic()

    @property
    def is_full(self) -> bool:
        return self._stream.is_full

    def greet(self, wants_workers: int, timeout: float, display: ProgressDisplay | None = None) -> Welcome:
        """Shake hands with the server, which answers when `wants_workers` workers have joined it. The `display` shows
        the reason of a long wait; without one it is logged."""
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

        with LongWait(display, log=log) as wait:
            while time.monotonic() < deadline:
                wait.tell(describe_wait)
                if self._link is None or self._link.is_lost():
                    reason = self._reopen(hello) or reason
                    continue
                with self._lock:
                    frames = self._next_message()
                for answer, *_ in self._unpack(frames)[0] if frames is not None else ():
                    if isinstance(answer, Welcome):
                        self._begin(answer)
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
        self._stream = MessageStream()
        with contextlib.suppress(ConnectionLost):
            self._link.send(encode([hello]))
        return ""

    def _begin(self, welcome: Welcome) -> None:
        """The session has begun."""
        is_here = welcome.host == this_host()
        self._payloads.open(welcome.session_secret, shares_memory=is_here)
        if is_here:
            self._server.note(welcome.pid)
        self._reconnection = Reconnection(self, self._lock, self._server, welcome, self._keys, self._silence)

    def send(self, batch: Sequence[Instruction], uploads: Sequence[Upload]) -> None:
        packed, payloads = self._payloads.pack(batch, uploads)
        with self._lock:
            self._require_open()
            if self._failure is not None:
                raise self._failure
            self._said_goodbye = type(batch[-1]) is Goodbye
            try:
                for frames in self._stream.encode(packed, payloads, MAX_INSTRUCTIONS):
                    self._transmit(frames)
            finally:
                self._waiting.wake()

    def _transmit(self, frames: Sequence[SentFrame]) -> None:
        """Send a message now, or over the next connection if it is kept. With the lock."""
        if self._link is None:
            return
        try:
            self._link.send(frames)
        except ConnectionLost:
            self._lose_link()

    def _lose_link(self) -> None:
        """The connection is lost. With the lock."""
        link, self._link = self._link, None
        if self._reconnection is not None and link is not None:
            self._reconnection.begin(link)

    def wait(self) -> None:
        with self._lock:
            link = self._link
            if self._is_closed or (link is not None and link.has_message()):
                return
            if link is not None:
                self._waiting.begin()
        if link is None:
            time.sleep(_CUT_OFF_SECONDS)
        else:
            self._waiting.wait(link.descriptor)

    def read_directly(self, ident: int) -> None:
        return None

    def receive(self) -> list[Received]:
        with self._lock:
            self._require_open()
            frames = self._next_message()
            self._waiting.wake()
            if frames is None:
                return self._check_server()
        answers, acks = self._unpack(frames)
        with self._lock:
            if acks and not self._is_closed:
                for kept in self._stream.encode(acks):
                    self._transmit(kept)
            elif self._stream.owes_acknowledgement:
                self._transmit(self._stream.encode_acknowledgement())  # type: ignore[arg-type]
        return answers

    def _next_message(self) -> list[bytes] | None:
        """A message that was not received before, over the last connection. With the lock."""
        while self._link is not None:
            frames = self._link.receive(waits=False)
            try:
                if frames is None or self._stream.accept(frames):
                    return frames
            except MessageGap:
                self._lose_link()
        return None

    def _unpack(self, frames: Sequence[Frame]) -> tuple[list[Received], list[AckRead | AckBytes]]:
        """The answers with their bytes, and the acknowledgements to send to the server."""
        answers, payloads = self._decoder.decode(frames)
        remaining = iter(payloads)
        counts = [len(answer.byte_ranges) if isinstance(answer, TensorRead) else 0 for answer in answers]
        unpacked = [
            self._payloads.unpack(answer, [next(remaining) for _ in range(count)])
            for answer, count in zip(answers, counts, strict=True)
            if not isinstance(answer, AckMessages | Goodbye)
        ]
        if any(isinstance(answer, Goodbye) for answer in answers):
            self.fail(self._server.describe_end())
        reads = [answer for answer in answers if isinstance(answer, TensorRead)]
        acks: list[AckRead | AckBytes] = [AckRead(read.request) for read in reads if read_bytes(read) >= COUNTED_BYTES]
        if numbers_of(frames).number:  # the server counts the messages that it keeps
            self._unacknowledged += sum(map(len, frames)) - counted_bytes(answers)
        if self._unacknowledged >= ACKNOWLEDGED_BYTES:
            acks.append(AckBytes(self._unacknowledged))
            self._unacknowledged = 0
        return unpacked, acks

    def _require_open(self) -> None:
        if self._is_closed:
            raise SessionError(CLOSED)

    def _check_server(self) -> list[Received]:
        """Notice the loss of the server, or of the connection; returns news about that. With the lock."""
        if self._failure is not None:
            raise self._failure
        if time.monotonic() - self._checked < _CHECK_SECONDS:
            return []
        self._checked = time.monotonic()
        if self._server.has_ended():
            self._failure = self._server.describe_end()
            raise self._failure
        self.check_link()
        news = self._reconnection.take_news() if self._reconnection is not None else ""
        return [Received(Waiting(news))] if news is not None else []

    # For the reconnection

    def check_link(self) -> bool:
        """Whether there is a connection. With the lock."""
        if self._link is not None and self._link.is_lost():
            self._lose_link()
        return self._link is not None

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    @property
    def is_over(self) -> bool:
        """Whether the channel was closed, or the session is lost."""
        return self._is_closed or self.has_failed

    @property
    def received(self) -> int:
        return self._stream.received

    def resume(self, link: Link, received: int) -> None:
        """Go on over a new connection. The server has received the messages up to a number."""
        with self._lock:
            if self._is_closed:
                link.close(linger=0)
                return
            self._link = link
            self._stream.restart(received)
            for frames in self._stream.take_sendable():
                self._transmit(frames)

    def fail(self, failure: ServerLost) -> None:
        """The session is lost."""
        self._failure = self._failure or failure

    def how_it_ended(self, pid: int) -> str:
        return ""

    def _say_goodbye(self, link: Link) -> None:
        """The server would keep the session of a client that leaves without a word."""
        if self._reconnection is not None and not self._said_goodbye and not self.has_failed:
            with contextlib.suppress(ConnectionLost):
                link.send(encode([Goodbye()]))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._link is not None:
                self._say_goodbye(self._link)
                self._link.close()
            self._waiting.close()
        if self._reconnection is not None:
            self._reconnection.close()
        self._payloads.close()
        shared_memory.sweep(os.getpid())
